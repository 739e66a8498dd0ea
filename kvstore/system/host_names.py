"""The names by which browsers may ask this host for what only its own users may see.

A site can point a name of its own at 127.0.0.1, and then read the answers as its own. The browser
sends that name in the header Host, which tells such a request apart.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final

LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")
PORT_MAX: Final = 65535
PORT_DIGITS_MAX: Final = 5
SAY: Final = "this is no name of the daemon: use localhost, or set server.page_hosts"


class HostNames:
    """Those of loopback, this host's own, and those of the settings."""

    def __init__(self, names: Iterable[str]) -> None:
        own = (*LOOPBACK, socket.gethostname(), *names)
        self._names = frozenset(name.lower() for name in own if name)

    def include(self, hosts: list[str]) -> bool:
        """Tell whether a request's headers Host are one, which names this host."""
        return len(hosts) == 1 and _name_of(hosts[0].lower()) in self._names


def _name_of(host: str) -> str:
    """Return the name in a header Host, without the port; "" if the port is none."""
    name, colon, port = host.rpartition(":")
    if not (colon and port.isdecimal()):
        return host
    return name if len(port) <= PORT_DIGITS_MAX and int(port) <= PORT_MAX else ""
