"""Take a unix socket path for this daemon alone, whatever a dead one left there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.model.errors import ConfigError
from kvstore.transport.unix_sockets import arena_socket_path, call_socket_path

PROBE_TIMEOUT_S = 1.0


@contextlib.contextmanager
def owned_socket_path(path: Path, key: str = "server.socket") -> Iterator[None]:
    """Own `path` for the time of the context: a lock beside it, no socket at it.

    The lock decides between two daemons that start at once; the probe finds servers that do not
    know the lock. Raises ConfigError, which names `key`, if somebody else is there, or the
    directory is not usable.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path.parent, key)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{key}={path}: its directory is not usable: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{key}={path} is used by another kvstore daemon") from error
        ours = (path, arena_socket_path(path), call_socket_path(path))
        for each in ours:
            _remove_dead(each)
        yield
        for each in ours:
            each.unlink(missing_ok=True)
    finally:
        os.close(lock)


def guard_of(path: Path) -> dict[str, Any]:
    """Return what decides who may use a socket: its owner and mode, and its directory's mode.

    Without owner and modes where it has been removed.
    """
    try:
        found, directory = path.stat(), path.parent.stat()
    except OSError:
        return {"path": str(path)}
    return {
        "path": str(path),
        "uid": found.st_uid,
        "mode": f"{stat.S_IMODE(found.st_mode):04o}",
        "directory_mode": f"{stat.S_IMODE(directory.st_mode):04o}",
    }


def listen_unix(path: Path, kind: socket.SocketKind) -> socket.socket:
    """Return a listening socket at `path`, mode 0600."""
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        with private_umask():
            listener.bind(str(path))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
    return listener


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Create what is created inside with mode 0600, so that it is never open to others."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _check_private(directory: Path, key: str) -> None:
    """Raise ConfigError for a directory in which others could put their own socket for ours.

    gRPC shows no peer credentials, so who may enter here is what guards its socket, beside the
    socket's own mode.
    """
    status = directory.stat()
    open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if open_to_others and not status.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{key}: others may write to {directory}: chmod 700 it, or name another one"
        )
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"{key}: {directory} belongs to user {status.st_uid}: name one of your own"
        )


def _remove_dead(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket: remove it or choose another path")
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            with contextlib.suppress(ConnectionRefusedError, OSError):
                probe.connect(str(path))
                raise ConfigError(f"{path} is used by another process: choose another path")
    path.unlink()
