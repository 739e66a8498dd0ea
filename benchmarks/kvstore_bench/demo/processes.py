"""Child processes that end when the demo ends, however it ends, and leave nothing behind.

Every child gets a session of its own, so that whatever it starts can be found and killed by the
session's id, never by name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.model.errors import Unavailable

SHARED_MEMORY = Path("/dev/shm")
STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 10.0
LOWEST_PRIORITY = 19


class Child:
    """A running command and whatever it started. Its output goes to `log`."""

    def __init__(
        self, name: str, command: Sequence[str], *, environ: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.session = self._process.pid

    def check(self) -> None:
        """Raise Unavailable, with the end of its log, if it has ended."""
        status = self._process.poll()
        if status is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise Unavailable(f"{self.name} ended with status {status}; {self.log} ends:\n{tail}")

    def yield_to_others(self, name: str) -> None:
        """Give the processes of its session with this name the lowest priority.

        It is that of their first thread; threads they have started keep theirs.
        """
        for pid in session_members(self.session):
            if _name(pid) == name:
                os.setpriority(os.PRIO_PROCESS, pid, LOWEST_PRIORITY)

    def stop(self) -> None:
        """Ask it to end and wait for all it started; kill what is left after STOP_TIMEOUT_S."""
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while session_members(self.session) and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """SIGKILL everything of its session and wait until it is gone.

        Python's resource trackers are not killed but left to do their work: they end when those
        they watch have ended, and unlink the shared memory that these no longer could.
        """
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while members := session_members(self.session):
            patience = time.monotonic() < deadline
            for pid in members:
                if not (patience and _is_resource_tracker(pid)):
                    _kill(pid)
            self._process.poll()
            time.sleep(0.02)
            if time.monotonic() > deadline + KILL_TIMEOUT_S:
                raise Unavailable(f"{self.name}: processes {members} survive SIGKILL")
        self._process.wait(KILL_TIMEOUT_S)


def session_members(session: int) -> list[int]:
    """Return the living processes of a session; those that only wait to be reaped do not count."""
    members = []
    for pid in _processes():
        try:
            # "pid (command, which may hold anything) state ppid pgrp session ..."
            state, _, _, sid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # ended meanwhile
        if int(sid) == session and state != "Z":
            members.append(pid)
    return members


def shared_memory_of(pid: int) -> set[str]:
    """Return the names in /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line)
    return {Path(path).name for path in paths if not path.endswith(" (deleted)")}


def shared_memory_in_use() -> set[str]:
    """Return the names in /dev/shm that any living process has mapped."""
    return {name for pid in _processes() for name in shared_memory_of(pid)}


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # ended meanwhile


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # ended meanwhile


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # ended by itself
