"""Where a prefix may come from beside the tiers of this host: a bucket, another host.

A source looks for a prefix, and says which of its records it has; `Fetch` decides which of them are
worth having, makes room for them, and takes them in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstore.decide.index import StoredBlock
from kvstore.model.block import BlockKey, NamespaceId, Part, Span
from kvstore.model.outcome import Reason
from kvstore.move.load_race import LoadRaces
from kvstore.peer.base import Limbo

WINDOW_NBYTES = 16 << 20  # of records published at once: the first are up while the last are asked
STEP_BLOCKS = 128  # looked at before others run: about a millisecond


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive blocks of a prefix, the parts of them a hit needs, and what of it is to come."""

    namespace_id: NamespaceId
    first: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    spans: tuple[Span, ...]
    nbytes: int = field(compare=False)
    refined: bool = False


class Reading(Protocol):
    """The records of one window, over its spans, on their way from a source.

    sizes: bytes of each; of one that the source does not have, 0. checksums: of each, where the
    source knows them before it reads, else none. wrong: after a `fill` that failed, which of them
    were there, and are not what was stored. limbo: after a `fill` that failed
    or was cancelled, what may still write into its targets, until it is done; None: nothing.
    """

    @property
    def limbo(self) -> Limbo | None: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def checksums(self) -> Sequence[int]: ...

    @property
    def wrong(self) -> Sequence[int]: ...

    async def fill(self, targets: Sequence[memoryview | None], deadline: float) -> list[int] | None:
        """Write each record that has a target there; return their checksums, 0 without a target.

        None: one could not be had, or was not what was stored. Once this has returned, raised or
        been cancelled, nothing writes into the targets any more, unless `limbo` says so.
        """

    async def close(self) -> None:
        """Let go of what the source holds for it."""


class Listing(Protocol):
    """What a source has of one prefix. found: how many of its blocks have been looked for.

    brings_fine: fine parts come after all bases; else for those who insist on them. coming: how
    many of its blocks are still being computed, so reading a window may take as long as that.
    copies: it stays at the source, which is a host like this one. start_window_nbytes: of the first
    windows of a load, instead of `WINDOW_NBYTES`. failure: why reading failed, None so far.
    """

    found: int
    coming: int
    copies: bool
    start_window_nbytes: int
    failure: Reason | None

    @property
    def brings_fine(self) -> bool: ...

    def look(self, deadline: float) -> AsyncIterator[None]:
        """Look for the prefix; `found` has grown after each step."""

    def has(self, part: Part, key: BlockKey) -> bool:
        """Say whether the source has a record."""

    def with_fine(self, key: BlockKey, block: StoredBlock | None, mask: int) -> int:
        """Return a block's mask of groups with the bits of those that refine others."""

    def fine_spans(self, keys: Sequence[BlockKey], spans: Sequence[Span]) -> tuple[Span, ...]:
        """Return the fine parts to bring with `spans` of `keys`."""

    async def open(self, window: Window) -> Reading | None:
        """Begin to read a window; None: something of it cannot be had. Raises KVStoreError."""

    def forget(self, records: Sequence[tuple[Part, BlockKey]]) -> None:
        """Take note of fine parts that belong to other bases, or are not what was stored: they are
        not to be read again."""


class Source(Protocol):
    """name: for the log. races: how long loads from it take."""

    @property
    def name(self) -> str: ...

    @property
    def races(self) -> LoadRaces: ...


class Candidate(NamedTuple):
    """A source, and what it has of a prefix."""

    source: Source
    listing: Listing
