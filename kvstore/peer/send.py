"""Lent records onto a bulk connection: from slots as they are, from files piece by piece. Runs in a
thread. What lies in files is not brought into the arena: strangers evict nothing of the owner's.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

from kvstore.peer.base import LentRecord, PeerGone, PeerSlow
from kvstore.peer.bulk import SILENCE_S, Bulk, failed_connection
from kvstore.peer.read_ahead import read_ahead
from kvstore.peer.seal import PIECE_NBYTES, Sealer
from kvstore.peer.yielding import Turns
from kvstore.tier.bounces import BOUNCES

GATHERED_MAX = 64  # buffers in one call of the kernel
GATHERED_NBYTES = 4 << 20


class Dispatch:
    """The answer to one READ. start: the encoded frame before the records. readers: threads that
    read files ahead of what is sent. turns: makes those of the thread that sends."""

    def __init__(
        self,
        bulk: Bulk,
        start: bytes,
        records: Sequence[LentRecord | None],
        name: str,
        *,
        readers: ThreadPoolExecutor,
        turns: Callable[[], Turns],
    ) -> None:
        self._bulk = bulk
        self._start = start
        self._records = [record for record in records if record is not None]
        self._name = name
        self._readers = readers
        self._turns = turns
        self._stopped = False

    def stop(self) -> None:
        """From the event loop: the thread ends soon, if it has begun at all."""
        self._stopped = True
        self._bulk.shut()

    def run(self) -> None:
        """Send everything. Raises PeerSlow, PeerGone; OSError if a file cannot be read."""
        if self._stopped:
            raise PeerGone(f"a read of {self._name} was stopped", reason="closed")
        places = [each.place for each in self._records if each.place is not None]
        with (
            ExitStack() as stack,
            closing(read_ahead(places, PIECE_NBYTES, self._readers)) as pieces,
        ):
            output = _Output(self._bulk, self._name, stack, self._turns())
            output.add(memoryview(self._start), sealed=False)
            for record in self._records:
                if record.view is not None:
                    output.add(record.view)
                elif record.place is not None:
                    for _ in range(0, record.place.nbytes, PIECE_NBYTES):
                        output.add(next(pieces))
                        output.flush()  # the memory is used again
            output.flush()


class _Output:
    """Sends buffers in order, several in one call where they are small."""

    def __init__(self, bulk: Bulk, name: str, stack: ExitStack, turns: Turns) -> None:
        self._bulk = bulk
        self._name = name
        self._turns = turns
        self._waiting: list[memoryview] = []
        self._nbytes = 0
        if bulk.sealer is not None:
            self._bounce = stack.enter_context(BOUNCES.taken(PIECE_NBYTES))

    def add(self, view: memoryview, *, sealed: bool = True) -> None:
        """Send `view` now or soon; `flush` before it changes. sealed: False: it is already."""
        if self._bulk.sealer is not None and sealed:
            self._add_sealed(view, self._bulk.sealer)
            return
        self._waiting.append(view)
        self._nbytes += len(view)
        if len(self._waiting) >= GATHERED_MAX or self._nbytes >= GATHERED_NBYTES:
            self.flush()

    def _add_sealed(self, view: memoryview, sealer: Sealer) -> None:
        for start in range(0, len(view), PIECE_NBYTES):
            piece = sealer.seal(view[start : start + PIECE_NBYTES], self._bounce)
            self._waiting.append(piece)
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting, self._nbytes = self._waiting, [], 0
        try:
            send_all(self._bulk.socket, waiting)
        except BlockingIOError as error:
            raise PeerSlow(f"{self._name} received nothing for {SILENCE_S:g} s") from error
        except OSError as error:
            raise failed_connection(error, f"the connection to {self._name}") from error
        self._turns.rest()


def send_all(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send buffers back to back. Raises OSError: BlockingIOError after a silence."""
    left = [each for each in buffers if len(each)]
    while left:
        count = connection.sendmsg(left) if len(left) > 1 else connection.send(left[0])
        while left and count >= len(left[0]):
            count -= len(left[0])
            del left[0]
        if count:
            left[0] = left[0][count:]
