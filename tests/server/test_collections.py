"""Garbage collections of a daemon: short however much it holds, and still complete enough."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvstore.node import bound_collections


class Call:
    """A cycle, as gRPC makes one for every call."""

    def __init__(self) -> None:
        self.context = self


@pytest.fixture
def bounded() -> Iterator[None]:
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    bound_collections()
    yield
    gc.callbacks[:] = callbacks
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("bounded")
def test_what_lives_long_is_not_walked_again_and_cycles_that_end_late_are_freed() -> None:
    held: list[list[int]] = [[number] for number in range(100_000)]
    assert gc.get_freeze_count() > 50_000
    calls = [Call() for _ in range(100)]
    gone = [weakref.ref(call) for call in calls]
    gc.collect(1)  # now they are old
    del calls
    held += [[number] for number in range(100_000)]
    assert not any(ref() for ref in gone)
