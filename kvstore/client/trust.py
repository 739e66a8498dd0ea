"""Which unix sockets a client believes: those of its own user, of root, or of a user it was told.

Whoever answers feeds the engine, so another user's daemon must never be taken for one's own. gRPC
does not tell who is at the other end: there the owner of the socket counts, and that nobody else
could have put another one in its place. On the other sockets the kernel says who it is.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
from pathlib import Path

from kvstore.model.errors import Unauthorized, Unavailable
from kvstore.transport.unix_sockets import peer_of


def check_socket(path: Path, daemon_uid: int | None) -> None:
    """Look at a daemon's socket before it is used.

    Raises Unavailable if there is none, Unauthorized if this user may not use it, or should not.
    """
    try:
        found, directory = path.stat(), path.resolve().parent.stat()
    except PermissionError:
        raise Unauthorized(_denied(path)) from None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        why = error.strerror if isinstance(error, OSError) else error
        raise Unavailable(f"no kvstore daemon answers at unix:{path}: {why}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise Unavailable(f"no kvstore daemon answers at unix:{path}: it is not a socket")
    for place, owner in ((path, found.st_uid), (path.parent, directory.st_uid)):
        _check_owner(place, owner, daemon_uid)
    if directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not directory.st_mode & stat.S_ISVTX:
        raise Unauthorized(
            f"others may write to {path.parent} and put a socket of theirs there: chmod 700 it"
        )
    if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise Unauthorized(_denied(path))


def check_daemon(connection: socket.socket, path: str, daemon_uid: int | None) -> None:
    """Ask the kernel who listens at the other end. Raises Unauthorized, and OSError."""
    _check_owner(Path(path), peer_of(connection).uid, daemon_uid)


def _check_owner(path: Path, uid: int, daemon_uid: int | None) -> None:
    if uid not in (os.geteuid(), 0, daemon_uid):
        raise Unauthorized(
            f"{path} belongs to {user_name(uid)}, neither to you nor to root: its answers could be "
            f"anybody's. If that user runs your daemon, say so: --daemon-uid {uid}, or "
            f"daemon_uid={uid} in Python and in a connector's settings"
        )


def user_name(uid: int) -> str:
    """Return a user's name and number, for people."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def _denied(path: Path) -> str:
    """Say whose the first thing is on the way to `path` that this user may not pass."""
    place = path
    for place in (*reversed(path.parents), path):
        needed = os.W_OK if place == path else os.X_OK
        if not os.access(place, needed, effective_ids=os.access in os.supports_effective_ids):
            break
    try:
        owner = user_name(place.stat().st_uid)
    except OSError:
        owner = "another user"
    return (
        f"permission denied: {place} belongs to {owner}. Ask as that user, or run a daemon of "
        "your own: kvstore serve --set server.socket=PATH"
    )
