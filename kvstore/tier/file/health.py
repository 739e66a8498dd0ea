"""Whether one directory can be used: try it out, measure its free bytes, and remember suspects."""

from __future__ import annotations

from functools import partial

from kvstore.tier.file.calls import Calls
from kvstore.tier.file.directory import try_out
from kvstore.tier.file.segment import FileExtent, FramePlace
from kvstore.tier.file.segment_file import SegmentFiles
from kvstore.tier.file.space import Space
from kvstore.tier.file.threads import Run


class Health:
    """free_bytes_min: of the file system, left to others as `measure_free` finds it.

    suspects: frames that could not be read, or that may not be durable. They are not served again.
    """

    def __init__(
        self, space: Space, files: SegmentFiles, calls: Calls, run: Run, *, free_bytes_min: int
    ) -> None:
        self.free_bytes_min = free_bytes_min
        self.suspects: set[FramePlace] = set()
        self._space = space
        self._files = files
        self._calls = calls
        self._run = run

    async def measure_free(self) -> None:
        """Look how much the disk has left, if some of it is for others."""
        if self.free_bytes_min:
            measure = partial(self._files.disk.free_nbytes, self._files.directory)
            self._space.leave_free(await self._run(measure), self.free_bytes_min)

    async def try_out(self, room_nbytes: int) -> None:
        """Write a small file, sync it and read it again. Raises DiskFull, DiskFailed.

        room_nbytes: what the file system must have left.
        """
        files = self._files
        trial = partial(
            try_out, files.disk, files.directory, direct=files.direct, room_nbytes=room_nbytes
        )
        with self._calls.one():
            await self._run(trial)

    def distrust(self, extent: FileExtent) -> None:
        """Note that a frame could not be read."""
        self.suspects.add(FramePlace(self._space.segments[extent.segment].tag, extent.offset))

    @property
    def not_to_be_trusted(self) -> set[FramePlace]:
        """The suspects that are still there, and what never was known to be durable."""
        tags = {segment.tag for segment in self._space.segments}
        return self._space.segments.not_durable | {s for s in self.suspects if s.tag in tags}
