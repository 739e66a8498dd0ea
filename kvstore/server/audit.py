"""The audit log: who was refused, and who changed or saw what. Never keys, tokens or prompts.

A call only puts its line into a bounded queue; a thread writes. What does not fit, and what a full
disk does not take, is dropped and counted, and the next line says how many: no call ever waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kvstore.model.errors import ConfigError
from kvstore.model.tenant import Principal
from kvstore.settings import SecuritySettings
from kvstore.settings.security import JOURNAL
from kvstore.system.audit_chain import (
    START,
    Chain,
    Head,
    audit_key,
    last_line,
    read_head,
    write_head,
)

logger = logging.getLogger(__name__)

QUEUE_MAX = 4096
REFUSALS_MAX = 10  # lines a second for one peer; the others are summed
PEERS_MAX = 1024
TEXT_CHARS_MAX = 200
WAKE_S = 1.0
CLOSE_S = 2.0
JOURNAL_SOCKET = "/run/systemd/journal/socket"


class PartlyWritten(OSError):
    """A sink failed in the middle. count: how many lines it had written before."""

    def __init__(self, cause: OSError, count: int) -> None:
        super().__init__(cause.errno, cause.strerror or str(cause))
        self.count = count


class Sink(Protocol):
    """Where lines go."""

    def begin(self) -> Head | None:
        """Open it; return its last line, None if it tells none. Raises OSError."""

    def write(self, lines: list[bytes]) -> None:
        """Write all lines. Raises OSError if none is written, PartlyWritten if some are."""

    def moved(self) -> bool:
        """Tell whether it goes on in a new place since the last line."""

    def close(self) -> None: ...


class FileSink:
    """Appends to a file, mode 0600; one that was moved away is made anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def begin(self) -> Head | None:
        last = last_line(self._path)
        self._fd = self._opened()
        return last

    def write(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        before = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError(28, os.strerror(28))
            os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)  # no half line stays
            raise

    def moved(self) -> bool:
        """Go on in a new file if the old one was moved away; tell whether it was."""
        try:
            there, ours = os.stat(self._path), os.fstat(self._fd)
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                return False
        except FileNotFoundError:
            pass
        fd = self._opened()
        os.close(self._fd)
        self._fd = fd
        return True

    def close(self) -> None:
        os.close(self._fd)

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")  # what a crash cut off stays a line of its own
        return fd


class JournalSink:
    """Sends to systemd's journal, by its native protocol."""

    def __init__(self, path: str = JOURNAL_SOCKET) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(CLOSE_S)
        self._path = path

    def begin(self) -> Head | None:
        return None  # what it was is noted beside the key

    def write(self, lines: list[bytes]) -> None:
        head = b"PRIORITY=5\nSYSLOG_IDENTIFIER=kvstore-audit\nMESSAGE="
        for sent, line in enumerate(lines):
            try:
                self._socket.sendto(head + line, self._path)
            except OSError as error:
                raise PartlyWritten(error, sent) from error

    def moved(self) -> bool:
        return False

    def close(self) -> None:
        self._socket.close()


