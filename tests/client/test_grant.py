"""A client does not believe a grant that contradicts itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore import FilePlace, Incompatible
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.testing.samples import sample_namespace
from kvstore.transport.messages import NO_PLACE, NO_SLOT, Epoch, grant_of, grant_to_message


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


def placed(**fields: Any) -> pb.GrantReply:
    """Two blocks: the first in a file, the second in a slot."""
    wire = reply((0, 2), slots=2)
    wire.extents[0] = NO_SLOT
    good = {"files": ["/a/b"], "place_files": [0, NO_PLACE], "place_offsets": [8192, 0]}
    wire.MergeFrom(pb.GrantReply(**(good | fields)))
    return wire


def test_places_travel_as_they_are() -> None:
    grant = grant_of(placed(), sample_namespace(), reading=True)
    nbytes = sample_namespace().groups[0].record_nbytes
    assert grant.places == (FilePlace("/a/b", 8192, nbytes), None)
    epoch = Epoch("e", 3)
    sent = grant_to_message(replace(grant, lease_id=1), epoch)
    assert grant_of(sent, sample_namespace(), reading=True).places == grant.places
    none = grant_to_message(replace(grant, places=(None, None)), epoch)
    assert grant_of(none, sample_namespace(), reading=True).places == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": ["relative"]},
        {"files": ["/" + "a" * 5000]},
        {"place_files": [1, NO_PLACE]},
        {"place_files": [NO_PLACE, 0]},
        {"place_files": [0]},
        {"place_offsets": [8192]},
        {"place_offsets": [8191, 0]},
        {"place_offsets": [1 << 63, 0]},
    ],
)
def test_places_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Incompatible):
        grant_of(placed(**wrong), sample_namespace(), reading=True)
