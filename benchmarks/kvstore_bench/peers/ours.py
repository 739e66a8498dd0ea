"""This store: a daemon of our own over an arena and a file tier, and its blocking client."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore import Client, Group, Namespace, Prefix
from kvstore.model.block import BlockKey
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.peers.system import Place, System

WAIT_S = 30.0


def open_system(place: Place) -> System:
    return Ours(place, from_files=True)


class Ours:
    """The arena holds two rounds. Every get verifies the checksum of each record, as it is in the
    caller's memory.

    from_files: what is not in the arena is read straight into that memory, and is not promoted.
    """

    def __init__(self, place: Place, *, from_files: bool) -> None:
        self._from_files = from_files
        self._blocks = place.blocks
        self._daemon = start_daemon(place)
        self._client = Client(self._daemon.target, name="kvstore bench peers")
        group = Group("all", place.blocks.nbytes)
        self._namespace_id = self._client.register(
            Namespace(block_tokens=16, groups=(group,), identity=(("bench", "peers"),))
        )
        await_arena(self._client, 2 * place.round_nbytes)
        self._keys: list[BlockKey] = []

    def put(self, keys: Sequence[bytes]) -> None:
        self._keys = [BlockKey(key) for key in keys]
        done = self._client.put(self._namespace_id, self._keys, self._blocks.sources, wait_s=WAIT_S)
        if done.refused:
            raise Unavailable(f"the daemon refused {done.refused} of {len(keys)} blocks")

    def flush(self) -> None:
        if not self._client.admin.flush(WAIT_S):
            raise Unavailable("the daemon did not get everything written")

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        named = [BlockKey(key) for key in keys]
        return self._client.get_into(
            self._namespace_id,
            named,
            self._blocks.targets,
            wait_s=WAIT_S,
            from_files=self._from_files,
        )

    def chill(self) -> bool:
        """Have the daemon drop the copies in its arena, as peers clear theirs."""
        prefix = Prefix(self._namespace_id, self._keys)
        if self._client.hints.demote(prefix).done_blocks < len(self._keys):
            raise Unavailable("what was to be read cold is still in the arena")
        return True

    def close(self) -> None:
        self._client.close()
        self._daemon.stop()


def start_daemon(place: Place, arena_rounds: int = 2) -> Daemon:
    """Start a daemon whose arena holds two rounds, or `arena_rounds`, and its files four."""
    return Daemon(
        f"dram.capacity={arena_rounds * place.round_nbytes}",
        f"dram.extent={place.round_nbytes // 2}",
        f"file.path={place.directory / 'tier'}",
        f"file.capacity={4 * place.round_nbytes + (64 << 20)}",
        f"file.threads={place.threads}",
        f"limits.write_behind_max={2 * place.round_nbytes}",
    ).start()


def await_arena(client: Client, nbytes: int) -> None:
    """Wait until the daemon has touched all of its arena once."""
    client.connect()
    deadline = time.monotonic() + WAIT_S
    while sum(map(len, client.extents().values())) < nbytes:
        if time.monotonic() > deadline:
            raise Unavailable(f"the arena stays under {nbytes:,} bytes")
        time.sleep(0.005)
