"""Records from a bulk connection into slots, hashed while the cache has them. Runs in a thread.

The same rule as for reads of a bucket: who stops early shuts the socket, waits until the thread has
ended, and only then gives the slots back.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from itertools import groupby

from kvstore.model.checksum import PiecewiseChecksum, received
from kvstore.peer.base import PeerCorrupt, PeerGone, PeerSlow
from kvstore.peer.bulk import SILENCE_S, Bulk, failed_connection
from kvstore.peer.seal import PIECE_NBYTES, TAG_NBYTES, Opener
from kvstore.peer.wire import HELD
from kvstore.tier.bounces import BOUNCES


class Receipt:
    """The records of one READ. sizes, checksums, targets: one item per record."""

    def __init__(
        self,
        bulk: Bulk,
        sizes: Sequence[int],
        checksums: Sequence[int],
        targets: Sequence[memoryview | None],
        name: str,
    ) -> None:
        self._bulk = bulk
        self._sizes = sizes
        self._checksums = checksums
        self._targets = targets
        self._name = name
        self._stopped = False

    def stop(self) -> None:
        """From the event loop: the thread ends soon, if it has begun at all."""
        self._stopped = True
        self._bulk.shut()

    def run(self) -> list[int]:
        """Fill the targets; return the places of those whose checksums do not match.

        Raises PeerGone also for records that were not held until they were sent.
        """
        try:
            if self._stopped:
                raise PeerGone(f"a read from {self._name} was stopped", reason="closed")
            wrong = self._records()
            if self._trailer() != HELD:
                raise PeerGone(f"{self._name} evicted or freed what was being read", reason="lease")
            return wrong
        except BlockingIOError as error:
            raise PeerSlow(f"{self._name} sent nothing for {SILENCE_S:g} s") from error
        except OSError as error:
            raise failed_connection(error, f"the connection to {self._name}") from error

    def _records(self) -> list[int]:
        wrong: list[int] = []
        with BOUNCES.taken(PIECE_NBYTES) as bounce:
            for is_wanted, run in groupby(self._numbered(), lambda item: item[2] is not None):
                items = list(run)
                if not is_wanted:
                    for _, nbytes, _ in items:
                        self._drop(nbytes, bounce)
                    continue
                targets = [target[:nbytes] for _, nbytes, target in items if target is not None]
                found = self._summed(targets, bounce)
                wrong += [
                    number
                    for (number, *_), sum_ in zip(items, found, strict=True)
                    if sum_ != self._checksums[number]
                ]
        return wrong

    def _numbered(self) -> Iterator[tuple[int, int, memoryview | None]]:
        """Yield number, size and target of each record that has bytes."""
        for number, nbytes in enumerate(self._sizes):
            if nbytes:
                yield number, nbytes, self._targets[number]

    def _summed(self, targets: Sequence[memoryview], bounce: memoryview) -> list[int]:
        """Fill `targets` with records; return their checksums."""
        if self._bulk.opener is None:
            try:
                sums = received(self._bulk.socket.fileno(), targets)
            except EOFError:
                raise _ended() from None
            if sums is not None:
                return sums
        return [self._summed_piecewise(target, bounce) for target in targets]

    def _summed_piecewise(self, target: memoryview, bounce: memoryview) -> int:
        found = PiecewiseChecksum()
        for piece in _pieces(target):
            self._receive(piece, bounce)
            found.add(piece)
        return found.value

    def _drop(self, nbytes: int, bounce: memoryview) -> None:
        with BOUNCES.taken(PIECE_NBYTES) as dropped:
            for start in range(0, nbytes, PIECE_NBYTES):
                self._receive(dropped[: min(PIECE_NBYTES, nbytes - start)], bounce)

    def _receive(self, target: memoryview, bounce: memoryview) -> None:
        if self._bulk.opener is None:
            receive_into(self._bulk.socket, target)
        else:
            _receive_sealed(self._bulk, self._bulk.opener, target, bounce)

    def _trailer(self) -> bytes:
        held = memoryview(bytearray(1))
        self._receive(held, memoryview(bytearray(1 + TAG_NBYTES)))
        return bytes(held)


def _receive_sealed(bulk: Bulk, opener: Opener, target: memoryview, bounce: memoryview) -> None:
    piece = bounce[: len(target) + TAG_NBYTES]
    receive_into(bulk.socket, piece)
    opener.open(piece, target)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises OSError: BlockingIOError after a silence; PeerGone at the end."""
    at = 0
    while at < len(target):
        count = connection.recv_into(target[at:])
        if not count:
            raise _ended()
        at += count


def _ended() -> PeerGone:
    return PeerGone("a peer ended the connection within a read", reason="closed")


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), PIECE_NBYTES):
        yield view[start : start + PIECE_NBYTES]


def check_wrong(wrong: Sequence[int], name: str) -> None:
    """Raise PeerCorrupt if some records were not what their checksums say."""
    if wrong:
        raise PeerCorrupt(
            f"{len(wrong)} records of {name} do not match their checksums",
            reason="checksum",
            records=wrong,
        )
