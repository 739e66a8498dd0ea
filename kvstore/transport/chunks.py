"""Records as a stream of chunks, and back: what Put and Get send on the slow, universal path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvstore.model.errors import InvalidRequest
from kvstore.transport.messages import CHUNK_NBYTES_MAX


def gather(records: Iterable[memoryview]) -> Iterator[bytes]:
    """Yield the records back to back in chunks; small records share one."""
    chunk = bytearray()
    for record in records:
        for start in range(0, len(record), CHUNK_NBYTES_MAX):
            piece = record[start : start + CHUNK_NBYTES_MAX]
            if len(chunk) + len(piece) > CHUNK_NBYTES_MAX:
                yield bytes(chunk)
                chunk.clear()
            chunk += piece
    if chunk:
        yield bytes(chunk)


class Scatter:
    """Cuts chunks into records of one size and writes them where they belong.

    targets: one writable view per record; None where the record is to be skipped. It is looked at
    when bytes of the record come.
    """

    def __init__(self, targets: Sequence[memoryview | None], record_nbytes: int) -> None:
        self._targets = targets
        self._record_nbytes = record_nbytes
        self._nbytes = record_nbytes * len(targets)
        self._at = 0

    @property
    def at(self) -> int:
        """How many bytes have come."""
        return self._at

    def check(self, chunk: memoryview) -> None:
        """Raise InvalidRequest for bytes beyond the last record, or over the limit."""
        if not 0 < len(chunk) <= CHUNK_NBYTES_MAX:
            raise InvalidRequest(f"a chunk has 1..{CHUNK_NBYTES_MAX} bytes, not {len(chunk)}")
        if self._at + len(chunk) > self._nbytes:
            raise InvalidRequest(f"more bytes than the {self._nbytes} of {self._shape()}")

    def write(self, chunk: memoryview) -> None:
        """Take the next bytes. Raises as `check` does."""
        self.check(chunk)
        while chunk:
            index, offset = divmod(self._at, self._record_nbytes)
            piece = chunk[: self._record_nbytes - offset]
            target = self._targets[index]
            if target is not None:
                target[offset : offset + len(piece)] = piece
            self._at += len(piece)
            chunk = chunk[len(piece) :]

    def finish(self) -> None:
        """Raise InvalidRequest if bytes are missing."""
        if self._at != self._nbytes:
            raise InvalidRequest(f"{self._at} bytes came of the {self._nbytes} of {self._shape()}")

    def _shape(self) -> str:
        return f"{len(self._targets)} records of {self._record_nbytes} bytes"
