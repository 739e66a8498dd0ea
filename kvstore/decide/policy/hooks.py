"""Hooks around any policy: to see what comes and goes, and to have a say in who leaves.

They compose, the first one given has the last word, and neither the policy nor the store knows of
them. A package adds a policy with hooks like any other, by an entry point in `kvstore.policies`:

    policy = hooked(policy_by_name("hz"), AttentionWeights)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvstore.decide.policy.base import Policy, PolicyFactory
from kvstore.model.block import BlockKey

CANDIDATES = 16
"""Of the policy's order, so many of the first leaves are weighed against each other."""


class Hook:
    """Does nothing; override what is of interest. Called for every block, so be quick: O(1)."""

    def inserted(self, key: BlockKey, parent: BlockKey | None) -> None:
        """A block has come, in this life or an earlier one."""

    def removed(self, key: BlockKey) -> None:
        """A block has left, for whatever reason."""

    def used(self, prefix: Sequence[BlockKey]) -> None:
        """A request has asked for a prefix."""

    def order(self, candidates: list[BlockKey]) -> list[BlockKey]:
        """Return leaves, in the order in which they are to leave; all that were given."""
        return candidates


class Observer(Hook):
    """Tells others what comes and goes, e.g. a log or a counter."""

    def __init__(
        self, on_insert: Callable[[BlockKey], None], on_remove: Callable[[BlockKey], None]
    ) -> None:
        self._on_insert = on_insert
        self._on_remove = on_remove

    def inserted(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._on_insert(key)

    def removed(self, key: BlockKey) -> None:
        self._on_remove(key)


class Admission(Hook):
    """Lets blocks that are not admitted leave before all other candidates."""

    def __init__(self, admits: Callable[[BlockKey], bool]) -> None:
        self._admits = admits
        self._refused: set[BlockKey] = set()

    def inserted(self, key: BlockKey, parent: BlockKey | None) -> None:
        if not self._admits(key):
            self._refused.add(key)

    def removed(self, key: BlockKey) -> None:
        self._refused.discard(key)

    def order(self, candidates: list[BlockKey]) -> list[BlockKey]:
        return sorted(candidates, key=lambda key: key not in self._refused)  # stable


class AttentionWeights(Hook):
    """Lets blocks that get little attention leave first, but none that was used just now.

    An engine that knows how much attention a block's tokens got says so by `weigh`; what nobody has
    weighed counts as 1. protect_s: what was used later than so long ago keeps the policy's order,
    behind the others: its weight says little yet.
    """

    def __init__(self, now: Callable[[], float], protect_s: float = 60.0) -> None:
        self._now = now
        self._protect_s = protect_s
        self._weights: dict[BlockKey, float] = {}
        self._used_at: dict[BlockKey, float] = {}

    def weigh(self, key: BlockKey, weight: float) -> None:
        """Set the weight of a block that is here."""
        if key in self._used_at:
            self._weights[key] = weight

    def inserted(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._used_at[key] = self._now()

    def removed(self, key: BlockKey) -> None:
        self._used_at.pop(key, None)
        self._weights.pop(key, None)

    def used(self, prefix: Sequence[BlockKey]) -> None:
        now = self._now()
        for key in prefix:
            if key in self._used_at:
                self._used_at[key] = now

    def order(self, candidates: list[BlockKey]) -> list[BlockKey]:
        since = self._now() - self._protect_s
        weights = self._weights

        def rank(key: BlockKey) -> tuple[bool, float]:
            protected = self._used_at.get(key, 0.0) > since
            return protected, 0.0 if protected else weights.get(key, 1.0)

        return sorted(candidates, key=rank)


class Hooked:
    """A policy with hooks around it; `Policy` says what the methods do."""

    def __init__(self, inner: Policy, hooks: Sequence[Hook]) -> None:
        self._inner = inner
        self._hooks = hooks
        self._here: set[BlockKey] = set()

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._inner.insert(key, parent)
        self._came(key, parent)

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._inner.adopt(key, parent)
        self._came(key, parent)

    def touch(self, prefix: Sequence[BlockKey], level: int = 0) -> None:
        self._inner.touch(prefix, level)
        for hook in self._hooks:
            hook.used(prefix)

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return self._inner.alone(prefix)

    def end(self, keys: Sequence[BlockKey]) -> None:
        self._inner.end(keys)

    def expect(self, keys: Sequence[BlockKey], at: float) -> None:
        self._inner.expect(keys, at)

    def hold(self, prefix: Sequence[BlockKey]) -> None:
        self._inner.hold(prefix)

    def let_go(self, prefix: Sequence[BlockKey]) -> None:
        self._inner.let_go(prefix)

    def is_leaf(self, key: BlockKey) -> bool:
        return self._inner.is_leaf(key)

    def save(self) -> bytes:
        return self._inner.save()

    def load(self, saved: bytes) -> None:
        self._inner.load(saved)

    def remove(self, key: BlockKey) -> None:
        self._inner.remove(key)
        if key in self._here:
            self._here.remove(key)
            for hook in self._hooks:
                hook.removed(key)

    def victims(self) -> Iterator[BlockKey]:
        """Weigh the first leaves, then the next: those of a walk stay leaves while it lasts."""
        seen: set[BlockKey] = set()
        while True:
            candidates = list(islice(self._unseen(seen), CANDIDATES))
            if not candidates:
                return
            seen.update(candidates)
            for hook in reversed(self._hooks):
                candidates = hook.order(candidates)
            for key in candidates:
                if key in self._here:
                    yield key

    def _unseen(self, seen: set[BlockKey]) -> Iterator[BlockKey]:
        """Walk anew: what has become a leaf meanwhile comes where it belongs."""
        return (key for key in self._inner.victims() if key not in seen)

    def _came(self, key: BlockKey, parent: BlockKey | None) -> None:
        if key not in self._here:
            self._here.add(key)
            for hook in self._hooks:
                hook.inserted(key, parent)


def hooked(policy: PolicyFactory, *hooks: Callable[[Callable[[], float]], Hook]) -> PolicyFactory:
    """Return a policy with hooks, each made with the policy's clock."""
    return lambda now: Hooked(policy(now), [hook(now) for hook in hooks])
