"""What both ends of the unix sockets share: their paths, and who the kernel says is there."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_CREDENTIALS = struct.Struct("iII")
_SO_PEERGROUPS = 59  # Linux 4.13; not in the socket module
_GROUPS_MAX = 1024
UNIX = "unix"


class Peer(NamedTuple):
    """The process at the other end of a unix socket. pid: 0 if it has no number here."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Ask the kernel. Of a listening end it is who made it listen. Raises OSError."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(found))


def peer_name(connection: socket.socket) -> str:
    """Return who is at the other end, in words; "unix" where the kernel does not tell."""
    try:
        peer = peer_of(connection)
    except OSError:
        return UNIX
    return f"{UNIX} uid={peer.uid} pid={peer.pid}"


def groups_of(connection: socket.socket) -> tuple[int, ...]:
    """Return the supplementary groups of the process at the other end; none where the kernel does
    not tell them, or they are very many."""
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_MAX)
    except OSError:
        return ()
    return struct.unpack(f"{len(found) // 4}I", found)


def arena_socket_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.arena")


def call_socket_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.calls")


def target_of(text: str) -> str:
    """Return a daemon's address in full: a path, or a relative one, is its unix socket's."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        return f"unix:{os.path.abspath('/' + path.lstrip('/') if path.startswith('/') else path)}"
    if text.startswith(("/", ".", "~")) or ("/" in text and ":" not in text):
        return f"unix:{os.path.abspath(os.path.expanduser(text))}"
    return text


def socket_path(target: str) -> Path | None:
    """Return the path of a unix address, None for another one."""
    return Path(target.removeprefix("unix:")) if target.startswith("unix:") else None
