"""Hints and their answers.

A hint says what a client expects: a session is over, will ask again, or should keep its blocks. A
hint may be wrong, late or missing. That can cost hits; it never changes an answer.
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
    """The blocks that a hint is about, from the start of their prefix.

    session_id: names their conversation for later hints.
    """

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
        """Name the full blocks of a prompt's tokens. Raises InvalidRequest for an invalid token."""
        chain = KeyChain(root_key(namespace.id, cache_salt), namespace.block_tokens)
        return cls(namespace.id, chain.update(tokens), session_id)


class HintKind(StrEnum):
    """What a hint asks for. The values are in metrics and are never reused."""

    END = "end"
    EXPECT = "expect"
    PREFETCH = "prefetch"
    PIN = "pin"
    DEMOTE = "demote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A hint about a conversation, or, with a namespace, about a prefix. With both, the prefix
    belongs to that conversation from now on.

    seconds: until an expected request comes, or for how long to pin. bytes_max: most bytes to pin;
    0: no limit. wait_s: how long a promotion, or a write to the file tier, may take.
    """

    kind: HintKind
    session_id: str = ""
    namespace_id: NamespaceId | None = None
    keys: Sequence[BlockKey] = ()
    seconds: float = 0.0
    bytes_max: int = 0
    wait_s: float = 0.0


class Short(StrEnum):
    """Why a hint changed fewer blocks than it named. The values are on the wire, never reused."""

    NOTHING = ""
    UNKNOWN_SESSION = "unknown_session"  # never seen, or replaced by newer ones
    NOT_STORED = "not_stored"
    SHARED = "shared"  # other sessions use the rest of the blocks, or hold them
    CAP = "cap"  # pins or leases hold as much as is allowed
    DEADLINE = "deadline"
    NO_ROOM = "no_room"
    READ_FAILED = "read_failed"
    NO_FILE_TIER = "no_file_tier"
    NOT_WRITTEN = "not_written"  # to the file tier yet, so it stays in DRAM
    BUSY = "busy"  # too many hints of this kind are in progress
    UNKNOWN = "unknown"  # from a daemon that is newer than its client


@dataclass(frozen=True, slots=True)
class HintReport:
    """What a hint changed, and how long that took.

    blocks: stored blocks of the prefix that the hint named. done_blocks, done_bytes: those of them
    that the hint changed: marked as ended or expected, promoted, pinned, or demoted. short: why it
    did not change all. took_s: time to do it. lasts_s: how long the change lasts; 0: until the
    blocks are evicted.
    """

    kind: HintKind
    blocks: int = 0
    done_blocks: int = 0
    done_bytes: int = 0
    short: Short = Short.NOTHING
    took_s: float = 0.0
    lasts_s: float = 0.0
