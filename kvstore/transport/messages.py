"""Translate between the nouns and their protobuf messages.

Numbers of extents are shifted by a base drawn at each start of the daemon: a slot that an engine
still remembers from a dead daemon then lies in no extent of the new one. They entitle to nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np

from kvstore.model.block import (
    KEY_NBYTES,
    PAGE_NBYTES,
    BlockKey,
    Committed,
    FilePlace,
    Grant,
    Namespace,
    Part,
    Slot,
    Span,
)
from kvstore.model.errors import Incompatible, InvalidRequest
from kvstore.model.member import Holds, NodeId, Origin
from kvstore.rpc.v1 import kvstore_pb2 as pb

NO_SLOT = NO_PLACE = 0xFFFFFFFF
PATH_CHARS_MAX = 4096
OFFSET_MAX = 1 << 62
SPANS_MAX = 4096
CHUNK_NBYTES_MAX = 1 << 20
# A grant of 65536 slots has about 1.2 MB; requests are smaller.
MESSAGE_NBYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class Epoch:
    """One start of a daemon: its name, and what it adds to its extents' numbers."""

    name: str
    extent_base: int

    @classmethod
    def new(cls) -> Epoch:
        return cls(secrets.token_hex(8), secrets.randbits(31))

    def extent_out(self, extent: int) -> int:
        return self.extent_base + extent


def grant_to_message(grant: Grant, epoch: Epoch) -> pb.GrantReply:
    files = list(dict.fromkeys(place.path for place in grant.places if place))
    numbers = {path: number for number, path in enumerate(files)}
    placed = grant.places if files else ()
    return pb.GrantReply(
        lease=grant.lease_id,
        deadline_s=grant.deadline_s,
        spans=spans_to_messages(grant.spans),
        extents=[epoch.extent_out(slot.extent) if slot else NO_SLOT for slot in grant.slots],
        offsets=[slot.offset if slot else 0 for slot in grant.slots],
        checksums=grant.checksums,
        hit_blocks=grant.hit_blocks,
        leased=grant.leased,
        refused=grant.refused,
        files=files,
        place_files=[numbers[place.path] if place else NO_PLACE for place in placed],
        place_offsets=[place.offset if place else 0 for place in placed],
        nbytes=_sizes(grant) if grant.varies else (),
        ready_blocks=grant.ready_blocks,
        present=present_to_message(grant.present) if grant.present else b"",
    )


def present_to_message(present: Sequence[bool]) -> bytes:
    """Write a bit for each block or record."""
    return np.packbits(np.array(present, bool), bitorder="little").tobytes()


