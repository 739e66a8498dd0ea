"""EndpointSlices of one Service -> the addresses of its daemons. Pure; nothing of them is trusted.

Several slices make one list, and an address may be in two of them while it moves.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import msgspec

from kvstore.membership.base import MEMBERS_MAX

PORT_NAME = "peer"
SLICES_MAX = 4096
ADDRESSES_MAX = MEMBERS_MAX + 1  # this daemon is one of them


class Meta(msgspec.Struct, frozen=True):
    name: str


class Conditions(msgspec.Struct, frozen=True):
    """ready: None is unknown, which counts as yes. A pod that ends is not ready, but serves on."""

    ready: bool | None = None
    serving: bool | None = None

    @property
    def there(self) -> bool:
        return self.ready is not False or self.serving is True


class Endpoint(msgspec.Struct, frozen=True):
    addresses: list[str] = []
    conditions: Conditions = Conditions()


class Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct, frozen=True):
    """The fields of discovery.k8s.io/v1 that count here."""

    metadata: Meta
    endpoints: list[Endpoint] | None = None  # Go writes null for none
    ports: list[Port] | None = None


class Slices:
    """The slices that there are. bad: what had no usable address; left_out: addresses too many."""

    def __init__(self) -> None:
        self.bad = 0
        self.left_out = 0
        self._slices: dict[str, Slice] = {}

    def __len__(self) -> int:
        return len(self._slices)

    def replace(self, slices: Iterable[Slice]) -> None:
        """Take these for all that there are."""
        self._slices = {each.metadata.name: each for each in slices}

    def put(self, one: Slice) -> None:
        if one.metadata.name in self._slices or len(self._slices) < SLICES_MAX:
            self._slices[one.metadata.name] = one

    def drop(self, one: Slice) -> None:
        self._slices.pop(one.metadata.name, None)

    def addresses(self) -> list[str]:
        """Return HOST:PORT of each ready endpoint, once."""
        self.bad = 0
        found: dict[str, None] = {}
        for each in self._slices.values():
            port = _peer_port(each)
            for endpoint in each.endpoints or ():
                if not endpoint.conditions.there:
                    continue
                address = _address(endpoint, port)
                if address:
                    found[address] = None
                else:
                    self.bad += 1
        self.left_out = max(0, len(found) - ADDRESSES_MAX)
        return list(found)[:ADDRESSES_MAX]


def _peer_port(one: Slice) -> int:
    """Return the number of the port `peer`, 0 if there is none."""
    for port in one.ports or ():
        if port.name == PORT_NAME and port.port is not None and 0 < port.port <= 65535:
            return port.port
    return 0


def _address(endpoint: Endpoint, port: int) -> str:
    """Return HOST:PORT, "" without one. Of several addresses, all mean the same pod."""
    if not port or not endpoint.addresses:
        return ""
    try:
        ip = ipaddress.ip_address(endpoint.addresses[0])
    except ValueError:  # a slice of the type FQDN
        return ""
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
