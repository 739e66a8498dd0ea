"""How a run steers what befalls a daemon and hears of it: two files beside the daemon's own.

`rules` is replaced as a whole by the run, and looked at by the daemon before each call to its disk.
To `events` the daemon appends a line at a time; what it wrote outlives it. Times are those of
`time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

# What a rule may name; writes are told apart by what is written.
WRITES = ("create", "write", "tombstone", "seal")
CALLS = (*WRITES, "probe", "read", "fdatasync", "punch", "unlink", "sync_directory")
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Rule:
    """What befalls `calls` from the `skip`-th on, as long as the rule stands.

    do: "error" raises OSError(code), "hang" waits until the rule is gone, "die" is SIGKILL before
    the call, "tear" SIGKILL in the middle of what is written. disk: the only one it is about.
    """

    calls: tuple[str, ...]
    do: str
    skip: int = 0
    code: int = errno.EIO
    disk: int | None = None

    def on(self, disk: int) -> Rule:
        """Return the same for one disk."""
        return replace(self, disk=disk)


class Event(NamedTuple):
    """What the daemon did: ("fault", do, call), or ("evicted" or "unread", directory, namespace,
    key, group, shard)."""

    at: float
    what: list[str]


class Control:
    """The run's side."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._events = directory / "events"
        self._seen = 0
        self.set()
        self._events.touch()

    def set(self, *rules: Rule) -> None:
        """Let these rules stand, and no others."""
        new = self.directory / "rules.new"
        new.write_text(json.dumps([asdict(rule) for rule in rules]))
        new.rename(self.directory / "rules")

    def news(self) -> list[Event]:
        """Return what happened since the last call."""
        with self._events.open("rb") as file:
            file.seek(self._seen)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._seen += len(whole)
        split = (line.split() for line in whole.decode().splitlines())
        return [Event(float(at), what) for at, *what in split]


class Steered:
    """The daemon's side: whatever it reaches the world by asks `meet` before each call."""

    def __init__(self, directory: Path) -> None:
        self._rules = directory / "rules"
        self._events = os.open(directory / "events", os.O_WRONLY | os.O_APPEND)
        self._lock = threading.Lock()
        self._version = (0, 0)
        self._standing: list[Rule] = []
        self._met: list[int] = []

    def meet(self, call: str, disk: int) -> str:
        """Suffer what a rule says of `call`. Returns "tear" if the caller is to die half done."""
        rule = self._rule_of(call, disk)
        if rule is None:
            return ""
        self.note("fault", rule.do, call)
        if rule.do == "error":
            raise OSError(rule.code, os.strerror(rule.code))
        if rule.do == "die":
            die()
        while rule.do == "hang" and self._stands(rule):
            time.sleep(POLL_S)
        return rule.do

    def note(self, *what: object) -> None:
        """Write an event down; it outlives this process."""
        line = " ".join(map(str, (repr(time.monotonic()), *what)))
        os.write(self._events, f"{line}\n".encode())

    def _rule_of(self, call: str, disk: int) -> Rule | None:
        with self._lock:
            self._look()
            for at, rule in enumerate(self._standing):
                if call in rule.calls and rule.disk in (None, disk):
                    self._met[at] += 1
                    if self._met[at] > rule.skip:
                        return rule
        return None

    def _stands(self, rule: Rule) -> bool:
        with self._lock:
            self._look()
            return any(rule is each for each in self._standing)

    def _look(self) -> None:
        status = self._rules.stat()
        version = (status.st_mtime_ns, status.st_ino)
        if version != self._version:
            self._version = version
            found = json.loads(self._rules.read_text())
            self._standing = [Rule(**{**each, "calls": tuple(each["calls"])}) for each in found]
            self._met = [0] * len(self._standing)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives this")
