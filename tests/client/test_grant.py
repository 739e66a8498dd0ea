"""A client does not believe a grant that contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import Incompatible
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.testing.samples import sample_namespace
from kvstore.transport.messages import grant_of


def reply(*spans: tuple[int, int], slots: int) -> pb.GrantReply:
    return pb.GrantReply(
        lease=1,
        spans=[pb.Span(group=0, shard=0, begin=begin, end=end) for begin, end in spans],
        extents=[1] * slots,
        offsets=[0] * slots,
        checksums=[0] * slots,
    )


def test_a_grant_has_a_slot_and_a_checksum_for_every_block_of_its_spans() -> None:
    grant = grant_of(reply((0, 2), (5, 6), slots=3), sample_namespace(), reading=True)
    assert len(grant.slots) == len(grant.checksums) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"spans": [(0, 2)], "slots": 1},
        {"spans": [(3, 1)], "slots": 0},
        {"spans": [(0, 4), (3, 1)], "slots": 2},
        {"spans": [(0, 4), (3, 1)], "slots": 4},
    ],
)
def test_spans_and_slots_that_do_not_agree_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Incompatible):
        grant_of(reply(*wrong["spans"], slots=wrong["slots"]), sample_namespace(), reading=True)
