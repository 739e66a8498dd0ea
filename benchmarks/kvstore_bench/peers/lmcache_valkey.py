"""LMCache over Valkey, by its native RESP client, on a port of loopback."""

from __future__ import annotations

from kvstore_bench.peers.lmcache import Manager
from kvstore_bench.peers.system import Place, System
from kvstore_bench.peers.valkey import Server


def open_system(place: Place) -> System:
    return OverValkey(place)


class OverValkey(Manager):
    """Valkey as where it is measured by itself: an append-only file, synced every second."""

    def __init__(self, place: Place) -> None:
        self._server = Server(place, port=True)
        super().__init__(
            place,
            {
                "type": "resp",
                "host": "127.0.0.1",
                "port": self._server.port,
                "num_workers": place.threads,
            },
        )

    def close(self) -> None:
        super().close()
        self._server.close()
