"""What a bad disk does to the files of a dead daemon: torn last writes, flipped bits.

Each wound returns the records that may be lost by it; everything else has to stay. What a scan
finds stays or goes as a whole frame; behind a good footer one bit costs one record. A tombstone has
no second copy in an open segment, so none of them is touched.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from random import Random

from kvstore.cli.root_key import keys_of
from kvstore.format.frame import FrameHeader
from kvstore.format.frame.header import MAGIC
from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.sealing import FileRoot
from kvstore.tier.file import Audit
from tests.tier.file.frames import flip
from tests.torture.spaces import Item

FLIPS_MAX = 3


class Wounds:
    """All wounds of one directory: an old one counts for more when a footer is lost."""

    def __init__(self, directory: Path, root_key: Path | None = None) -> None:
        """root_key: of an encrypted directory."""
        self._directory = directory
        self._root = FileRoot.read(root_key) if root_key is not None else None
        self._open: set[Path] = set()  # without a good footer: the next start scans them
        self._rotten: defaultdict[Path, list[Item]] = defaultdict(list)

    def tear(self, draw: Random) -> list[Item]:
        """Cut an open segment off inside its last run, as if that write had not been finished."""
        audit = self._look()
        last = {path: (at, header) for path, at, header in audit.runs if path in self._open}
        for path, (offset, header) in last.items():
            if not _frame_follows(path, offset + header.nbytes):
                os.truncate(path, offset + draw.randrange(header.nbytes))
                return records(header)
        return []

    def rot(self, draw: Random) -> list[Item]:
        """Flip single bits in frames, and in the pages that say where the frames are."""
        frames, lost = list(self._look().runs), []
        count = min(len(frames), draw.randint(1, FLIPS_MAX))
        for path, offset, header in draw.sample(frames, count):
            match draw.choice(("payload", "header", "segment header", "trailer")):
                case "payload":
                    lost += self._flip_payload(path, offset, header, draw)
                case "header":
                    flip(path, offset + draw.randrange(PAGE_NBYTES))
                    lost += records(header)
                case "segment header":
                    flip(path, draw.randrange(PAGE_NBYTES))
                case "trailer" if path not in self._open:
                    flip(path, path.stat().st_size - 1 - draw.randrange(PAGE_NBYTES))
                    self._open.add(path)
                    lost += self._rotten[path]
        return lost

    def _flip_payload(
        self, path: Path, offset: int, header: FrameHeader, draw: Random
    ) -> list[Item]:
        block = draw.randrange(len(header.blocks))
        stored_nbytes = header.blocks[block].stored_nbytes
        flip(path, offset + header.offsets[block] + draw.randrange(stored_nbytes))
        self._rotten[path] += records(header)
        return records(header) if path in self._open else [records(header)[block]]

    def _look(self) -> Audit:
        audit = Audit(self._directory, keys=keys_of(self._directory, self._root))
        is_open = (report.name for report in audit.segments if not report.sealed)
        self._open = {self._directory / name for name in is_open}
        return audit


def records(header: FrameHeader) -> list[Item]:
    """Return the names of what is in a frame."""
    return [Item(header.namespace_id, block.key, header.part) for block in header.blocks]


def _frame_follows(path: Path, offset: int) -> bool:
    """Whether anything behind `offset` looks like a frame, a tombstone for instance."""
    with path.open("rb") as file:
        file.seek(padded(offset))
        rest = file.read()
    pages = range(0, len(rest), PAGE_NBYTES)
    return any(rest[at : at + len(MAGIC)] == MAGIC for at in pages)
