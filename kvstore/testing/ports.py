"""Free ports of loopback, for servers that cannot choose their own."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. Another process may take one before it is used."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
