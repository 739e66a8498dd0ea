"""What a system has to do to be measured between two processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvstore_bench.peers.system import Place


class Lender(Protocol):
    """The process that has the blocks, in memory."""

    def put(self, keys: Sequence[bytes]) -> dict[str, Any]:
        """Take the sources; return, as JSON, where a borrower finds them."""

    def close(self) -> None:
        """End it in an orderly way."""


class Borrower(Protocol):
    """The process that gets them over TCP."""

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        """Bring all blocks into memory of this process, or memory it maps; return which came."""

    def land(self) -> None:
        """Copy what came into the caller's targets, if it is elsewhere. Not timed."""

    def forget(self) -> None:
        """Drop what came, so that the next get moves it again. Not timed."""

    def close(self) -> None:
        """End it in an orderly way."""


class Ends(Protocol):
    """A module of a system."""

    def open_lender(self, place: Place) -> Lender: ...

    def open_borrower(self, place: Place, where: dict[str, Any]) -> Borrower: ...
