"""The nouns: what a block is, what it is made of, and when a prefix of blocks is a hit.

A *block* is the KV of `block_tokens` tokens. It consists of *parts*, one per (group, shard): a
group is a set of layers that share a match rule, a shard is one worker's heads. A part is one
contiguous *record* of `record_nbytes` bytes. The chain of keys names the tokens; the parts of a
block hang under one index entry.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, NewType, TypeAlias

from kvstore.model.errors import InvalidRequest
from kvstore.model.member import Holds

BlockKey = NewType("BlockKey", bytes)
NamespaceId = NewType("NamespaceId", bytes)
Buffer: TypeAlias = bytes | bytearray | memoryview

KEY_NBYTES = 32
FORMAT_VERSION = 1
PAGE_NBYTES = 4096
RECORD_NBYTES_MAX = 1 << 30
GROUPS_MAX = 256
SHARDS_MAX = 4096
PARTS_MAX = 4096  # of one block
SPEC_CHARS_MAX = 1 << 16
NAME_CHARS_MAX = 128
_DIGEST_CHARS = 64
_SHORT_CHARS = 12


class Part(NamedTuple):
    """Which record of a block: its KV cache group and its shard."""

    group: int
    shard: int


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are stored in one record and matched by one rule.

    record_nbytes: bytes of one block of this group in one shard.
    window_tokens: 0 for full attention, which needs every block from the start; else the size w of
        the sliding window, which needs only the blocks of the last w - 1 tokens.
    shards: how many workers each store a record of their own (1 when all ranks are identical).
    varies: records have sizes of their own, and `record_nbytes` is the most of them; a reservation
        and a lease say the size of each.
    refines: -1, or the index of the group whose lossy records these make finer: the *fine part* of
        a block, beside its *base part*. A block is complete without its fine parts.
    base_nbytes: of a group that refines: a base record of just so many bytes has a fine part, one
        of another size is exact and has none.
    """

    name: str
    record_nbytes: int
    window_tokens: int = 0
    shards: int = 1
    varies: bool = False
    refines: int = -1
    base_nbytes: int = 0

    def blocks_needed(self, hit_blocks: int, block_tokens: int) -> range:
        """Return the indices of the blocks that a resume after `hit_blocks` blocks reads."""
        if not self.window_tokens:
            return range(hit_blocks)
        first_token = hit_blocks * block_tokens - (self.window_tokens - 1)
        return range(max(0, first_token // block_tokens), hit_blocks)


# The field of an identity that says: every block in it was asked for with a cache salt.
SALTED = ("salt", "required")


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the bytes of a block depend on beside its tokens. Two namespaces never share a block.

    identity: what produced the bytes (model, weights fingerprint, KV dtype, layout, ...), as text.
    fidelity: "exact", or the name of a lossy encoding; an exact reader never gets a lossy block.
    name: the model's name for people. It is not part of the id, and `==` ignores it.
    fine: the indices of the groups that refine others.
    """

    block_tokens: int
    groups: tuple[Group, ...]
    identity: tuple[tuple[str, str], ...]
    fidelity: str = "exact"
    name: str = field(default="", compare=False)
    fine: tuple[int, ...] = field(init=False, compare=False, default=())

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= 1 << 16:
            raise InvalidRequest(f"block_tokens={self.block_tokens} is not in 1..65536")
        if not 1 <= len(self.groups) <= GROUPS_MAX:
            raise InvalidRequest(f"{len(self.groups)} groups; 1..{GROUPS_MAX} are allowed")
        for group in self.groups:
            if not 1 <= group.record_nbytes <= RECORD_NBYTES_MAX:
                raise InvalidRequest(
                    f"group {group.name}: record_nbytes={group.record_nbytes} is not in 1..2**30"
                )
            if not 1 <= group.shards <= SHARDS_MAX or group.window_tokens < 0:
                raise InvalidRequest(f"group {group.name}: impossible shards or window")
        if sum(group.shards for group in self.groups) > PARTS_MAX:
            raise InvalidRequest(f"a block of more than {PARTS_MAX} parts")
        names = [name for name, _ in self.identity]
        if len(set(names)) != len(names):
            raise InvalidRequest("a namespace identity names a field twice")
        fine = tuple(i for i, group in enumerate(self.groups) if group.refines != -1)
        for index in fine:
            self._check_refined(self.groups[index])
        if len({self.groups[index].refines for index in fine}) != len(fine):
            raise InvalidRequest("two groups refine the same one")
        object.__setattr__(self, "fine", fine)

    def _check_refined(self, group: Group) -> None:
        """Raise InvalidRequest unless a group can refine the one that it names."""
        if self.fidelity == "exact":
            raise InvalidRequest(f"group {group.name} refines another in an exact namespace")
        if not 0 <= group.refines < len(self.groups):
            raise InvalidRequest(f"group {group.name} refines group {group.refines}: there is none")
        base = self.groups[group.refines]
        if base.refines != -1:
            raise InvalidRequest(f"group {group.name} refines {base.name}, which refines another")
        if (base.shards, base.window_tokens) != (group.shards, group.window_tokens):
            raise InvalidRequest(f"group {group.name} has other shards or tokens than {base.name}")
        if not 1 <= group.base_nbytes <= base.record_nbytes:
            raise InvalidRequest(
                f"group {group.name}: base_nbytes={group.base_nbytes} is not in "
                f"1..{base.record_nbytes}"
            )

    @property
    def has_windows(self) -> bool:
        """Whether a resume needs only the last window of some groups: the parts that one of a
        certain length needs are of no use to a shorter one."""
        return any(group.window_tokens for group in self.groups)

    def to_json(self) -> str:
        """Return the canonical text: sorted keys, no spaces, ASCII. Equal text, equal namespace."""
        groups = [
            {
                "name": group.name,
                "record_nbytes": group.record_nbytes,
                "shards": group.shards,
                "window_tokens": group.window_tokens,
                **({"varies": True} if group.varies else {}),
                **(
                    {"refines": group.refines, "base_nbytes": group.base_nbytes}
                    if group.refines != -1
                    else {}
                ),
            }
            for group in self.groups
        ]
        fields = {
            "block_tokens": self.block_tokens,
            "fidelity": self.fidelity,
            "format_version": FORMAT_VERSION,
            "groups": groups,
            "identity": dict(self.identity),
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str, name: str = "") -> Namespace:
        """Parse and validate what `to_json` wrote. Raises InvalidRequest on anything else.

        name: not trusted; characters that cannot be printed are removed.
        """
        if len(text) > SPEC_CHARS_MAX:
            raise InvalidRequest(
                f"a namespace of {len(text)} characters; {SPEC_CHARS_MAX} are allowed"
            )
        try:
            fields = json.loads(text)
            version = fields["format_version"]
            namespace = cls(
                block_tokens=int(fields["block_tokens"]),
                fidelity=str(fields["fidelity"]),
                groups=tuple(
                    Group(
                        name=str(group["name"]),
                        record_nbytes=int(group["record_nbytes"]),
                        window_tokens=int(group["window_tokens"]),
                        shards=int(group["shards"]),
                        varies=bool(group.get("varies", False)),
                        refines=int(group.get("refines", -1)),
                        base_nbytes=int(group.get("base_nbytes", 0)),
                    )
                    for group in fields["groups"]
                ),
                identity=tuple(sorted((str(k), str(v)) for k, v in fields["identity"].items())),
                name=_printable(name),
            )
        except (
            ArithmeticError,  # infinity is a number in JSON as Python reads it
            AttributeError,
            KeyError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise InvalidRequest(f"not a namespace: {error!r}") from error
        if version != FORMAT_VERSION:
            raise InvalidRequest(f"namespace format {version}; this side speaks {FORMAT_VERSION}")
        return namespace

    @property
    @lru_cache(64)  # noqa: B019 - few are kept: a hostile spec may be long
    def id(self) -> NamespaceId:
        """The 32-byte fingerprint of the canonical text."""
        return NamespaceId(hashlib.sha256(self.to_json().encode("ascii")).digest())

    @property
    def salted(self) -> bool:
        """Whether its engines store nothing of requests without a cache salt."""
        return SALTED in self.identity

    @property
    def title(self) -> str:
        """The name; without a name, the model that the identity names."""
        model = _printable(dict(self.identity).get("model", ""))
        is_digest = len(model) == _DIGEST_CHARS and " " not in model
        return self.name or (model[:_SHORT_CHARS] if is_digest else model) or "unnamed"

    @property
    def varies(self) -> bool:
        """Whether some records have sizes of their own."""
        return any(group.varies for group in self.groups)

    def fixed_nbytes(self, part: Part) -> int:
        """Return the size that every record of `part` has. Raises InvalidRequest if there is none.

        Whoever moves records back to back needs it.
        """
        nbytes = self.record_nbytes(part)
        if self.groups[part.group].varies:
            raise InvalidRequest(
                f"the records of group {self.groups[part.group].name} have sizes of their own: "
                "reserve and commit them, or acquire them"
            )
        return nbytes

    def check_sizes(self, spans: Sequence[Span], sizes: Sequence[int]) -> None:
        """Raise InvalidRequest unless `sizes`, one per record over the spans, are possible."""
        if len(sizes) != sum(end - begin for _, begin, end in spans):
            raise InvalidRequest(f"{len(sizes)} sizes for the records of {len(spans)} spans")
        at = 0
        for part, begin, end in spans:
            most, mine = self.record_nbytes(part), sizes[at : at + end - begin]
            least = 1 if self.groups[part.group].varies else most
            if mine and not (least <= min(mine) and max(mine) <= most):
                raise InvalidRequest(
                    f"records of {min(mine)} to {max(mine)} bytes in group "
                    f"{self.groups[part.group].name}, which has {least} to {most}"
                )
            at += end - begin

    def record_nbytes(self, part: Part) -> int:
        """Return the record size of `part`, the most if they vary. Raises InvalidRequest if there
        is no such part."""
        if not 0 <= part.group < len(self.groups):
            raise InvalidRequest(f"group {part.group} of {len(self.groups)}")
        group = self.groups[part.group]
        if not 0 <= part.shard < group.shards:
            raise InvalidRequest(f"shard {part.shard} of {group.shards} in group {group.name}")
        return group.record_nbytes


class Span(NamedTuple):
    """One part of the blocks keys[begin:end] of the call's list of keys."""

    part: Part
    begin: int
    end: int


class Slot(NamedTuple):
    """Bytes [offset, offset + nbytes) of one arena extent. Offsets are multiples of 4 KiB."""

    extent: int
    offset: int
    nbytes: int


class FilePlace(NamedTuple):
    """Where a record is in a file of the file tier: bytes [offset, offset + nbytes), not encoded.

    The path is absolute and the offset is a multiple of 4 KiB. The last page may be read whole. The
    daemon never writes other bytes there: a freed place is a hole, or its file is deleted.
    """

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots that a client holds, for reading (a lease) or for writing (a reservation).

    slots, checksums: one item per block, over the spans in order. In a lease, None means that a
        part asked for by itself is missing. In a reservation, None means that the part is already
        stored; `refused` counts those that had no room instead.
    deadline_s: seconds from the answer. After it the slots must not be used, and `release` says so.
    hit_blocks: counted from the first key, blocks skipped by the caller included.
    varies: the namespace's records have sizes of their own; the slots say them.
    places: for a lease with `file_places`, one item per slot, else empty. A place replaces a slot:
        the client reads the record in its file. The bytes are valid if their checksum matches and
        the lease was held, as with a slot.
    ready_blocks: the slots of its first so many blocks are filled, others still read; None: all.
    present: of each record, whether it is stored in any tier, if that was asked for.
    """

    lease_id: int
    deadline_s: float
    spans: tuple[Span, ...]
    slots: tuple[Slot | None, ...]
    checksums: tuple[int, ...] = ()
    hit_blocks: int = 0
    leased: bool = True
    refused: int = 0
    places: tuple[FilePlace | None, ...] = ()
    varies: bool = False
    ready_blocks: int | None = None
    present: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """How many records of a reservation or a put were stored.

    existing: another writer had stored them. durable: a completed fdatasync covers all of them.
    """

    committed: int
    existing: int
    refused: int
    durable: bool


@dataclass(frozen=True, slots=True)
class Match:
    """How many blocks of a prefix are stored now: in any tier, and in DRAM. Nothing is leased.

    worth_blocks: how many blocks are faster to load than to recompute; None: all of them, or the
        caller did not say how fast it recomputes.
    load_s: predicted time to promote them; 0: they are resident, or no such load was measured yet.
    holders: which other hosts seem to have some of it, if that was asked for.
    present: of each block, or record of the spans, whether it is stored, if that was asked for.
    """

    hit_blocks: int
    resident_blocks: int
    worth_blocks: int | None = None
    load_s: float = 0.0
    holders: tuple[Holds, ...] = ()
    present: tuple[bool, ...] = ()


def _printable(name: str) -> str:
    return "".join(char for char in name[:NAME_CHARS_MAX] if char.isprintable())


def split_keys(keys: bytes, *, keys_max: int) -> list[BlockKey]:
    """Cut concatenated keys apart. Raises InvalidRequest on a ragged or oversize batch."""
    count, rest = divmod(len(keys), KEY_NBYTES)
    if rest:
        raise InvalidRequest(f"{len(keys)} key bytes are not a multiple of {KEY_NBYTES}")
    if count > keys_max:
        raise InvalidRequest(f"{count} keys in one batch; the limit is {keys_max}: split it")
    return [*struct.unpack(f"{KEY_NBYTES}s" * count, keys)]  # ten times faster than slices


def check_keys(keys: Sequence[BlockKey]) -> None:
    """Raise InvalidRequest unless every key has 32 bytes."""
    for nbytes in set(map(len, keys)):  # a loop of C
        if nbytes != KEY_NBYTES:
            raise InvalidRequest(f"a block key has {KEY_NBYTES} bytes, not {nbytes}")


def padded(nbytes: int) -> int:
    """Round up to whole 4 KiB pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
