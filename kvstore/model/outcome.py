"""What became of a request, and why its hit ended where it did. Keys and counts, never tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kvstore.model.block import NamespaceId

REQUEST_ID_CHARS_MAX = 256
# vLLM appends the number of the prompt, and 8 random characters, to the id its user knows.
_APPENDED = re.compile(r"(-\d+)?(-[0-9a-f]{8})?")


class Reason(StrEnum):
    """Why a hit ends. The values are on the wire and in metrics: never reused."""

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
    UNKNOWN = "unknown"  # of a daemon that is newer than its client


COMPLETE = "complete"
"""In the place of a reason where nothing ended the hit."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a hit lacks to be longer.

    block: index in the prefix of the block that is missing. group: name of the KV cache group that
    lacks it, "" if all do. left_s: how long before the answer it left, or, of a block without a
    trace, how far back the daemon remembers; 0 where that means nothing. differs: the fields in
    which a namespace that does hold blocks of this model differs.
    """

    reason: Reason
    block: int
    group: str = ""
    left_s: float = 0.0
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request's last acquire was answered; blocks count from the start of its prefix.

    client: who opened the session. asks: acquires with this request id so far. took_s: from the
    call to the answer. age_s: since then. lease: "held", "expired" once it was released, else "".
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


def is_request(asked: str, request_id: str) -> bool:
    """Return whether a request id is the one asked for, as it is or as an engine appends to it."""
    return bool(asked) and bool(
        request_id.startswith(asked) and _APPENDED.fullmatch(request_id, len(asked))
    )


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive blocks [begin, end) of a prefix that are in the same state now.

    dram, file: every part is there. reason: why the blocks are no hit, None if they are.
    left_s: as in `Ending`, the least of the range.
    """

    begin: int
    end: int
    dram: bool
    file: bool
    reason: Reason | None = None
    left_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """A prefix as it is now: its ranges in order, how long it would hit and what ends that."""

    ranges: tuple[BlockRange, ...]
    hit_blocks: int
    resident_blocks: int
    ending: Ending | None
