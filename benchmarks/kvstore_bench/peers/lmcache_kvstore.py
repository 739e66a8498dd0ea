"""LMCache over a daemon of ours, instead of over a folder of files.

Its lookups may wait for seconds: what a lookup that is given up costs is no speed.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string

from kvstore import Client, Prefix
from kvstore.client.pages import Place as Stored
from kvstore.model.errors import Unavailable
from kvstore_bench.peers.lmcache import WAIT_S, Manager, object_keys
from kvstore_bench.peers.ours import await_arena, start_daemon
from kvstore_bench.peers.system import Place, System
from kvstore_lmcache.compat import TESTED
from kvstore_lmcache.names import Names
from kvstore_lmcache.settings import parse_settings

WEIGHTS = "by-name"
ARENA_ROUNDS = 4  # a client moves a quarter of an arena at once: a round in one go


def open_system(place: Place) -> System:
    return OverKVStore(place)


class OverKVStore(Manager):
    """The daemon has room for more than is asked of it, as the page cache above files has."""

    def __init__(self, place: Place) -> None:
        self._daemon = start_daemon(place, ARENA_ROUNDS)
        self._admin = Client(self._daemon.target, name="kvstore bench peers")
        await_arena(self._admin, ARENA_ROUNDS * place.round_nbytes)
        params = {
            "target": self._daemon.target,
            "page_mib_max": max(1, place.blocks.nbytes >> 20),
            "weights_id": WEIGHTS,
            "lookup_deadline_s": WAIT_S,
            "load_deadline_s": WAIT_S,
            "save_deadline_s": WAIT_S,
        }
        self._names = Names(parse_settings(params, "params"), TESTED[-1])
        self._stored: list[Stored] = []
        super().__init__(
            place,
            {
                "type": "native_plugin",
                "module_path": "kvstore_lmcache",
                "class_name": "Client",
                "adapter_params": params,
            },
        )

    def put(self, keys: Sequence[bytes]) -> None:
        super().put(keys)
        names = map(_object_key_to_string, object_keys(keys))
        self._stored = [self._names.object_place(name, WEIGHTS) for name in names]

    def settle(self) -> None:
        if not self._admin.admin.flush(WAIT_S):
            raise Unavailable("the daemon did not get everything written")

    def chill(self) -> bool:
        """Have the daemon drop its copies: what it reads next is on disk."""
        namespace = self._stored[0].namespace
        self._admin.register(namespace)
        prefix = Prefix(namespace.id, [place.key for place in self._stored])
        if self._admin.hints.demote(prefix).done_blocks < len(self._stored):
            raise Unavailable("what was to be read cold is still in the arena")
        return super().chill()

    def close(self) -> None:
        super().close()
        self._admin.close()
        self._daemon.stop()
