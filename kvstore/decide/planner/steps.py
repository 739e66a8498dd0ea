"""Long decisions in short steps, so that a large batch of one client never holds up the others."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

# Yields between steps, returns the decision. `place` closed early gives back what it took; a
# `commit` closed early has published its first blocks, and may be called again.
Steps = Generator[None, None, T]

STEP_BLOCKS = 16
