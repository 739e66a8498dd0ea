"""What a system under comparison has to be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstore_bench.peers.blocks import Blocks


@dataclass(frozen=True, slots=True)
class Place:
    """Where a system runs.

    directory: what it keeps across restarts goes there. runtime: short, for sockets and logs.
    blocks: the caller's memory. threads: of its own, or requests in flight, for I/O.
    """

    directory: Path
    runtime: Path
    blocks: Blocks
    threads: int

    @property
    def round_nbytes(self) -> int:
        return self.blocks.count * self.blocks.nbytes


class Layered(Protocol):
    """What a System may be, too: one with copies of its own above what it is measured on."""

    def settle(self) -> None:
        """Have what is below write to its device what it holds in memory alone."""

    def forget(self) -> None:
        """Drop these copies: the next get comes from below, from memory where that has it."""


class System(Protocol):
    """One store. `put` and `get` move all blocks of a round in one call, from and to the caller's
    memory; a restart is the end of all its processes and a new System in the same place.

    Five methods, because only the system knows how to make its bytes safe, and how to forget them.
    """

    def put(self, keys: Sequence[bytes]) -> None:
        """Store the sources under `keys`; return when the system says they are stored."""

    def flush(self) -> None:
        """Wait until what was put is as safe as the system makes it."""

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        """Fill the targets with what is stored; return which of them were found."""

    def chill(self) -> bool:
        """Drop from memory what is stored on the device too; the caller empties the page cache.

        False: this system cannot, and has to be started anew to get it cold.
        """

    def close(self) -> None:
        """End it in an orderly way."""
