"""How a request was answered, and why its hit ended. Keys and counts, never tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvstore.model.block import NamespaceId

REQUEST_ID_CHARS_MAX = 256
# vLLM appends the number of the prompt, and 8 random characters, to the id its user knows.
_APPENDED = re.compile(r"(-\d+)?(-[0-9a-f]{8})?")


class Ready(NamedTuple):
    """How far the slots of a lease are filled: those of its first `blocks` blocks are. over: the
    others will not be; given_up: only because it takes too long."""

    blocks: int
    over: bool
    given_up: bool = False


class Reason(StrEnum):
    """Why a hit ends. The values are on the wire and in metrics, and are never reused."""

    NEVER_STORED = "never_stored"
    BEING_WRITTEN = "being_written"
    LOST = "lost"
    EVICTED = "evicted"
    DELETED = "deleted"
    CLEARED = "cleared"
    CORRUPT = "corrupt"
    OTHER_NAMESPACE = "other_namespace"
    DEADLINE = "deadline"
    NO_ROOM = "no_room"
    READ_FAILED = "read_failed"
    DEVICE_OUT = "device_out"
    LEASED_BYTES = "leased_bytes"
    SLOWER = "slower_than_recompute"
    COARSE = "coarse"  # fine parts were asked for, and the base part alone is stored
    PEER_GONE = "peer_gone"  # another daemon has more of the prefix, and ended or let go of it
    PEER_BUSY = "peer_busy"  # it serves others
    PEER_SLOW = "peer_slow"  # it did not answer in time
    PEER_CORRUPT = "peer_corrupt"  # it sent wrong bytes
    POOL_GONE = "pool_gone"  # the pool had more of the prefix, and lost it or does not answer
    POOL_SLOW = "pool_slow"  # it did not answer in time
    POOL_CORRUPT = "pool_corrupt"  # its bytes are not what was put
    OVER_SHARE = "over_share"  # evicted because its tenant gave room back that was lent to it
    UNKNOWN = "unknown"  # from a daemon that is newer than its client


POOL_REASONS = frozenset((Reason.POOL_GONE, Reason.POOL_SLOW, Reason.POOL_CORRUPT))

COMPLETE = "complete"
"""In the place of a reason where nothing ended the hit."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a hit is not longer.

    block: index of the missing block in the prefix. group: name of the KV cache group that lacks
    it, "" if all do. left_s: seconds since the block was dropped; for NEVER_STORED, how far back
    the daemon remembers; 0 for other reasons. differs: the fields in which a namespace that has
    blocks of this model differs.
    """

    reason: Reason
    block: int
    group: str = ""
    left_s: float = 0.0
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request's last acquire was answered. Blocks are counted from the start of its prefix.

    client: name of the session. asks: acquires with this request id so far. took_s: seconds from
    the call to the answer. age_s: seconds since the answer. lease: "held" or "expired" after its
    release, else "". base_blocks: of the hit, how many came without a fine part that they should
    have. peer_blocks, peer: how many came from other daemons, and the node id of the one that gave
    most, or should have. pool_blocks: how many came from the pool. last_key: of the last block that
    was asked for. session_id: the conversation, "" if nobody told.
    """

    request_id: str
    client: str
    namespace_id: NamespaceId
    asked_blocks: int
    skip_blocks: int
    hit_blocks: int
    file_blocks: int
    object_blocks: int
    took_s: float
    ending: Ending | None
    asks: int = 1
    age_s: float = 0.0
    lease: str = ""
    base_blocks: int = 0
    peer_blocks: int = 0
    peer: str = ""
    pool_blocks: int = 0
    last_key: bytes = b""
    session_id: str = ""


def is_request(asked: str, request_id: str) -> bool:
    """Return whether a request id is the one asked for, or that id with an engine's suffix."""
    return bool(asked) and bool(
        request_id.startswith(asked) and _APPENDED.fullmatch(request_id, len(asked))
    )


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive blocks [begin, end) of a prefix that are in the same state now.

    dram, file: the tier has every part. reason: why the blocks are not a hit; None if they are.
    left_s: as in `Ending`, the smallest of the range.
    """

    begin: int
    end: int
    dram: bool
    file: bool
    reason: Reason | None = None
    left_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """A prefix as it is stored now: its ranges in order, its hit length, and why the hit ends."""

    ranges: tuple[BlockRange, ...]
    hit_blocks: int
    resident_blocks: int
    ending: Ending | None
