"""Which namespaces a node knows, and what it holds of each.

There is one entry for each namespace that was registered, or that has blocks. At most
NAMESPACES_MAX of them have their specification, of SPECS_CHARS_MAX together. When there is one
more, the one used least recently is forgotten, of those without blocks first:

- One without blocks loses nothing. Whoever uses it again is told that it is unknown, registers it,
  and goes on; our clients do that by themselves. So a client that registers thousands costs the
  others a round trip each, and needs no bound of its own.
- Where blocks take all but EMPTY_MIN places, the specification of one with blocks is forgotten, and
  its blocks stay: they are evicted by use, like all others, and are hits again as soon as the
  namespace is registered again. Nobody has to clear anything, and an engine that starts is served.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

from kvstore.model.block import Namespace, NamespaceId
from kvstore.model.errors import Unavailable, UnknownNamespace

NAMESPACES_MAX = 4096
SPECS_CHARS_MAX = 32 << 20  # an engine's has one or two thousand
MODELS_MAX = 64
LABELS_MAX = 64  # namespaces that metrics tell apart
LABEL_CHARS = 12  # of an id in hex, as people see it
OTHER_MODELS = OTHER_NAMESPACES = "other"
UNKNOWN_MODEL = "unknown"  # its blocks were found on disk, and nobody has said what they are
EMPTY_MIN = 512  # else two engines that start could push each other out until one of them has put


class NamespaceUse(NamedTuple):
    """What a node has of a namespace, and how often it was asked for and served since the start.

    namespace: None if what the id stands for is not known (any more). bytes: whole pages.
    tier_hit_blocks: of the hits, by the tier that had them.
    """

    namespace_id: NamespaceId
    namespace: Namespace | None
    blocks: int
    model: str
    dram_bytes: int = 0
    file_bytes: int = 0
    asked_blocks: int = 0
    hit_blocks: int = 0
    tier_hit_blocks: Mapping[str, int] = MappingProxyType({})


class ModelUse:
    """The same of all namespaces of a model."""

    __slots__ = (
        "asked_blocks",
        "blocks",
        "dram_nbytes",
        "file_nbytes",
        "hit_blocks",
        "name",
        "spaces",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.spaces = 0
        self.blocks = self.dram_nbytes = self.file_nbytes = 0
        self.asked_blocks = self.hit_blocks = 0


class StoredNamespace:
    """A namespace of this node. spec: None if nobody has registered it, or it was forgotten.

    calls: under way in it. is_stale: it was registered when it had blocks, whose groups may have
    been completed without its specification. model: None before it has a block, or is asked for.
    dram_records, file_records: how many a tier has, by group. label: what metrics call it.
    """

    __slots__ = (
        "asked_blocks",
        "blocks",
        "calls",
        "dram_nbytes",
        "dram_records",
        "file_nbytes",
        "file_records",
        "hit_blocks",
        "id",
        "is_stale",
        "label",
        "model",
        "spec",
        "spec_chars",
        "tier_hit_blocks",
    )

    def __init__(self, namespace_id: NamespaceId) -> None:
        self.id = namespace_id
        self.spec: Namespace | None = None
        self.spec_chars = 0
        self.model: ModelUse | None = None
        self.blocks = self.dram_nbytes = self.file_nbytes = 0
        self.dram_records: Counter[int] = Counter()
        self.file_records: Counter[int] = Counter()
        self.asked_blocks = self.hit_blocks = 0
        self.tier_hit_blocks: dict[str, int] = {}
        self.label = ""
        self.calls = 0
        self.is_stale = False

    def raw_nbytes(self, records: Counter[int]) -> int:
        """Return what so many records, by group, would take as an engine has them."""
        groups = self.spec.groups if self.spec is not None else ()
        return sum(
            records[index] * group.record_nbytes
            for index, group in enumerate(groups)
            if group.refines == -1
        )

    def blocks_of(self, records: Counter[int], *, fine: bool) -> int:
        """Return how many blocks so many records, by group, are of: as many as the group has that
        has most. fine: with their fine parts."""
        groups = self.spec.groups if self.spec is not None else ()
        counts = [
            records[index] // group.shards
            for index, group in enumerate(groups)
            if (group.refines != -1) is fine
        ]
        return max(counts, default=0)

    @property
    def use(self) -> NamespaceUse:
        if self.spec is not None:
            model = self.spec.title
        else:
            model = self.model.name if self.model is not None else UNKNOWN_MODEL
        return NamespaceUse(
            self.id,
            self.spec,
            self.blocks,
            model,
            self.dram_nbytes,
            self.file_nbytes,
            self.asked_blocks,
            self.hit_blocks,
            dict(self.tier_hit_blocks),
        )


class Namespaces:
    """The namespaces of one node. namespaces_max: that have their specification."""

    def __init__(self, namespaces_max: int = NAMESPACES_MAX) -> None:
        self._max = namespaces_max
        self._empty_min = min(EMPTY_MIN, namespaces_max // 8)
        self._all: dict[NamespaceId, StoredNamespace] = {}
        # Those with a specification, used least recently first.
        self._empty: OrderedDict[NamespaceId, StoredNamespace] = OrderedDict()
        self._filled: OrderedDict[NamespaceId, StoredNamespace] = OrderedDict()
        self._spec_chars = 0
        self._models: dict[str, ModelUse] = {}
        self._labels: dict[str, StoredNamespace] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def models(self) -> list[ModelUse]:
        """What there is of each model, of MODELS_MAX by name, and of others and unknown ones."""
        return list(self._models.values())

    @property
    def labelled(self) -> list[StoredNamespace]:
        """Return those that metrics tell apart."""
        return list(self._labels.values())

    def __iter__(self) -> Iterator[StoredNamespace]:
        return iter(self._all.values())

    def filled(self) -> Iterator[Namespace]:
        """Yield the specifications of those that have blocks, used last first."""
        for each in reversed(self._filled.values()):
            if each.spec is not None:
                yield each.spec

    def find(self, namespace_id: NamespaceId) -> StoredNamespace | None:
        """Return what is known of a namespace."""
        return self._all.get(namespace_id)

    def spec(self, namespace_id: NamespaceId) -> Namespace | None:
        """Return what a namespace id stands for, if that is known."""
        found = self._all.get(namespace_id)
        return found.spec if found is not None else None

    def use(self, namespace_id: NamespaceId) -> Namespace:
        """Return a registered namespace, used last from now on. Raises UnknownNamespace."""
        found = self._all.get(namespace_id)
        if found is None or found.spec is None:
            raise UnknownNamespace(f"unknown namespace {namespace_id[:4].hex()}: register it first")
        self._queue_of(found).move_to_end(namespace_id)
        return found.spec

    @contextmanager
    def in_use(self, namespace_id: NamespaceId) -> Iterator[None]:
        """Keep a registered namespace for as long as the context lasts. Raises UnknownNamespace."""
        self.use(namespace_id)
        found = self._all[namespace_id]
        found.calls += 1
        try:
            yield
        finally:
            found.calls -= 1

    def register(self, spec: Namespace) -> NamespaceId:
        """Learn what a namespace id stands for. Costs no look at its blocks."""
        namespace_id = spec.id
        found = self._all.get(namespace_id)
        if found is None:
            found = self._all[namespace_id] = StoredNamespace(namespace_id)
        if found.spec is None:
            found.spec = spec
            found.spec_chars = len(spec.to_json())
            self._spec_chars += found.spec_chars
            found.is_stale = found.blocks > 0
            if found.model is not None:
                self._move(found, self._model_of(found))
        self._queue_of(found)[found.id] = found
        self._queue_of(found).move_to_end(found.id)
        return found.id

    def make_room(self, spec: Namespace, is_held: Callable[[NamespaceId], bool]) -> None:
        """Forget specifications until there is room for one more. Raises Unavailable.

        is_held: says that somebody will come back to a namespace, and rely on it.
        """
        chars_max = SPECS_CHARS_MAX - len(spec.to_json())
        while len(self._empty) + len(self._filled) >= self._max or self._spec_chars > chars_max:
            queues = [self._empty, self._filled]
            if len(self._empty) <= self._empty_min:
                queues.reverse()
            idle = (
                found
                for queue in queues
                for found in queue.values()
                if not found.calls and not is_held(found.id)
            )
            victim = next(idle, None)
            if victim is None:
                raise Unavailable(f"{self._max} namespaces are in use at this moment")
            self._forget(victim)

    def block_added(self, namespace_id: NamespaceId, blocks: int = 1) -> NamespaceId:
        """Count a block, or several; return the one object that all its blocks share as their
        id."""
        found = self._all.get(namespace_id)
        if found is None:
            found = self._all[namespace_id] = StoredNamespace(namespace_id)
        self._modelled(found).blocks += blocks
        found.blocks += blocks
        if found.blocks == blocks and found.spec is not None:
            del self._empty[found.id]
            self._filled[found.id] = found
        return found.id

    def block_removed(self, namespace_id: NamespaceId) -> None:
        """Count a block less."""
        found = self._all[namespace_id]
        self._modelled(found).blocks -= 1
        found.blocks -= 1
        if found.blocks:
            return
        found.is_stale = False
        if found.spec is None:
            self._drop(found)
        else:
            del self._filled[found.id]
            self._empty[found.id] = found

    def in_dram(self, namespace_id: NamespaceId, nbytes: int, group: int) -> None:
        """Count the bytes of a record that came into the arena, or (less than nothing) left it."""
        found = self._all[namespace_id]
        found.dram_nbytes += nbytes
        found.dram_records[group] += 1 if nbytes > 0 else -1
        self._modelled(found).dram_nbytes += nbytes

    def in_files(
        self, namespace_id: NamespaceId, nbytes: int, group: int, records: int = 1
    ) -> None:
        """The same of the file tier, also of several records that came."""
        found = self._all[namespace_id]
        found.file_nbytes += nbytes
        found.file_records[group] += records if nbytes > 0 else -records
        self._modelled(found).file_nbytes += nbytes

    def asked(
        self, namespace_id: NamespaceId, blocks: int, served: Mapping[str, int]
    ) -> tuple[str, str]:
        """Count blocks asked for, and those served by each tier; return the model that they count
        for, and the label of the namespace."""
        found = self._all[namespace_id]
        model = self._modelled(found)
        hits = sum(served.values())
        for one in (found, model):
            one.asked_blocks += blocks
            one.hit_blocks += hits
        for tier, count in served.items():
            if count:
                found.tier_hit_blocks[tier] = found.tier_hit_blocks.get(tier, 0) + count
        return model.name, found.label

    def _queue_of(self, found: StoredNamespace) -> OrderedDict[NamespaceId, StoredNamespace]:
        return self._filled if found.blocks else self._empty

    def _forget(self, found: StoredNamespace) -> None:
        del self._queue_of(found)[found.id]
        self._spec_chars -= found.spec_chars
        found.spec = None
        if not found.blocks:
            self._drop(found)

    def _drop(self, found: StoredNamespace) -> None:
        del self._all[found.id]
        if self._labels.get(found.label) is found:
            del self._labels[found.label]
        if found.model is not None:
            found.model.spaces -= 1

    # ---- by model --------------------------------------------------------------------------------

    def _modelled(self, found: StoredNamespace) -> ModelUse:
        if found.model is None:
            found.model = self._model_of(found)
            found.model.spaces += 1
            self._label(found)
        return found.model

    def _label(self, found: StoredNamespace) -> None:
        """Give a namespace that is used a label of its own, as long as there are few."""
        label = found.id.hex()[:LABEL_CHARS]
        if len(self._labels) < LABELS_MAX and label not in self._labels:
            self._labels[label] = found
            found.label = label
        else:
            found.label = OTHER_NAMESPACES

    def _model_of(self, found: StoredNamespace) -> ModelUse:
        """Return the model that a namespace counts for. Names are few: they are labels of metrics.
        One of which nothing is left makes room for another."""
        name = found.spec.title if found.spec is not None else UNKNOWN_MODEL
        model = self._models.get(name)
        if model is not None:
            return model
        fixed = (OTHER_MODELS, UNKNOWN_MODEL)
        if name not in fixed and len(self._models.keys() - set(fixed)) >= MODELS_MAX:
            gone = (each.name for each in self._models.values() if not each.spaces)
            idle = next((each for each in gone if each not in fixed), None)
            if idle is None:
                return self._models.setdefault(OTHER_MODELS, ModelUse(OTHER_MODELS))
            del self._models[idle]
        return self._models.setdefault(name, ModelUse(name))

    def _move(self, found: StoredNamespace, model: ModelUse) -> None:
        """Let what a namespace has count for another model from now on."""
        before = self._modelled(found)
        for one, sign in ((before, -1), (model, 1)):
            one.spaces += sign
            one.blocks += sign * found.blocks
            one.dram_nbytes += sign * found.dram_nbytes
            one.file_nbytes += sign * found.file_nbytes
        found.model = model