class AuditLog:
    """Takes events from any thread. `start`, then `close`."""

    def __init__(
        self,
        sink: Sink,
        key: bytes,
        head_path: Path,
        written: Callable[[str, int], None],
    ) -> None:
        """head_path: where the last line is noted. written: is told ("written" or "dropped", how
        many)."""
        self._sink = sink
        self._chain = Chain(key)
        self._head_path = head_path
        self._written = written
        self._queue: deque[dict[str, Any]] = deque()
        self._more = threading.Condition()
        self._dropped = 0
        self._refusals = Refusals()
        self._follows = True
        self._failing = self._unnoted = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-audit", daemon=True)

    def start(self, **about: Any) -> None:
        """Begin to write, where the last start ended; the first line tells `about` this one.

        Only who owns the daemon's sockets may. Raises ConfigError.
        """
        try:
            last = self._sink.begin()
        except OSError as error:
            raise ConfigError(f"security.audit: cannot be written: {error}") from error
        noted = read_head(self._head_path)
        self._chain.head = max(last or START, noted or START, key=lambda each: each.seq)
        self.event("start", **about)
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, and end. Blocks, CLOSE_S at most."""
        self.event("stop")
        with self._more:
            self._closed = True
            self._more.notify()
        self._thread.join(CLOSE_S)

    def event(self, event: str, **fields: Any) -> None:
        """Note what happened to the daemon itself."""
        self._put({"event": event} | fields)

    def call(
        self, method: str, principal: Principal | None, peer: str, outcome: str, **counts: Any
    ) -> None:
        """Note a call. outcome: "ok", or the class of the error."""
        self._put(_call(method, principal, peer, outcome) | counts)

    def refused(
        self, method: str, principal: Principal | None, peer: str, reason: str, why: str
    ) -> None:
        """Note a call that was refused; of one peer and tenant a few a second, the others as a
        sum."""
        if self._refusals.note(peer, principal.tenant if principal else ""):
            fields = _call(method, principal, peer, "refused")
            self._put(fields | {"reason": reason, "why": why[:TEXT_CHARS_MAX]})

    def _put(self, fields: dict[str, Any]) -> None:
        stamped = {"time": round(time.time(), 3)} | fields
        with self._more:
            if len(self._queue) >= QUEUE_MAX:
                self._dropped += 1
                self._written("dropped", 1)
                return
            self._queue.append(stamped)
            self._more.notify()

    def _run(self) -> None:
        while True:
            with self._more:
                if not self._queue and not self._closed:
                    self._more.wait(WAKE_S)
                batch, closed, dropped = list(self._queue), self._closed, self._dropped
                self._queue.clear()
            now = round(time.time(), 3)
            for (peer, tenant), more in self._refusals.sums(everything=closed):
                summed = {"event": "refusals", "tenant": tenant, "peer": peer, "more": more}
                batch.append({"time": now} | summed)
            if batch:
                self._write(batch, dropped)
            if closed:
                self._sink.close()
                return

    def _write(self, batch: list[dict[str, Any]], dropped: int) -> None:
        heads = [self._chain.head]
        try:
            self._follows |= self._sink.moved()
            if dropped:
                batch[0]["dropped"] = dropped
            lines: list[bytes] = []
            for fields in batch:
                lines.append(self._chain.line(fields, follows=self._follows and not lines))
                heads.append(self._chain.head)
            self._sink.write(lines)
        except OSError as error:
            count = error.count if isinstance(error, PartlyWritten) else 0
            if not self._failing:
                logger.warning("audit=not_written reason=%r", str(error))
            self._failing = True
        else:
            count = len(batch)
            self._failing = False
        self._chain.head = heads[count]  # what was not written is no link of the chain
        lost = len(batch) - count
        with self._more:
            self._dropped += lost - (dropped if count else 0)
        if lost:
            self._written("dropped", lost)
        if count:
            self._follows = False
            self._note_head()
            self._written("written", count)

    def _note_head(self) -> None:
        """Note the last line. Where that fails, a cut at the end is not found; no line is lost."""
        try:
            write_head(self._head_path, self._chain.head)
        except OSError as error:
            if not self._unnoted:
                logger.warning("audit=head_not_noted reason=%r", str(error))
            self._unnoted = True
        else:
            self._unnoted = False


class Refusals:
    """Counts refusals of each peer and tenant, by the second. All processes of a user are one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._second = 0
        self._counts: dict[tuple[str, str], int] = {}

    def note(self, peer: str, tenant: str) -> bool:
        """Count one; tell whether it gets a line of its own."""
        who = peer.partition(" pid=")[0], tenant
        with self._lock:
            if who not in self._counts and len(self._counts) >= PEERS_MAX:
                who = "others", tenant
            self._counts[who] = self._counts.get(who, 0) + 1
            return self._counts[who] <= REFUSALS_MAX

    def sums(self, *, everything: bool = False) -> list[tuple[tuple[str, str], int]]:
        """Return ((peer, tenant), refusals without a line) of the second that is over."""
        with self._lock:
            second = int(self._now())
            if second == self._second and not everything:
                return []
            self._second = second
            counts, self._counts = self._counts, {}
        return [(who, n - REFUSALS_MAX) for who, n in counts.items() if n > REFUSALS_MAX]


def open_audit(settings: SecuritySettings, written: Callable[[str, int], None]) -> AuditLog | None:
    """Return the log that the settings ask for, None for none. Raises ConfigError."""
    if not settings.audit:
        return None
    key_path = key_path_of(settings)
    key = audit_key(key_path, make=True)
    sink = JournalSink() if settings.audit == JOURNAL else FileSink(Path(settings.audit))
    return AuditLog(sink, key, head_path_of(key_path), written)


def key_path_of(settings: SecuritySettings) -> Path:
    """Return where the key of the log is."""
    return Path(settings.audit_key or f"{settings.audit}.key")


def head_path_of(key_path: Path) -> Path:
    """Return where the last line is noted: where the log's readers cannot write either."""
    return key_path.with_name(f"{key_path.name}.head")


def _call(method: str, principal: Principal | None, peer: str, outcome: str) -> dict[str, Any]:
    return {
        "tenant": principal.tenant if principal else "",
        "principal": principal.name[:TEXT_CHARS_MAX] if principal else "",
        "peer": peer[:TEXT_CHARS_MAX],
        "method": method,
        "outcome": outcome,
    }
