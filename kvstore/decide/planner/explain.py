"""Why a hit ends where it ends. Looks at what is there, changes nothing.

Asked only when a hit is not complete, and then it looks at the one block where the hit ends (and at
the blocks of a sliding window before it), so that a request pays next to nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from kvstore.decide.index import Index, StoredBlock
from kvstore.decide.planner.departures import Departures
from kvstore.decide.planner.leases import Leases
from kvstore.model.block import BlockKey, Group, Match, Namespace, NamespaceId
from kvstore.model.outcome import BlockRange, Ending, Explanation, Reason

OTHERS_MAX = 64  # namespaces that one without blocks is compared with
VALUE_CHARS = 16  # of a namespace's field, when two of them are shown beside each other


class Explainer:
    """Explains the misses of one node."""

    def __init__(self, index: Index, departures: Departures, leases: Leases) -> None:
        self._index = index
        self._departures = departures
        self._leases = leases

    def ending(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        hit_blocks: int,
        skip_blocks: int = 0,
    ) -> Ending | None:
        """Return what a hit of `hit_blocks`, the longest over all tiers, lacks to be longer."""
        if hit_blocks >= len(keys):
            return None
        namespace = self._index.namespaces.use(namespace_id)
        at, group = self._lacking(namespace, namespace_id, keys, hit_blocks, skip_blocks)
        reason, left_s = self._absence(keys[at], self._is_reserved(namespace_id, keys[at], at))
        differs = self._other(namespace_id) if reason is Reason.NEVER_STORED else ()
        if differs:
            return Ending(Reason.OTHER_NAMESPACE, at, differs=differs)
        return Ending(reason, at, group, left_s)

    def explanation(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], match: Match
    ) -> Explanation:
        """Return where each block of a prefix is, as ranges, beside what `match` says of it."""
        ranges: list[BlockRange] = []
        writes = self._leases.reservations(namespace_id)
        reserved = set(chain.from_iterable(write.keys for write in writes))
        for at, key in enumerate(keys):
            state = self._state(namespace_id, key, at, reserved=key in reserved)
            if ranges and _alike(ranges[-1], state):
                left_s = min(ranges[-1].left_s, state.left_s)
                state = BlockRange(
                    ranges.pop().begin, at + 1, state.dram, state.file, state.reason, left_s
                )
            ranges.append(state)
        ending = self.ending(namespace_id, keys, match.hit_blocks)
        return Explanation(tuple(ranges), match.hit_blocks, match.resident_blocks, ending)

    def _lacking(
        self,
        namespace: Namespace,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        hit_blocks: int,
        skip_blocks: int,
    ) -> tuple[int, str]:
        """Return the block a longer hit lacks, and the group that lacks it ("": all of it).

        If the full-attention groups go on beyond the hit, a window group ended it: then the hole in
        the window before the last block that the others would reach is the one to name.
        """
        prefix = [i for i, group in enumerate(namespace.groups) if not group.window_tokens]
        windows = [i for i, group in enumerate(namespace.groups) if group.window_tokens]
        end = hit_blocks
        while end < len(keys) and self._first_missing(namespace_id, keys[end], prefix) is None:
            end += 1
        if end == hit_blocks:
            return end, self._group_name(namespace, namespace_id, keys[end], prefix)
        for group in windows:
            needed = namespace.groups[group].blocks_needed(end, namespace.block_tokens)
            for at in reversed(range(max(needed.start, skip_blocks), end)):
                if self._first_missing(namespace_id, keys[at], [group]) is not None:
                    return at, namespace.groups[group].name
        return hit_blocks, ""  # it has come since

    def _first_missing(
        self, namespace_id: NamespaceId, key: BlockKey, groups: Sequence[int]
    ) -> int | None:
        block = self._index.get(namespace_id, key)
        complete = block.complete if block is not None else 0
        return next((group for group in groups if not complete >> group & 1), None)

    def _group_name(
        self, namespace: Namespace, namespace_id: NamespaceId, key: BlockKey, groups: Sequence[int]
    ) -> str:
        if self._index.get(namespace_id, key) is None:
            return ""
        missing = self._first_missing(namespace_id, key, groups)
        return namespace.groups[missing].name if missing is not None else ""

    def _is_reserved(self, namespace_id: NamespaceId, key: BlockKey, at: int) -> bool:
        """Whether somebody is writing block `at`; one look at each reservation."""
        return any(
            write.keys[at - write.first_block] == key
            for write in self._leases.reservations(namespace_id)
            if 0 <= at - write.first_block < len(write.keys)
        )

    def _absence(self, key: BlockKey, reserved: bool) -> tuple[Reason, float]:
        """Return why a block is not all there, and how long ago it left."""
        if reserved:
            return Reason.BEING_WRITTEN, 0.0
        return self._departures.find(key) or (Reason.NEVER_STORED, self._departures.reach_s)

    def _state(
        self, namespace_id: NamespaceId, key: BlockKey, at: int, *, reserved: bool
    ) -> BlockRange:
        block = self._index.get(namespace_id, key)
        if block is not None and self._is_complete(namespace_id, block):
            base = [record for record in block.records if not record.fine]
            dram = all(record.resident is not None for record in base)
            file = all(record.frame is not None for record in base)
            return BlockRange(at, at + 1, dram, file)
        reason, left_s = self._absence(key, reserved)
        return BlockRange(at, at + 1, False, False, reason, left_s)

    def _is_complete(self, namespace_id: NamespaceId, block: StoredBlock) -> bool:
        """Whether all that is meant to be stored of a block is: a window group may be left out."""
        groups = self._index.namespaces.use(namespace_id).groups
        prefix = sum(1 << i for i, group in enumerate(groups) if not group.window_tokens)
        return block.complete & prefix == prefix and bool(block.complete)

    def _other(self, namespace_id: NamespaceId) -> tuple[str, ...]:
        """Return how the nearest namespace of the same model differs, if only that holds blocks. It
        compares those that were used last."""
        if self._index.blocks_of(namespace_id):
            return ()
        own = self._index.namespaces.use(namespace_id)
        model = dict(own.identity).get("model")
        if model is None:
            return ()
        named = ("model", model)
        others = (other for other in self._index.namespaces.filled() if named in other.identity)
        found = [differences(own, other) for other in islice(others, OTHERS_MAX)]
        return min(found, key=len, default=())


def differences(own: Namespace, other: Namespace) -> tuple[str, ...]:
    """Return the fields in which two namespaces differ, as "field: own value, other value"."""
    mine, theirs = _fields(own), _fields(other)
    return tuple(
        f"{name}: {_short(mine.get(name, '-'))} here, {_short(theirs.get(name, '-'))} there"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    )


def _fields(namespace: Namespace) -> dict[str, str]:
    return {
        "block_tokens": str(namespace.block_tokens),
        "fidelity": namespace.fidelity,
        "groups": ", ".join(map(_group_text, namespace.groups)),
        **dict(namespace.identity),
    }


def _group_text(group: Group) -> str:
    window = f" window {group.window_tokens}" if group.window_tokens else ""
    return f"{group.name} {group.record_nbytes} B x{group.shards}{window}"


def _short(value: str) -> str:
    return value if len(value) <= VALUE_CHARS else f"{value[:VALUE_CHARS]}..."


def _alike(one: BlockRange, other: BlockRange) -> bool:
    return (one.dram, one.file, one.reason) == (other.dram, other.file, other.reason)
