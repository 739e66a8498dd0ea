"""What a daemon asks of a peer (`PeerLink`), and what a peer is answered with (`Lender`).

A link is one peer, met and believed, until it ends: afterwards every call raises PeerGone, and
whoever owns the link dials again. What is beside the plain idea:

- A READ that waits for blocks still being computed waits on the control connection (`arrival` of
  the lender): a wait holds no bulk connection, no lease and no thread. Blocks that have not arrived
  when `wait_s` is over are lent as not there: size 0.
- `read` sends the request and returns with the head of the answer; the records are received by
  `Incoming.fill`, which the caller calls once it has slots. Whoever does not fill must `close`.
- A namespace is registered with a peer by the link itself, when the peer does not know it.
- HEADS pages a snapshot by the heads' own order: a chunk has all heads from `cursor` on, up to the
  next chunk's cursor, so the lender remembers nothing between two chunks.
- Deadlines are `time.monotonic()` of the caller; on the wire they are durations.

What a peer says is a hint. Bytes count only after `fill` has returned: then each record had its
checksum, the lender held its lease until the last byte, and it was the same start of the lender.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from kvstore.model.block import BlockKey, FilePlace, Namespace, NamespaceId, Span
from kvstore.model.errors import Unavailable
from kvstore.model.member import Member, NodeId
from kvstore.model.tenant import TenantId

KEYS_MAX = 8192  # in one MATCH or READ
NAMED_KEYS_MAX = 1024  # in one CORRUPT or DELETE
RECORDS_MAX = 8192  # in one READ; a block has at most half of it
READ_NBYTES_MAX = 16 << 20  # of one READ, or a single block if that is larger
HEADS_MAX = 1 << 16  # in one chunk of a snapshot
CHANGES_MAX = 1 << 15  # in one answer of numbered changes
HEAD_NBYTES = 8
READ_WAIT_S_MAX = 60.0  # for blocks that are still being computed
HEADS_WAIT_S_MAX = 30.0


class PeerError(Unavailable):
    """A peer did not do what it was asked. What is missing is asked of others, or computed.

    outcome: the word for outcomes and metrics. reason: what it was, in one word.
    """

    outcome: ClassVar[str] = "peer_gone"

    def __init__(self, message: str, *, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s, reason=reason)


class PeerGone(PeerError):
    """The link is over, the peer cannot answer this, or its lease was over too soon.

    reason: "connection", "closed", "lease", "failed".
    """

    def __init__(self, message: str, *, reason: str = "connection") -> None:
        super().__init__(message, reason=reason)


class PeerBusy(PeerError):
    """The peer serves others now, or is about to stop: ask after `retry_after_s`.

    reason: "busy" or "draining".
    """

    outcome = "peer_busy"

    def __init__(self, message: str, *, reason: str = "busy", retry_after_s: float = 1.0) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s)


class PeerSlow(PeerError):
    """Nothing came for too long, or the deadline was over first.

    reason: "silent" or "deadline".
    """

    outcome = "peer_slow"

    def __init__(self, message: str, *, reason: str = "silent") -> None:
        super().__init__(message, reason=reason)


class PeerCorrupt(PeerError):
    """The peer sent what it should not have.

    records: the places of records whose checksums did not match, in the order of the spans; empty
    where the answer as a whole was wrong. reason: "checksum", "answer", "sealed".
    """

    outcome = "peer_corrupt"

    def __init__(
        self, message: str, *, reason: str = "answer", records: Sequence[int] = ()
    ) -> None:
        super().__init__(message, reason=reason)
        self.records = tuple(records)


class PeerIncompatible(PeerError):
    """The two daemons do not speak with each other until one of them is changed.

    reason: "protocol" (no version in common), "fleet" (another one), "self" (it is this daemon),
    "node" (its id is ours, or not the expected one), "certificate" (expired, of another authority,
    or not for this node), "tls" (one side has it, the other not), "bulk" (sealed there, clear
    here), "tenant" (it has none of that name, or knows no tenants), "request" (the peer refuses
    what we sent).
    """

    outcome = "peer_incompatible"

    def __init__(self, message: str, *, reason: str, peer: Member | None = None) -> None:
        super().__init__(message, reason=reason, retry_after_s=60.0)
        self.peer = peer  # if it said who it is


@dataclass(frozen=True, slots=True)
class PeerMatch:
    """How long a prefix would hit at a peer, and how much of it is in its DRAM. Nothing is leased.

    busy: it would not lend now.
    """

    hit_blocks: int
    resident_blocks: int
    busy: bool = False


@dataclass(frozen=True, slots=True)
class HeadsAsk:
    """What to tell of a peer's heads.

    instance: the start of the peer that `since` and `cursor` are of, "" for none yet. level: only
    heads whose (index + 1) is divisible by g x 2^level. since: the number of the first change that
    is not known, -1 for a snapshot. cursor: of a snapshot, the first head that is wanted. wait_s:
    for changes, if there are none yet. tenant: set by the link that sends it.
    """

    instance: str = ""
    level: int = 0
    since: int = -1
    cursor: int = 0
    wait_s: float = 0.0
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class HeadsReply:
    """A chunk of a snapshot, or numbered changes.

    instance: the start of the peer it is of: if not the one that was asked for, it is the beginning
    of a snapshot. since: what to ask for next, when the snapshot is complete; of its first chunk,
    because changes are applied over the whole. snapshot: whether `heads` are all there are from
    the asked cursor to the next one; otherwise they are changes. cursor: of a snapshot, where it
    goes on; 0: complete. heads: 8 bytes each; a snapshot's in ascending order as little-endian
    numbers. came: of changes, one byte each: 1 for a head that came, 0 for one that left.
    """

    instance: str
    level: int
    since: int
    snapshot: bool
    cursor: int = 0
    heads: bytes = b""
    came: bytes = b""


class Limbo(Protocol):
    """What may still write into memory, until it is done: a future of the event loop."""

    def done(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...


class Incoming(Protocol):
    """A READ under way.

    sizes, checksums: one item per record over the spans, in order; size 0: it is not there. limbo:
    after a `fill` that failed or was cancelled, what may still write into its targets; None:
    nothing. Then they must not be used for anything else until this is done.
    """

    @property
    def limbo(self) -> Limbo | None: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def checksums(self) -> Sequence[int]: ...

    async def fill(self, targets: Sequence[memoryview | None]) -> None:
        """Receive the records into `targets`, of their sizes; None drops one that is not wanted.

        Call it once. When it has returned, every target has the record its checksum says. When it
        has returned, raised or was cancelled, nothing writes into targets any more, unless `limbo`
        says so. Raises PeerError.
        """

    async def close(self) -> None:
        """Give up what was not filled. Harmless after `fill`."""


class PeerLink(Protocol):
    """One peer. peer: as its HELLO said, or its last answer to a ping. open: calls may succeed.
    Lives on the event loop.

    What it asks is about the blocks of one tenant: of the daemon's own, unless it was made by `of`.
    """

    peer: Member

    @property
    def fault(self) -> PeerCorrupt | None:
        """What ended the link, if the peer sent what nobody can read: to whomever it was sent."""

    @property
    def medium(self) -> str:
        """One word: how records come, unless they lie in files: tcp, ucx or nixl."""

    def of(self, tenant: TenantId) -> PeerLink:
        """Return the same link, for another tenant's blocks. Its calls raise PeerIncompatible,
        reason "tenant", if the peer does not have that tenant."""

    @property
    def open(self) -> bool: ...

    @property
    def read_bytes(self) -> Mapping[str, int]:
        """How many bytes of records have come over this link: tcp, and onesided."""

    @property
    def worn(self) -> bool:
        """Whether to make another one in its place."""

    async def match(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        refined: bool = False,
        registers: bool = True,
        deadline: float,
    ) -> PeerMatch:
        """Ask how long a prefix would hit. Raises PeerError; InvalidRequest over KEYS_MAX.

        registers: False: of a namespace that the peer does not know, it has nothing.
        """

    async def read(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        *,
        refined: bool = False,
        wait_s: float = 0.0,
        deadline: float,
    ) -> Incoming:
        """Ask for the records over `spans`. The deadline holds for their last byte, too.

        At most RECORDS_MAX records, and READ_NBYTES_MAX bytes of more than one block: else
        InvalidRequest. Raises PeerError.
        """

    async def heads(self, ask: HeadsAsk, *, deadline: float) -> HeadsReply:
        """Ask for heads. Raises PeerError."""

    async def corrupt(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, deadline: float
    ) -> None:
        """Tell the peer that bytes of these blocks were wrong: it verifies its own. Raises
        PeerError; InvalidRequest over NAMED_KEYS_MAX."""

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None, *, deadline: float
    ) -> None:
        """Delete blocks, None: the whole namespace, or all of them; return when the peer has.
        Raises PeerError; InvalidRequest over NAMED_KEYS_MAX."""

    async def ping(self, deadline: float) -> float:
        """Return the seconds of a round trip. Raises PeerError."""

    async def close(self) -> None:
        """End the link, and what is under way on it."""


class LentRecord(NamedTuple):
    """One record that is lent: in a leased slot (`view`), or in a file (`place`)."""

    checksum: int
    nbytes: int
    view: memoryview | None = None
    place: FilePlace | None = None


class Loan(Protocol):
    """What one READ has leased. records: over its spans, in order; None: not there."""

    @property
    def records(self) -> Sequence[LentRecord | None]: ...

    def held(self) -> bool:
        """Say whether every slot and place was the reader's until now. Called once, when the last
        byte was sent, on the event loop."""

    def release(self) -> None:
        """End the lease. Called once, on the event loop, after the last use of any view."""


class Lender(Protocol):
    """The daemon behind the server of peers. Called on the event loop.

    Each method may raise UnknownNamespace (the borrower then registers it and asks again) and
    InvalidRequest; others of KVStoreError are told as "failed". Nothing that it is given is
    trusted, except that keys have 32 bytes and spans lie within them.
    """

    def engines_busy(self) -> bool:
        """Whether engines of this host copy records now. Called by any thread."""

    def register(self, namespace: Namespace) -> None:
        """Know a namespace from now on, as with a client's. Raises InvalidRequest, Unavailable."""

    async def match(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], skip_blocks: int, refined: bool
    ) -> PeerMatch:
        """Answer at once what is stored, in any tier of this host."""

    async def arrival(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], spans: Sequence[Span]
    ) -> None:
        """Return when all parts are stored. It is cancelled when the wait is over; raises PeerBusy
        if too many wait."""

    async def lend(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        refined: bool,
        borrower: NodeId,
    ) -> Loan:
        """Lease what is stored of these parts to a peer, without displacing anything. Raises
        PeerBusy."""

    async def heads(self, ask: HeadsAsk) -> HeadsReply:
        """Answer a chunk, or changes, waiting for the first one at most `ask.wait_s`."""

    async def corrupt(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        """Verify our own copy of these blocks, soon."""

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> None:
        """Delete them here; return when it is done. None: all of a namespace, or all there is."""
