"""A policy in whose place `lru` goes on, should it raise, or name what is not in the tier.

Policies come from other packages, too, and one that fails must cost hits and not a daemon. What is
in the tier is asked of the books, because what the policy believes is not to be trusted any more.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.decide.policy.base import Policy, PolicyFactory
from kvstore.decide.policy.late_lru import LateLru, NothingStored, Stored
from kvstore.decide.policy.shadow import Choice
from kvstore.decide.rows import Rows
from kvstore.model.block import BlockKey


class Guarded:
    """`Policy` says what the methods do. error: what the policy raised, None while it works.
    stored: the books, from which `lru` learns what is in the tier."""

    def __init__(
        self,
        factory: PolicyFactory,
        now: Callable[[], float],
        *,
        failed: Callable[[Exception], None] = lambda error: None,
        rows: Rows | None = None,
    ) -> None:
        """failed: told what the policy has raised, once `lru` has taken over. rows: of the index,
        for a policy that takes them."""
        self.error: Exception | None = None
        self.stored: Stored = NothingStored()
        self._failed = failed
        self._rows = rows
        self._policy = _made(factory, now, rows)
        self._takes_levels = "level" in inspect.signature(self._policy.touch).parameters
        self._held: Counter[BlockKey] = Counter()

    @property
    def choice(self) -> Choice | None:
        """Which order the policy follows, and why; None: it has no other."""
        try:
            found = getattr(self._policy, "choice", None)
        except Exception as error:
            self._fall_back(error)
            return None
        return found if isinstance(found, Choice) else None

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        try:
            self._policy.insert(key, parent)
        except Exception as error:
            self._fall_back(error).insert(key, parent)

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        try:
            self._policy.adopt(key, parent)
        except Exception as error:
            self._fall_back(error).adopt(key, parent)

    def adopt_all(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> None:
        """Adopt several blocks, in this order."""
        adopt_run = getattr(self._policy, "adopt_run", None)
        if adopt_run is not None and list(parents[1:]) == list(keys[:-1]):
            try:
                adopt_run(keys, parents[0])
                return
            except Exception as error:
                self._fall_back(error)
        adopt = self._policy.adopt
        for key, parent in zip(keys, parents, strict=True):
            try:
                adopt(key, parent)
            except Exception as error:
                adopt = self._fall_back(error).adopt
                adopt(key, parent)

    def touch(self, prefix: Sequence[BlockKey], level: int = 0) -> None:
        try:
            if level and self._takes_levels:
                self._policy.touch(prefix, level)
            else:
                self._policy.touch(prefix)
        except Exception as error:
            self._fall_back(error).touch(prefix)

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        try:
            return self._policy.alone(prefix)
        except Exception as error:
            return self._fall_back(error).alone(prefix)

    def end(self, keys: Sequence[BlockKey]) -> None:
        try:
            self._policy.end(keys)
        except Exception as error:
            self._fall_back(error)

    def expect(self, keys: Sequence[BlockKey], at: float) -> None:
        try:
            self._policy.expect(keys, at)
        except Exception as error:
            self._fall_back(error).expect(keys, at)

    def hold(self, prefix: Sequence[BlockKey]) -> None:
        self._held.update(prefix)
        try:
            self._policy.hold(prefix)
        except Exception as error:
            self._fall_back(error)

    def let_go(self, prefix: Sequence[BlockKey]) -> None:
        self._held.subtract(prefix)
        for key in prefix:
            if not self._held[key]:
                del self._held[key]
        try:
            self._policy.let_go(prefix)
        except Exception as error:
            self._fall_back(error)

    def is_leaf(self, key: BlockKey) -> bool:
        try:
            return self._policy.is_leaf(key)
        except Exception as error:
            return self._fall_back(error).is_leaf(key)

    def save(self) -> bytes:
        try:
            saved = self._policy.save()
            if not isinstance(saved, bytes):
                raise TypeError(f"save returned {type(saved).__name__}, which is not bytes")
        except Exception as error:
            return self._fall_back(error).save()
        return saved

    def load(self, saved: bytes) -> None:
        try:
            self._policy.load(saved)
        except Exception as error:
            self._fall_back(error)

    def remove(self, key: BlockKey) -> None:
        try:
            self._policy.remove(key)
        except Exception as error:
            self._fall_back(error).remove(key)

    def victims(self) -> Iterator[BlockKey]:
        """Blocks that were passed over before the policy raised may be yielded once more. The
        caller says of a block that is not in the tier that the policy `errs`."""
        policy: Policy | None = None
        walk: Iterator[BlockKey] = iter(())
        while True:
            try:
                if policy is not self._policy:  # at first, and if it has raised meanwhile
                    policy = self._policy
                    walk = policy.victims()
                victim = next(walk)
                if not isinstance(victim, bytes):
                    raise TypeError(f"victims yielded {type(victim).__name__}, which is no key")
            except StopIteration:
                return
            except Exception as error:
                self._fall_back(error)
            else:
                yield victim

    def errs(self) -> None:
        """Note that the policy has named a block that is not in the tier, or is no more. Raises
        LookupError if that was `lru` in its place."""
        self._fall_back(LookupError("the policy names a block that is not in the tier"))

    def _fall_back(self, error: Exception) -> Policy:
        """Let `lru` go on with what is stored; raises what it raises itself."""
        if self.error is not None:
            raise error
        self.error = error
        try:
            getattr(self._policy, "retire", lambda: None)()
        except Exception:  # as it has failed before, it may fail at that
            self._rows = None
        self._policy, self._takes_levels = LateLru(self.stored, self._rows), False
        for key, count in self._held.items():
            for _ in range(count):
                self._policy.hold((key,))
        self._failed(error)
        return self._policy


def _made(factory: PolicyFactory, now: Callable[[], float], rows: Rows | None) -> Policy:
    takes: Any = factory
    try:
        takes_rows = "rows" in inspect.signature(takes).parameters
    except ValueError:  # what is written in C has none
        takes_rows = False
    made: Policy = takes(now, rows=rows) if takes_rows else takes(now)
    return made
