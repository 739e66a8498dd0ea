"""Places in files, leased to clients that read them by themselves: into GPU memory, say.

A place needs no slot, but holds a whole frame in the file tier, so all of them together may hold a
part of it only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.decide.index import HeldSlot, StoredFrame, StoredPart
from kvstore.decide.planner import Leases, frames_of, is_readable
from kvstore.model.block import FilePlace, padded
from kvstore.move.file_reads import RawFile, Reads


class FileLease(NamedTuple):
    """Places, one for each record or None, and the frames they are in, to be held by a lease."""

    places: tuple[FilePlace | None, ...]
    frames: tuple[StoredFrame, ...]

    @property
    def nbytes(self) -> int:
        """What their reader reads."""
        return sum(padded(place.nbytes) for place in self.places if place is not None)


NO_FILE_LEASE = FileLease((), ())


class FileLeases:
    """nbytes_max: what leases may hold of the file tier, all together."""

    def __init__(self, reads: Reads, leases: Leases, *, nbytes_max: int) -> None:
        self._reads = reads
        self._leases = leases
        self.nbytes_max = nbytes_max

    @property
    def room_bytes(self) -> int:
        """What may be leased now. A frame that two leases hold counts twice."""
        return self.nbytes_max - self._leases.framed_bytes

    def has_room(self, records: Sequence[StoredPart | None]) -> bool:
        """Say whether those that are readable, and not in the arena, may all be leased now."""
        frames = frames_of(r for r in records if r is not None and r.resident is None)
        return len(self._files(frames)) == len(frames)

    def places(
        self, records: Sequence[StoredPart | None], held: Sequence[HeldSlot | None]
    ) -> FileLease:
        """Choose places for records that have no slot, from the first on, as far as there is room.

        They are good once a lease holds the frames; until then nothing else may run."""
        wanted = [
            record if slot is None and is_readable(record) else None
            for record, slot in zip(records, held, strict=True)
        ]
        files = self._files(frames_of(record for record in wanted if record is not None))
        places: list[FilePlace | None] = []
        for record in wanted:
            file = files.get(record.frame) if record is not None and record.frame else None
            if record is None or file is None:
                places.append(None)
            else:
                places.append(FilePlace(file.path, file.offsets[record.position], record.nbytes))
        return FileLease(tuple(places), tuple(files))

    def _files(self, frames: Sequence[StoredFrame]) -> dict[StoredFrame, RawFile]:
        """Return where frames are, of those that may be leased now."""
        room = self.room_bytes
        files: dict[StoredFrame, RawFile] = {}
        for frame in frames:
            file = self._reads.raw_file(frame) if frame.extent.nbytes <= room else None
            if file is not None:
                files[frame] = file
                room -= frame.extent.nbytes
        return files
