"""This store: a daemon at each end. A get is an acquire at the borrower's daemon of a prefix that
only the lender's has, until it is leased: found, sent, verified, committed to its arena, which the
caller maps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from kvstore import Client, Grant, Group, Namespace
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.checksum import copy_bytes
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_ports
from kvstore_bench.peers.remote.ends import Borrower, Lender
from kvstore_bench.peers.system import Place

WAIT_S = 30.0
LOOK_S = 0.02


def open_lender(place: Place) -> Lender:
    return OurLender(place)


def open_borrower(place: Place, where: dict[str, Any]) -> Borrower:
    return OurBorrower(place, where["ports"])


def _daemon(place: Place, ports: Sequence[int], port: int) -> Daemon:
    """Start a daemon with room for two rounds, and no files."""
    addresses = [f"127.0.0.1:{each}" for each in ports]
    return Daemon(
        f"dram.capacity={2 * place.round_nbytes}",
        f"dram.extent={place.round_nbytes}",
        "cluster.membership=static",
        f"cluster.static={json.dumps(addresses)}",
        f"cluster.listen=127.0.0.1:{port}",
        file=False,
    ).start()


def _connected(daemon: Daemon, place: Place) -> tuple[Client, NamespaceId]:
    """Return a client, when the arena has been touched, and the namespace of the blocks."""
    client = Client(daemon.target, name="kvstore bench peers")
    group = Group("all", place.blocks.nbytes)
    namespace_id = client.register(
        Namespace(block_tokens=16, groups=(group,), identity=(("bench", "peers-remote"),))
    )
    client.connect()
    _wait(lambda: sum(map(len, client.extents().values())) >= 2 * place.round_nbytes, "the arena")
    return client, namespace_id


def _wait(true: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > deadline:
            raise Unavailable(f"{what} is not ready after {WAIT_S:.0f} s")
        time.sleep(LOOK_S)


class OurLender:
    def __init__(self, place: Place) -> None:
        self._blocks = place.blocks
        self._ports = free_ports(2)
        self._daemon = _daemon(place, self._ports, self._ports[0])
        self._client, self._namespace_id = _connected(self._daemon, place)

    def put(self, keys: Sequence[bytes]) -> dict[str, Any]:
        named = [BlockKey(key) for key in keys]
        done = self._client.put(self._namespace_id, named, self._blocks.sources, wait_s=WAIT_S)
        if done.refused:
            raise Unavailable(f"the daemon refused {done.refused} of {len(keys)} blocks")
        return {"ports": self._ports}

    def close(self) -> None:
        self._client.close()
        self._daemon.stop()


class OurBorrower:
    def __init__(self, place: Place, ports: Sequence[int]) -> None:
        self._blocks = place.blocks
        self._daemon = _daemon(place, ports, ports[1])
        self._client, self._namespace_id = _connected(self._daemon, place)
        self._grant: Grant | None = None
        _wait(self._has_met, "the link between the daemons")

    def _has_met(self) -> bool:
        members = self._client.admin.stats()["fleet"]["members"]
        return any(each["state"] == "up" for each in members)

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        named = [BlockKey(key) for key in keys]
        self._grant = self._client.acquire(self._namespace_id, named, wait_s=WAIT_S)
        return [index < self._grant.hit_blocks for index in range(len(keys))]

    def land(self) -> None:
        assert self._grant is not None
        for slot, target in zip(self._grant.slots, self._blocks.targets, strict=False):
            if slot is not None:
                copy_bytes(self._client.view(slot), target)

    def forget(self) -> None:
        assert self._grant is not None
        self._client.release(self._grant.lease_id)
        self._client.admin.clear(self._namespace_id, this_daemon_only=True)

    def close(self) -> None:
        self._client.close()
        self._daemon.stop()
