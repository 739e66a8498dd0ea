"""Prefixes of a lossy namespace, example by example: what is listed, and what there is room for."""

from __future__ import annotations

from kvstore.decide.index import StoredFrame
from tests.store.lossy_node import BASE, BASES, FINE, FINES, SPEC, LossyNode, chain


def test_a_fine_part_without_its_base_is_no_block() -> None:
    """The daemon may be killed between the two, or the base lie on a disk that is missing."""
    with LossyNode(None) as node:
        key = chain(1)[1]
        for part, nbytes, listed in ((FINES[0], FINE, []), (BASES[0], BASE, [key])):
            frame = StoredFrame(object(), part, 0, (nbytes,), 1)
            node.planner.recovery.add(
                SPEC.id, frame, [(0, key, nbytes, 7)], first_block=1, parent=None
            )
            assert [item.key for item in node.store.report.scan(None, None, 10)] == listed
            assert [item.key for item in node.store.report.scan(SPEC.id, None, 10)] == listed
