"""Copy a body that the library returns into the caller's buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvstore.model.block import Buffer
from kvstore.model.checksum import copy_bytes
from kvstore.tier.object.failure import ObjectFailed
from kvstore.tier.object.requests import Filled


class Drain:
    """One body. A thread waits for each chunk and copies it into `buffers`."""

    def __init__(
        self, body: Iterable[Buffer], buffers: Sequence[memoryview], filled: Filled
    ) -> None:
        self._body = body
        self._buffers = buffers
        self._filled = filled
        self._filling = threading.Lock()
        self._stopped = False

    def run(self) -> None:
        """Fill the buffers. Raises ObjectFailed for more bytes than they hold, or less."""
        chunks = (memoryview(chunk) for chunk in self._body if chunk)
        left = memoryview(b"")
        for index, buffer in enumerate(self._buffers):
            end = 0
            while end < len(buffer):
                left = left or next(chunks, left)
                if not left:
                    raise ObjectFailed("get: less bytes than asked for", reason="short")
                piece, left = left[: len(buffer) - end], left[len(buffer) - end :]
                with self._filling:
                    if self._stopped:
                        return
                    copy_bytes(piece, buffer[end : end + len(piece)])
                    end += len(piece)
                    if end == len(buffer):
                        self._filled(index)
        if left or any(chunks):
            raise ObjectFailed("get: more bytes than asked for", reason="short")

    def stop(self) -> None:
        """After this returns, no buffer is used. The thread ends with the next chunk or timeout."""
        with self._filling:
            self._stopped = True
