"""Ports of loopback for servers that are about to be started."""

from __future__ import annotations

import random
import socket
from collections import deque

PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections: none of these takes a port that is free
here before the server binds it."""
TRIES = 100  # for each port

_given: deque[int] = deque(maxlen=256)  # their servers may not have bound them yet
_draw = random.SystemRandom()  # processes that were seeded alike do not choose alike


def free_ports(count: int) -> list[int]:
    """Return different ports of 127.0.0.1 that are free now. Another server may take one before it
    is used. Raises OSError if there are too few."""
    found: list[int] = []
    for port in _draw.sample(PORTS, min(len(PORTS), TRIES * count)):
        if len(found) == count:
            break
        if port not in _given and _is_free(port):
            found.append(port)
            _given.append(port)
    if len(found) < count:
        raise OSError(f"only {len(found)} free ports were found, of {count}")
    return found


def free_port() -> int:
    """Return one, as `free_ports` does."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
