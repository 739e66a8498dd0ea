"""What a hint is answered with.

A hint says what its sender knows of the future: a session is over, will be back, should stay. It
may be wrong, late or missing: that costs hits, never a right answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.model.block import BlockKey, Namespace, NamespaceId
from kvstore.model.keys import KeyChain, root_key

SESSION_ID_CHARS_MAX = 256
EXPECT_S_MAX = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Prefix:
    """The blocks a hint is about, from the start of their prefix on; `session_id` names their
    conversation, for hints that come later."""

    namespace_id: NamespaceId
    keys: Sequence[BlockKey]
    session_id: str = ""

    @classmethod
    def of_tokens(
        cls,
        namespace: Namespace,
        tokens: Sequence[int],
        *,
        cache_salt: bytes = b"",
        session_id: str = "",
    ) -> Prefix:
        """Name the full blocks of a prompt's tokens. Raises InvalidRequest for what is no token."""
        chain = KeyChain(root_key(namespace.id, cache_salt), namespace.block_tokens)
        return cls(namespace.id, chain.update(tokens), session_id)


class HintKind(StrEnum):
    """What a hint asks for. The values are in metrics: never reused."""

    END = "end"
    EXPECT = "expect"
    PREFETCH = "prefetch"
    PIN = "pin"
    DEMOTE = "demote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A hint about a conversation, or (with a namespace) about a prefix, which then is that
    conversation's, if one is named.

    seconds: until an expected request comes, or for how long to pin. bytes_max: to pin; 0: any.
    wait_s: how long bytes may take to come up, or to be written down.
    """

    kind: HintKind
    session_id: str = ""
    namespace_id: NamespaceId | None = None
    keys: Sequence[BlockKey] = ()
    seconds: float = 0.0
    bytes_max: int = 0
    wait_s: float = 0.0


class Short(StrEnum):
    """Why a hint did less than it could. The values are on the wire: never reused."""

    NOTHING = ""
    UNKNOWN_SESSION = "unknown_session"  # never seen, or forgotten for newer ones
    NOT_STORED = "not_stored"
    SHARED = "shared"  # somebody else uses the rest of the blocks, or may
    CAP = "cap"  # of what pins, or leases, may hold
    DEADLINE = "deadline"
    NO_ROOM = "no_room"
    READ_FAILED = "read_failed"
    NO_FILE_TIER = "no_file_tier"
    NOT_WRITTEN = "not_written"  # to the file tier, so it has to stay
    BUSY = "busy"  # too many hints of this kind are being carried out
    UNKNOWN = "unknown"  # of a daemon that is newer than its client


@dataclass(frozen=True, slots=True)
class HintReport:
    """What a hint has done, and how long that took.

    blocks: of the prefix it named, that are stored. done_blocks, done_bytes: of these, to which
    what was asked for has been done now: the session has them alone and is over; they are expected,
    have come up, are pinned, have left the arena. short: why not to all. lasts_s: how long from now
    what was done will last; 0: as long as eviction lets it.
    """

    kind: HintKind
    blocks: int = 0
    done_blocks: int = 0
    done_bytes: int = 0
    short: Short = Short.NOTHING
    took_s: float = 0.0
    lasts_s: float = 0.0
