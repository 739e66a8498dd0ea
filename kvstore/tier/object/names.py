"""Names in the bucket. Pure.

    <namespace id>/<first key>/<last key>-<nonce>   a run: keys of its first and its last block
    tombstones/<namespace id>/<nonce>               what was deleted
    clock                                           written to learn the store's own time

All ids in lower-case hex. A listing of `<namespace id>/<first key>/` finds every run that begins
with that block, whatever follows. (With the key *before* the run, a listing at the root, or after a
system prompt that many share, would return thousands.) `nonce` is a digest of the object's content.
So two writers of the same bytes write one object, and writers of different bytes write two.

Where a tenant's objects are encrypted, the same names stand under `t/<tenant id>/`, and every id in
them is a keyed digest (HMAC-SHA256), the nonce too: without the key nobody can test whether a
prompt is there, and a listing still finds a run. Beside them are the tenant's keys, wrapped:

    t/<tenant id>/keys/<number>                     the highest number counts
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
    prefix: str = ""

    def __str__(self) -> str:
        place = directory(self.namespace_id, self.first)
        return f"{self.prefix}{place}/{self.last.hex()}-{self.nonce:016x}"

    @property
    def tag(self) -> SegmentTag:
        """Its pages are bound to this tag: they are invalid under another name."""
        return SegmentTag(0, self.nonce)


@dataclass(frozen=True, slots=True)
class TombstoneName:
    """The parsed name of a tombstone."""

    namespace_id: NamespaceId
    nonce: int
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.prefix}{TOMBSTONES}/{self.namespace_id.hex()}/{self.nonce:016x}"

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


def parse_run_name(text: str, prefix: str = "") -> RunName | None:
    """Parse a name; None if it is not the name of a run."""
    found = _RUN.fullmatch(text.removeprefix(prefix)) if text.startswith(prefix) else None
    if found is None:
        return None
    namespace_id, first, last = (bytes.fromhex(found[at]) for at in (1, 2, 3))
    ids = NamespaceId(namespace_id), BlockKey(first), BlockKey(last)
    return RunName(*ids, int(found[4], 16), prefix)


def parse_tombstone_name(text: str, prefix: str = "") -> TombstoneName | None:
    """Parse a name; None if it is not the name of a tombstone."""
    found = _TOMBSTONE.fullmatch(text.removeprefix(prefix)) if text.startswith(prefix) else None
    if found is None:
        return None
    return TombstoneName(NamespaceId(bytes.fromhex(found[1])), int(found[2], 16), prefix)


class Names:
    """What is called what: the ids of a bucket in clear. `SealedNames` are digests.

    prefix: of every name, "" or up to a slash. The ids in names are those of `namespace` and `key`;
    every other id is a real one.
    """

    prefix = ""

    def namespace(self, namespace_id: NamespaceId) -> NamespaceId:
        """Return a namespace's id in names."""
        return namespace_id

    def key(self, key: BlockKey) -> BlockKey:
        """Return a block's key in names."""
        return key

    def real(self, named: NamespaceId) -> NamespaceId | None:
        """Return the namespace of an id in names; None if it is not known yet."""
        return named

    @property
    def clock(self) -> str:
        return self.prefix + CLOCK

    @property
    def tombstones(self) -> str:
        return self.prefix + TOMBSTONES

    def directory(self, namespace_id: NamespaceId, first: BlockKey) -> str:
        """Return the folder of ids in names."""
        return self.prefix + directory(namespace_id, first)

    def parse_run(self, text: str) -> RunName | None:
        return parse_run_name(text, self.prefix)

    def parse_tombstone(self, text: str) -> TombstoneName | None:
        return parse_tombstone_name(text, self.prefix)
