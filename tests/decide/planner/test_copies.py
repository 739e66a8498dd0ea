"""What came from another host is written to files when it is used a second time, not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.decide.planner.copies import Copies
from kvstore.model.block import Span
from kvstore.model.checksum import checksum
from tests.decide.planner.spaces import at_once
from tests.store.node import FULL, SPEC, WINDOW, Node, chain, record_bytes

KEYS = chain(1, 6)


def _borrow(node: Node) -> None:
    spans = (Span(FULL, 0, len(KEYS)), Span(WINDOW, 0, len(KEYS)))
    reserving = node.store.puts.reserve(
        DAEMON_SESSION, SPEC.id, KEYS, first_block=0, parent=None, spans=spans, copy=True
    )
    grant = node.run(reserving)
    sums = []
    records = [record_bytes(key, span.part) for span in spans for key in KEYS]
    for slot, record in zip(grant.slots, records, strict=True):
        assert slot is not None
        node.store.view(slot)[:] = record
        sums.append(checksum(record))
    node.run(node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums))


def _framed(node: Node) -> int:
    blocks = [node.planner.index.by_key(key) for key in KEYS]
    return sum(record.frame is not None for block in blocks if block for record in block.records)


@pytest.mark.parametrize("mode", ["all", "demotion", "second_use"])
def test_a_copy_is_written_at_its_second_use(tmp_path: Path, mode: str) -> None:
    with Node(
        tmp_path,
        write_on_demotion=mode == "demotion",
        write_on_second_use=mode == "second_use",
    ) as node:
        _borrow(node)
        assert node.get(KEYS) == len(KEYS)  # the request it was borrowed for
        assert node.flush()
        assert _framed(node) == 0
        assert node.get(KEYS) == len(KEYS)
        if mode == "demotion":
            at_once(node.planner.admission.offer_all())
        assert node.flush()
        assert _framed(node) == 2 * len(KEYS)


def test_a_copy_used_once_leaves_without_a_write(tmp_path: Path) -> None:
    with Node(tmp_path, write_on_demotion=True) as node:
        _borrow(node)
        assert node.get(KEYS) == len(KEYS)
        for name in range(2, 20):
            node.put(chain(name), 0, 20)
        assert node.get(KEYS) < len(KEYS)
        assert node.flush()
        assert _framed(node) == 0


def test_only_the_start_before_the_first_copy_is_this_hosts_own() -> None:
    copies, all_here = Copies(), KEYS.__contains__
    copies.came(KEYS[2])
    assert copies.use(KEYS, all_here) == (KEYS[:2], False)
    assert copies.use(KEYS, all_here) == (KEYS, True)
    assert copies.use(KEYS, all_here) == (KEYS, False)
    copies.came(KEYS[1])
    copies.left(KEYS[1])
    assert len(copies) == 0


def test_what_lies_behind_a_gap_is_not_used() -> None:
    copies = Copies()
    copies.came(KEYS[4])
    for _ in range(3):
        copies.use(KEYS, lambda key: key != KEYS[3])
    assert copies.use(KEYS, KEYS.__contains__) == (KEYS[:4], False)
    assert copies.use(KEYS, KEYS.__contains__) == (KEYS, True)


def test_a_copy_behind_a_newer_one_is_written_with_it_and_not_forgotten() -> None:
    copies, all_here = Copies(), KEYS.__contains__
    copies.came(KEYS[4])
    copies.use(KEYS, all_here)
    copies.came(KEYS[2])
    assert copies.use(KEYS, all_here) == (KEYS[:2], False)
    assert KEYS[4] in copies, "nobody has written it"
    assert copies.use(KEYS, all_here) == (KEYS, True)
    assert len(copies) == 0
