"""Tokens, and the file that lists them: one JSON object a line, without the tokens themselves.

    kvs1_<id, 12 characters>_<256 random bits, 43 characters>

Only the SHA-256 of a token is kept. So many random bits need no slow hash.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.model.tenant import Role, check_tenant_name, role_of
from kvstore.system.private_files import is_open_to_others

KIND = "kvs1"
ID_CHARS = 12
TEXT_CHARS_MAX = 128
FILE_NBYTES_MAX = 1 << 20
TOKENS_MAX = 4096
NOTE_CHARS_MAX = 200
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
_NOBODYS = hashlib.sha256(secrets.token_bytes(32)).digest()  # compared with where there is no token

Hex256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class TokenEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token of the file. not_after: seconds since the epoch; 0: it does not expire."""

    id: Annotated[str, msgspec.Meta(pattern="^[a-z2-7]{12}$")]
    sha256: Hex256
    tenant: str
    role: str
    not_after: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    note: Annotated[str, msgspec.Meta(max_length=NOTE_CHARS_MAX)] = ""

    def is_valid(self, now: float) -> bool:
        """Tell whether it has not expired at `now`, seconds since the epoch."""
        return not self.not_after or now < self.not_after


class Shown(NamedTuple):
    """What a caller showed: enough to ask again whether it is valid, and not the token."""

    id: str
    digest: bytes


def make_token(
    tenant: str, role: Role, *, not_after: float = 0.0, note: str = ""
) -> tuple[str, TokenEntry]:
    """Return a new token, and what the file keeps of it. Raises InvalidRequest."""
    check_tenant_name(tenant)
    if len(note) > NOTE_CHARS_MAX:
        raise InvalidRequest(f"a note has at most {NOTE_CHARS_MAX} characters")
    token_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(ID_CHARS))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    text = f"{KIND}_{token_id}_{secret}"
    entry = TokenEntry(token_id, _digest(text).hex(), tenant, role.word, not_after, note)
    return text, entry


def shown(text: str) -> Shown:
    """Return what a token's text says; of one that is none, what no token has."""
    kind, _, rest = text[:TEXT_CHARS_MAX].partition("_")
    token_id, _, _ = rest.partition("_")
    known = kind == KIND and len(text) <= TEXT_CHARS_MAX
    return Shown(token_id if known else "", _digest(text[:TEXT_CHARS_MAX]))


class Tokens:
    """The tokens of one file, to be looked up."""

    def __init__(self, entries: Iterable[TokenEntry] = ()) -> None:
        self._by_id = {entry.id: entry for entry in entries}
        self._digests = {entry.id: bytes.fromhex(entry.sha256) for entry in self._by_id.values()}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, token: Shown, now: float) -> TokenEntry | None:
        """Return the token that is meant, if it is right and has not expired.

        It takes as long for an id that there is none of.
        """
        right = hmac.compare_digest(self._digests.get(token.id, _NOBODYS), token.digest)
        entry = self._by_id.get(token.id)
        return entry if right and entry is not None and entry.is_valid(now) else None


def read_tokens(path: Path) -> list[TokenEntry]:
    """Return what a file lists; nothing if there is none.

    Raises ConfigError if others may read or write it, or if a line is wrong.
    """
    try:
        with path.open("rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            data = file.read(FILE_NBYTES_MAX + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > FILE_NBYTES_MAX:
        raise ConfigError(f"{path}: more than {FILE_NBYTES_MAX} bytes")
    entries = [
        _entry(path, number, line)
        for number, line in enumerate(data.splitlines(), 1)
        if line.strip() and not line.startswith(b"#")
    ]
    if len({entry.id for entry in entries}) != len(entries) or len(entries) > TOKENS_MAX:
        raise ConfigError(f"{path}: an id is there twice, or there are more than {TOKENS_MAX}")
    return entries


def write_tokens(path: Path, entries: Sequence[TokenEntry]) -> None:
    """Replace the file at once, mode 0600; its owner stays. Raises OSError and InvalidRequest."""
    if len(entries) > TOKENS_MAX:
        raise InvalidRequest(f"{len(entries)} tokens; the limit is {TOKENS_MAX}: revoke some")
    target = path.resolve()
    owner = (target if target.exists() else target.parent).stat()
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            if os.geteuid() == 0:  # for the user whose daemon reads it
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)  # a crash must not bring back what was revoked
    finally:
        os.close(directory)


@contextlib.contextmanager
def changing(path: Path) -> Iterator[list[TokenEntry]]:
    """Yield the file's tokens; what they are at the end of the context is written.

    Nobody else changes the file meanwhile. Raises ConfigError, InvalidRequest and OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # the directory may be another's
    lock = os.open(f"{path.resolve()}.lock", flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = read_tokens(path)
        before = list(entries)
        yield entries
        if entries != before:
            write_tokens(path, entries)
    finally:
        os.close(lock)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _check_private(path: Path, status: os.stat_result) -> None:
    if is_open_to_others(status):
        raise ConfigError(f"{path}: others may read or write it: chmod 600 {path}")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path}: it belongs to user {status.st_uid}: chown it to your own")


def _entry(path: Path, number: int, line: bytes) -> TokenEntry:
    try:
        entry = msgspec.json.decode(line, type=TokenEntry)
        check_tenant_name(entry.tenant)
        role_of(entry.role)
    except (msgspec.MsgspecError, InvalidRequest, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}:{number}: not a token's line: {error}") from error
    return entry