def present_of(message: bytes, count: int) -> tuple[bool, ...]:
    """Read a bit for each block or record. Raises Incompatible."""
    if len(message) != -(-count // 8):
        raise Incompatible(f"the daemon said of {8 * len(message)} blocks whether they are stored")
    bits = np.unpackbits(np.frombuffer(message, np.uint8), count=count, bitorder="little")
    return tuple(bits.astype(bool).tolist())


def _sizes(grant: Grant) -> list[int]:
    places = grant.places or (None,) * len(grant.slots)
    held = [slot or place for slot, place in zip(grant.slots, places, strict=True)]
    return [each.nbytes if each else 0 for each in held]


def grant_of(reply: pb.GrantReply, namespace: Namespace, *, reading: bool) -> Grant:
    """Read a grant; slot sizes are the namespace's, or their own. Raises Incompatible.

    reading: it is a lease, so every slot has a checksum.
    """
    try:
        spans = spans_of(reply.spans)
        nbytes = [namespace.record_nbytes(part) for part, _, _ in spans]
    except InvalidRequest as error:
        raise Incompatible(f"the daemon sent a grant of something else: {error}") from error
    counts = [end - begin for _, begin, end in spans]
    if min(counts, default=0) < 0:
        raise Incompatible("the daemon sent a grant with a span that ends before it begins")
    checksums = sum(counts) if reading else len(reply.checksums)
    if not sum(counts) == len(reply.extents) == len(reply.offsets) or checksums != len(
        reply.checksums
    ):
        raise Incompatible("the daemon sent a grant whose spans and slots do not agree")
    most = [*chain.from_iterable(map(repeat, nbytes, counts))]
    sizes: Sequence[int] = reply.nbytes or most
    if len(sizes) != len(most) or any(
        size > bound for size, bound in zip(sizes, most, strict=True)
    ):
        raise Incompatible("the daemon sent a grant with sizes of something else")
    if reply.nbytes and not namespace.varies:
        raise Incompatible("the daemon sent sizes for records that all have one")
    return Grant(
        lease_id=reply.lease,
        deadline_s=reply.deadline_s,
        spans=spans,
        slots=_slots_of(reply, sizes),
        checksums=tuple(reply.checksums),
        hit_blocks=reply.hit_blocks,
        leased=reply.leased,
        refused=reply.refused,
        places=_places_of(reply, sizes),
        varies=bool(reply.nbytes),
        ready_blocks=reply.ready_blocks if reply.HasField("ready_blocks") else None,
        present=present_of(reply.present, len(sizes)) if reply.present else (),
    )


def _slots_of(reply: pb.GrantReply, sizes: Sequence[int]) -> tuple[Slot | None, ...]:
    slots = map(Slot._make, zip(reply.extents, reply.offsets, sizes, strict=True))
    if NO_SLOT not in reply.extents:
        return tuple(slots)
    return tuple(None if slot.extent == NO_SLOT else slot for slot in slots)


def _places_of(reply: pb.GrantReply, sizes: Sequence[int]) -> tuple[FilePlace | None, ...]:
    """Read the places of a lease, none if it has none. Raises Incompatible."""
    if not reply.place_files:
        return ()
    if not len(reply.place_files) == len(reply.place_offsets) == len(sizes):
        raise Incompatible("the daemon sent a grant whose slots and places do not agree")
    if any(len(path) > PATH_CHARS_MAX or not path.startswith("/") for path in reply.files):
        raise Incompatible("the daemon sent a file that has no absolute path")
    places: list[FilePlace | None] = []
    for file, offset, nbytes, extent in zip(
        reply.place_files, reply.place_offsets, sizes, reply.extents, strict=True
    ):
        if file == NO_PLACE:
            places.append(None)
            continue
        out = file >= len(reply.files) or offset % PAGE_NBYTES or offset > OFFSET_MAX
        if out or extent != NO_SLOT:
            raise Incompatible("the daemon sent a place that is none")
        places.append(FilePlace(reply.files[file], offset, nbytes))
    return tuple(places)


def origin_to_message(origin: Origin | None) -> pb.Origin | None:
    if origin is None:
        return None
    return pb.Origin(source=origin.source, expect_blocks=origin.expect_blocks)


def holders_to_messages(holders: Iterable[Holds]) -> list[pb.Holder]:
    return [
        pb.Holder(
            node=each.node,
            address=each.address,
            engines=each.engines,
            blocks=each.blocks,
            age_s=each.age_s,
        )
        for each in holders
    ]


def holders_of(messages: Iterable[pb.Holder]) -> tuple[Holds, ...]:
    """Return what a daemon says of others."""
    return tuple(
        Holds(
            NodeId(each.node),
            each.address,
            tuple(each.engines),
            each.blocks,
            each.age_s if each.HasField("age_s") else None,
        )
        for each in messages
    )


def spans_to_messages(spans: Iterable[Span]) -> list[pb.Span]:
    return [
        pb.Span(group=part.group, shard=part.shard, begin=begin, end=end)
        for part, begin, end in spans
    ]


def spans_of(messages: Sequence[pb.Span]) -> tuple[Span, ...]:
    """Read spans; whether they fit keys and namespace is checked where both are known."""
    if len(messages) > SPANS_MAX:
        raise InvalidRequest(f"{len(messages)} spans in one call; the limit is {SPANS_MAX}")
    return tuple(Span(Part(m.group, m.shard), m.begin, m.end) for m in messages)


def committed_to_message(done: Committed) -> pb.CommitReply:
    return pb.CommitReply(
        committed=done.committed,
        existing=done.existing,
        refused=done.refused,
        durable=done.durable,
    )


def committed_of(reply: pb.CommitReply) -> Committed:
    return Committed(reply.committed, reply.existing, reply.refused, reply.durable)


def parent_of(key: bytes) -> BlockKey | None:
    """Read an optional key: empty means there is none. Raises InvalidRequest on another length."""
    if key and len(key) != KEY_NBYTES:
        raise InvalidRequest(f"a block key has {KEY_NBYTES} bytes, not {len(key)}")
    return BlockKey(key) if key else None
