"""Lines of an audit log that show when one was changed, cut out or added.

A line is a JSON object whose last field is mac = HMAC-SHA256(key, mac of the line before | line
without mac), in hex. `seq` counts lines. A line that begins a file, or follows a start of the
daemon, says in `prev` which mac it follows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.model.errors import ConfigError

KEY_NBYTES = 32
LINE_NBYTES_MAX = 64 << 10
FIRST = bytes(hashlib.sha256().digest_size)  # the mac before the first line there ever was
_MAC = b',"mac":"'


class Head(NamedTuple):
    """The last line: its number and its mac."""

    seq: int
    mac: bytes


START = Head(0, FIRST)


class Chain:
    """Makes lines. `head` is what the next one follows; set it back if a line was not written."""

    def __init__(self, key: bytes, head: Head = START) -> None:
        self._key = key
        self.head = head

    def line(self, fields: dict[str, Any], *, follows: bool = False) -> bytes:
        """Return the next line, with its end. follows: say which mac it follows."""
        told = {"seq": self.head.seq + 1} | fields
        if follows:
            told["prev"] = self.head.mac.hex()
        body = json.dumps(told, separators=(",", ":")).encode()
        mac = _mac(self._key, self.head.mac, body)
        self.head = Head(self.head.seq + 1, mac)
        return body[:-1] + _MAC + mac.hex().encode() + b'"}\n'


class Fault(NamedTuple):
    """What is wrong at a line, counted from 1 over all files."""

    line: int
    what: str


class Verdict(NamedTuple):
    """What was found. head: of the last good line."""

    lines: int
    faults: tuple[Fault, ...]
    head: Head


def verify(lines: Iterable[bytes], key: bytes, expected: Head | None = None) -> Verdict:
    """Check lines in the order in which they were written, oldest first.

    expected: the last line that is known to have been written. The first line given may follow
    others that are not.
    """
    faults: list[Fault] = []
    head: Head | None = None
    number = 0
    for number, line in enumerate(lines, 1):
        found = _checked(line, key, head)
        if isinstance(found, str):
            faults.append(Fault(number, found))
            head = _claimed(line)  # so that one fault is one fault
        else:
            head = found
    last = head or START
    if expected is not None and last.seq < expected.seq:
        faults.append(Fault(number + 1, f"the last {expected.seq - last.seq} lines are missing"))
    return Verdict(number, tuple(faults), last)


def last_line(path: Path) -> Head | None:
    """Return the head of a file as its last whole line claims; None if there is no line.

    Raises OSError.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LINE_NBYTES_MAX))
            tail = file.read()
    except FileNotFoundError:
        return None
    for line in reversed(tail.splitlines()):
        if (claimed := _claimed(line)) is not None:
            return claimed
    return None


def audit_key(path: Path, *, make: bool = False) -> bytes:
    """Return the key in a file, made first if need be. Raises ConfigError."""
    try:
        if make:
            _make_key(path)
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1024).decode("ascii").strip()
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"{path}: others may read or write it: chmod 600 {path}")
        key = bytes.fromhex(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a key of the audit log") from error
    if len(key) != KEY_NBYTES:
        raise ConfigError(f"{path}: not a key of the audit log")
    return key


def read_head(path: Path) -> Head | None:
    """Return what was noted as the last line that was written; None if nothing was."""
    try:
        return _claimed(path.read_bytes().strip())
    except OSError:
        return None


def write_head(path: Path, head: Head) -> None:
    """Note the last line. Raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "wb", opener=_private) as file:
        file.write(f'{{"seq":{head.seq}{_MAC.decode()}{head.mac.hex()}"}}\n'.encode())
    os.replace(fresh, path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _make_key(path: Path) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(KEY_NBYTES) + "\n")


def _checked(line: bytes, key: bytes, before: Head | None) -> Head | str:
    """Return the head after this line, or what is wrong with it."""
    claimed = _claimed(line)
    if claimed is None:
        return "not a whole line"
    body = line.rstrip(b"\n").rpartition(_MAC)[0] + b"}"
    fields = json.loads(body)
    follows = bytes.fromhex(str(fields.get("prev", ""))) or None
    if before is None:
        before = Head(claimed.seq - 1, follows or FIRST)
    if not hmac.compare_digest(_mac(key, before.mac, body), claimed.mac):
        own = follows is not None and _mac(key, follows, body) == claimed.mac
        return "lines before it are missing" if own else "changed, or lines before it are missing"
    if claimed.seq != before.seq + 1:
        return "not the next line"
    return claimed


def _claimed(line: bytes) -> Head | None:
    """Return what a line says of itself, None if it is no line."""
    body, mac, rest = line.rstrip(b"\n").rpartition(_MAC)
    try:
        fields = json.loads(body + b"}") if mac and len(line) <= LINE_NBYTES_MAX else None
        if not isinstance(fields, dict) or rest[-2:] != b'"}' or type(fields.get("seq")) is not int:
            return None
        bytes.fromhex(str(fields.get("prev", "")))
        digest = bytes.fromhex(rest[:-2].decode("ascii"))
    except (ValueError, RecursionError):
        return None
    is_as_written = digest.hex().encode() == rest[:-2]  # `fromhex` takes spaces, and capitals
    return Head(fields["seq"], digest) if is_as_written and len(digest) == len(FIRST) else None


def _mac(key: bytes, before: bytes, body: bytes) -> bytes:
    return hmac.new(key, before + body, hashlib.sha256).digest()


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield whole lines out of chunks, and what is left at the end."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        if len(rest) > LINE_NBYTES_MAX:
            yield rest
            rest = b""
    if rest:
        yield rest
