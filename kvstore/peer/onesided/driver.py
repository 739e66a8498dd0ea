"""What a transport has to do for one-sided reads (`Driver`), and what is said about memory.

A driver is native code. All calls of one are made by one thread, the mover's: see `mover.py`.
"""

from __future__ import annotations

import bisect
import enum
import os
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kvstore.model.errors import KVStoreError

OFFER_NBYTES_MAX = 256 << 10  # how to reach a driver, and the keys of all its memory
REGIONS_MAX = 1024
UCX_SETTINGS = {  # unless the environment says otherwise
    "UCX_HANDLE_ERRORS": "none",  # signals are the daemon's own
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}

T = TypeVar("T")


class DriverError(KVStoreError):
    """The transport could not do something. The message says what, for the log."""


class DriverMissing(DriverError):
    """The library is not installed, or does not load here. The message says how to get it."""


class State(enum.Enum):
    """Of a posted read. FAILED: it has ended, and nothing writes any more."""

    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"


class Piece(NamedTuple):
    """One record to read: `nbytes` from `source`, an address at the peer, to `target`, ours."""

    target: int
    source: int
    nbytes: int


class Regions(Generic[T]):
    """Ranges of addresses that do not overlap, and something for each."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._found: dict[int, tuple[int, T]] = {}

    def __iter__(self) -> Iterator[tuple[int, int, T]]:
        """Yield (begin, bytes, value), by address."""
        return ((begin, *self._found[begin]) for begin in self._begins)

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, begin: int, nbytes: int, value: T) -> None:
        if begin not in self._found:
            bisect.insort(self._begins, begin)
        self._found[begin] = nbytes, value

    def pop(self, begin: int) -> T | None:
        """Remove the one that begins there; return its value."""
        if begin not in self._found:
            return None
        self._begins.remove(begin)
        return self._found.pop(begin)[1]

    def find(self, begin: int, nbytes: int) -> T | None:
        """Return the value of the one that has all of these bytes."""
        at = bisect.bisect_right(self._begins, begin) - 1
        if at < 0:
            return None
        first = self._begins[at]
        size, value = self._found[first]
        return value if begin + nbytes <= first + size else None


def prepare_ucx() -> None:
    """Set what UCX reads when it is loaded."""
    for name, value in UCX_SETTINGS.items():
        os.environ.setdefault(name, value)


class Driver(Protocol):
    """One transport of this process. Each method raises DriverError.

    A remote and a read are the driver's own objects. Nothing an offer says is trusted, as far as
    the native library lets us check it: peers are those that the control connection let in.
    """

    name: str

    def offer(self) -> bytes:
        """Return how peers reach it and the keys of what is registered, for `connect`."""

    def register(self, address: int, nbytes: int) -> None:
        """Let peers read this memory, and let reads write into it."""

    def withdraw(self, address: int) -> None:
        """End what `register` began."""

    def connect(self, offer: bytes) -> Any:
        """Return a remote: a peer that made this offer."""

    def disconnect(self, remote: Any) -> None:
        """End a remote and, as soon as the transport can, every read from it."""

    def post(self, remote: Any, pieces: Sequence[Piece]) -> Any:
        """Begin to read; return the read. Each piece lies within one registered region here."""

    def state(self, read: Any) -> State:
        """Say how a read is. Not called again once it has ended: then its handles are free."""

    def progress(self) -> None:
        """Do what can be done now."""

    def wait(self, wake_fd: int, timeout_s: float, *, reading: bool) -> None:
        """Sleep until there is something to do, `wake_fd` can be read, or the time is over.
        reading: reads are under way."""

    def close(self) -> None:
        """End everything. Reads under way may write until this returns."""
