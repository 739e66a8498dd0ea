"""Names in the bucket. Pure.

    <namespace id>/<first key>/<last key>-<nonce>   a run: keys of its first and its last block
    tombstones/<namespace id>/<nonce>               what was deleted
    clock                                           written to learn the store's own time

All ids in lower-case hex. A listing of `<namespace id>/<first key>/` finds every run that begins
with that block, whatever follows. (With the key *before* the run, a listing at the root, or after a
system prompt that many share, would return thousands.) `nonce` is a digest of the object's content.
So two writers of the same bytes write one object, and writers of different bytes write two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.format.frame import SegmentTag
from kvstore.model.block import BlockKey, NamespaceId

CLOCK = "clock"
TOMBSTONES = "tombstones"
_RUN = re.compile(r"([0-9a-f]{64})/([0-9a-f]{64})/([0-9a-f]{64})-([0-9a-f]{16})", re.ASCII)
_TOMBSTONE = re.compile(TOMBSTONES + r"/([0-9a-f]{64})/([0-9a-f]{16})", re.ASCII)


@dataclass(frozen=True, slots=True)
class RunName:
    """The parsed name of a run."""

    namespace_id: NamespaceId
    first: BlockKey
    last: BlockKey
    nonce: int

    def __str__(self) -> str:
        return f"{directory(self.namespace_id, self.first)}/{self.last.hex()}-{self.nonce:016x}"

    @property
    def tag(self) -> SegmentTag:
        """Its pages are bound to this tag: they are invalid under another name."""
        return SegmentTag(0, self.nonce)


@dataclass(frozen=True, slots=True)
class TombstoneName:
    """The parsed name of a tombstone."""

    namespace_id: NamespaceId
    nonce: int

    def __str__(self) -> str:
        return f"{TOMBSTONES}/{self.namespace_id.hex()}/{self.nonce:016x}"

    @property
    def tag(self) -> SegmentTag:
        return SegmentTag(0, self.nonce)


class Listed(NamedTuple):
    """An object in a listing. modified: seconds on the store's clock."""

    name: str
    nbytes: int
    modified: float


def directory(namespace_id: NamespaceId, first: BlockKey) -> str:
    """Return the common prefix of the names of all runs that begin with the block `first`."""
    return f"{namespace_id.hex()}/{first.hex()}"


def parse_run_name(text: str) -> RunName | None:
    """Parse a name; None if it is not the name of a run."""
    found = _RUN.fullmatch(text)
    if found is None:
        return None
    namespace_id, first, last = (bytes.fromhex(found[at]) for at in (1, 2, 3))
    return RunName(NamespaceId(namespace_id), BlockKey(first), BlockKey(last), int(found[4], 16))


def parse_tombstone_name(text: str) -> TombstoneName | None:
    """Parse a name; None if it is not the name of a tombstone."""
    found = _TOMBSTONE.fullmatch(text)
    if found is None:
        return None
    return TombstoneName(NamespaceId(bytes.fromhex(found[1])), int(found[2], 16))
