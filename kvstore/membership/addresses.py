"""The addresses that cluster.static stands for: names are resolved, away from the event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvstore.settings import parse_address
from kvstore.settings.cluster import ADDRESSES_MAX
from kvstore.system.detached import in_detached_thread

logger = logging.getLogger(__name__)

RESOLVE_S = 5.0  # for all names; the system's resolver may take longer, then the last answer counts
DNS = "dns:"

Resolve: TypeAlias = Callable[[str, int], list[str]]
"""Return the IP addresses of a name. Blocks; raises OSError."""


def system_resolve(host: str, port: int) -> list[str]:
    """Ask the system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Addresses:
    """What is listed, names of `dns:` as what they stood for last. left_out: addresses too many.

    unresolved: names that the resolver did not know the last time it was asked.
    """

    def __init__(self, listed: Sequence[str], resolve: Resolve = system_resolve) -> None:
        self.unresolved: set[str] = set()
        self.left_out = 0
        self._fixed = [each for each in listed if not each.startswith(DNS)]
        self._names = [each.removeprefix(DNS) for each in listed if each.startswith(DNS)]
        self._resolve = resolve
        self._answers: dict[str, list[str]] = {}  # of each name
        self._asking: asyncio.Future[dict[str, list[str] | None]] | None = None

    @property
    def now(self) -> list[str]:
        """HOST:PORT of each, once."""
        named = [address for name in self._names for address in self._answers.get(name, ())]
        found = list(dict.fromkeys((*self._fixed, *named)))
        self.left_out = max(0, len(found) - ADDRESSES_MAX)
        return found[:ADDRESSES_MAX]

    async def refresh(self) -> None:
        """Resolve the names again. One that cannot be resolved stands for what it did before."""
        if not self._names:
            return
        if self._asking is None:
            self._asking = in_detached_thread(self._ask, name="kvstore-resolve")
        done, _ = await asyncio.wait([self._asking], timeout=RESOLVE_S)
        if not done:  # it goes on; nobody asks a resolver that hangs a second time
            self._note(dict.fromkeys(self._names))
            return
        asking, self._asking = self._asking, None
        self._note(asking.result())

    def _note(self, answers: dict[str, list[str] | None]) -> None:
        for name, addresses in answers.items():
            if addresses is not None:
                self._answers[name] = addresses
                self.unresolved.discard(name)
            elif name not in self.unresolved:
                logger.warning("dns=unresolved name=%s", name)
                self.unresolved.add(name)

    def _ask(self) -> dict[str, list[str] | None]:
        return {name: self._addresses_of(name) for name in self._names}

    def _addresses_of(self, name: str) -> list[str] | None:
        host, port = parse_address("cluster.static", name)
        try:
            found = self._resolve(host, port)
        except (OSError, UnicodeError):  # the latter of a label that IDNA refuses
            return None
        return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in sorted(set(found))]
