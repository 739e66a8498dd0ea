"""Pieces of files, read ahead of what is sent: the disk and the network work at the same time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import NamedTuple

from kvstore.model.block import FilePlace, padded
from kvstore.tier.bounces import BOUNCES

AHEAD = 2  # pieces that are read while one is sent


class _Piece(NamedTuple):
    fd: int
    offset: int
    nbytes: int


def read_ahead(
    places: Sequence[FilePlace], piece_nbytes: int, readers: ThreadPoolExecutor
) -> Generator[memoryview, None, None]:
    """Yield what is in `places`, in order, in pieces of at most `piece_nbytes`.

    Each piece is good until the next one is asked for. Close the generator: no reader touches its
    memory after that. piece_nbytes: whole pages. Raises OSError if a file cannot be read.
    """
    with ExitStack() as stack:
        pieces = list(_cut(places, piece_nbytes, stack))
        count = min(1 + AHEAD, len(pieces))
        bounces = [stack.enter_context(BOUNCES.taken(piece_nbytes)) for _ in range(count)]
        under_way: deque[Future[memoryview]] = deque()
        try:
            for piece, bounce in zip(pieces, bounces, strict=False):
                under_way.append(readers.submit(_read, piece, bounce))
            for number in range(len(pieces)):
                yield under_way.popleft().result()
                if (following := number + count) < len(pieces):
                    bounce = bounces[number % count]  # the one just yielded is free again
                    under_way.append(readers.submit(_read, pieces[following], bounce))
        finally:
            wait([each for each in under_way if not each.cancel()])


def _cut(places: Sequence[FilePlace], piece_nbytes: int, stack: ExitStack) -> Generator[_Piece]:
    """Cut places into pieces. Each file is opened once."""
    fds: dict[str, int] = {}
    for place in places:
        if (fd := fds.get(place.path)) is None:
            fd = fds[place.path] = _opened(place.path)
            stack.callback(os.close, fd)
        for start in range(0, place.nbytes, piece_nbytes):
            yield _Piece(fd, place.offset + start, min(piece_nbytes, place.nbytes - start))


def _opened(path: str) -> int:
    """Open a file, past the page cache where that works."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags)


def _read(piece: _Piece, bounce: memoryview) -> memoryview:
    count = os.preadv(piece.fd, [bounce[: padded(piece.nbytes)]], piece.offset)
    if count < piece.nbytes:
        raise OSError("a file ends early")
    return bounce[: piece.nbytes]
