"""Long decisions in short steps, so that a large batch of one client never holds up the others."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

# Yields between steps, returns the decision. What it did so far is undone if it is closed early.
Steps = Generator[None, None, T]

STEP_BLOCKS = 64


def at_once(steps: Steps[T]) -> T:
    """Take all steps and return the decision."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            decision: T = done.value
            return decision
