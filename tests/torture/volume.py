"""A small ext4 of its own, on a loop device: full for real, and shut down under a running daemon.

Only root may have one. It is unmounted whatever happens.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

NBYTES = 64 << 20
COMMAND_S = 30.0
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NOLOGFLUSH = 2


class Volume:
    """A context manager; `path` is where it is mounted."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kv-volume-"))
        self._image = self._directory / "image"
        self.path = self._directory / "mount"

    @staticmethod
    def possible() -> bool:
        """Whether this process may make one here."""
        tools = all(map(shutil.which, ("mkfs.ext4", "mount", "umount")))
        return tools and os.geteuid() == 0 and Path("/dev/loop-control").exists()

    def __enter__(self) -> Self:
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(NBYTES)
        try:
            _run("mkfs.ext4", "-q", str(self._image))
            self._mount()
        except BaseException:
            shutil.rmtree(self._directory)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.path.is_mount():
            _run("umount", str(self.path))
        shutil.rmtree(self._directory)

    def cut_power(self) -> None:
        """Stop the file system at once: its journal is not flushed, every later call fails."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
        finally:
            os.close(fd)

    def turn_read_only(self) -> None:
        """Refuse all writes from now on, under whoever is writing, as ext4 does after an error."""
        _run("mount", "-o", "remount,abort", str(self.path))

    def restore_power(self) -> None:
        """Mount it anew, which replays its journal. Nobody may be using it."""
        _run("umount", str(self.path))
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S)
