"""The root: a key file, or a command that asks a key management service.

The command is the argument vector of `security.root_command`. It is run without a shell, with two
variables in its environment, and has 10 s:

| KVSTORE_KEY_OPERATION | standard input | standard output |
| --------------------- | -------------- | --------------- |
| `wrap` | a new key: 32 bytes | the key, wrapped: 1 byte to 64 KiB |
| `unwrap` | a wrapped key | the key: 32 bytes, or as hex or base64 |
| `forget` | a wrapped key | nothing; exit code 0 says that it never opens again |

KVSTORE_KEY_TENANT is the tenant's id in hex. `wrap` is asked once for each tenant, `unwrap` at the
start, once for each tenant and place.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import stat
import subprocess
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from kvstore.model.errors import ConfigError
from kvstore.sealing.secret import KEY_NBYTES, Secret
from kvstore.system.private_files import is_open_to_others

COMMAND_S = 10.0
FILE_NBYTES_MAX = 4096
WRAPPED_NBYTES_MAX = 64 << 10


class Erasure(StrEnum):
    """How far the loss of the wrapped keys is an erasure of what they opened."""

    FORGOTTEN = "forgotten"  # the service has forgotten the tenant's key: no backup opens either
    BACKUPS = "backups"  # a backup of the wrapped keys opens with the root
    NONE = "none"  # there were no keys


class Root(Protocol):
    """Blocking; call it in a thread. Raises ConfigError that says what to do."""

    def create(self, tenant: bytes) -> tuple[Secret, bytes]:
        """Return the secret of a new tenant, and what to store of it."""

    def secret(self, tenant: bytes, stored: bytes) -> Secret:
        """Return the secret that `create` made, of what was stored."""

    def forget(self, tenant: bytes, stored: bytes) -> Erasure:
        """Let the secret of a tenant never be opened again, as far as the root can."""


class FileRoot:
    """The key of a file. Every tenant's secret is this one; its id is in what is derived of it."""

    def __init__(self, key: bytes) -> None:
        self._secret = Secret(key)

    @classmethod
    def read(cls, path: Path) -> FileRoot:
        """Raises ConfigError for a file that others may read, or that holds no key."""
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if problem := _file_problem(status):
                    raise ConfigError(f"{path} {problem}")
                data = file.read(FILE_NBYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(
                f"{path}: the root key cannot be read: {error.strerror}. Make one with: "
                f"kvstore key create {path}"
            ) from error
        key = parse_root_key(data)
        if key is None:
            raise ConfigError(
                f"{path} holds no key: 32 random bytes, or those as hex or base64. Make one with: "
                "kvstore key create FILE"
            )
        return cls(key)

    def create(self, tenant: bytes) -> tuple[Secret, bytes]:
        return self._secret, b""

    def secret(self, tenant: bytes, stored: bytes) -> Secret:
        if stored:
            raise ConfigError("a tenant's key was wrapped by a command: set security.root_command")
        return self._secret

    def forget(self, tenant: bytes, stored: bytes) -> Erasure:
        return Erasure.BACKUPS


class CommandRoot:
    """A secret for each tenant, wrapped by a command."""

    def __init__(self, argv: Sequence[str], *, timeout_s: float = COMMAND_S) -> None:
        self._argv = list(argv)
        self._timeout_s = timeout_s
        self._known: dict[tuple[bytes, bytes], Secret] = {}

    def create(self, tenant: bytes) -> tuple[Secret, bytes]:
        key = secrets.token_bytes(KEY_NBYTES)
        stored = self._run("wrap", tenant, key)
        if not 0 < len(stored) <= WRAPPED_NBYTES_MAX or key in stored:
            raise ConfigError(f"{self._argv[0]} wrap: {len(stored)} bytes that are no wrapped key")
        if self.secret(tenant, stored).reveal() != key:
            raise ConfigError(f"{self._argv[0]} unwrap: not the key that was wrapped")
        return self.secret(tenant, stored), stored

    def secret(self, tenant: bytes, stored: bytes) -> Secret:
        if not stored:
            raise ConfigError("a tenant's key was wrapped by a file: set security.root_key_file")
        known = self._known.get((tenant, stored))
        if known is None:
            key = parse_root_key(self._run("unwrap", tenant, stored))
            if key is None:
                raise ConfigError(f"{self._argv[0]} unwrap: its answer is no key of 32 bytes")
            known = self._known[tenant, stored] = Secret(key)
        return known

    def forget(self, tenant: bytes, stored: bytes) -> Erasure:
        self._known.pop((tenant, stored), None)
        try:
            self._run("forget", tenant, stored)
        except ConfigError:
            return Erasure.BACKUPS
        return Erasure.FORGOTTEN

    def _run(self, operation: str, tenant: bytes, data: bytes) -> bytes:
        said = f"security.root_command ({self._argv[0]}) {operation}"
        names = {"KVSTORE_KEY_OPERATION": operation, "KVSTORE_KEY_TENANT": tenant.hex()}
        try:
            done = subprocess.run(
                self._argv,
                input=data,
                stdout=subprocess.PIPE,
                timeout=self._timeout_s,
                env={**os.environ, **names},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{said}: no answer in {self._timeout_s:g} s") from None
        except OSError as error:
            raise ConfigError(f"{said}: {error.strerror}") from error
        if done.returncode:
            raise ConfigError(f"{said}: exit code {done.returncode}; it says why on its own")
        return done.stdout


def parse_root_key(data: bytes) -> bytes | None:
    """Return the 32 bytes that `data` holds, as they are or as hex or base64; else None."""
    if len(data) == KEY_NBYTES:
        return _unless_constant(data)
    text = data.strip()
    try:
        if len(text) == 2 * KEY_NBYTES:
            return _unless_constant(binascii.unhexlify(text))  # fromhex skips white space
        key = base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except (ValueError, binascii.Error, UnicodeDecodeError):
        return None
    return _unless_constant(key) if len(key) == KEY_NBYTES else None


def _unless_constant(key: bytes) -> bytes | None:
    return key if len(set(key)) > 1 else None


def _file_problem(status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if is_open_to_others(status):
        return f"has mode {stat.S_IMODE(status.st_mode):04o}: chmod 0400 it, for it is a root key"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}: chown it to the daemon's user"
    return ""
