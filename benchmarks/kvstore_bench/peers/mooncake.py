"""Mooncake Store: the client, with its memory, in this process; its master beside it; and offload
to the device in the background. A new client tells a new master what it finds in its folder.

Some of its ports are open on all interfaces, whatever it is told.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mooncake.store import MooncakeDistributedStore

from kvstore_bench.peers.system import Place, System

WAIT_S = 60.0
POLL_S = 0.02
BUCKET_KEYS_MAX = 8
STAGING_NBYTES_MIN = 256 << 20


def open_system(place: Place) -> System:
    return Store(place)


class Store:
    """Memory for two rounds, so that nothing is evicted: what is cold was got in a new process."""

    def __init__(self, place: Place) -> None:
        self._blocks = place.blocks
        self._directory = place.directory
        port = free_port()
        self._master = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("mooncake_master")),
                *("--rpc_address=127.0.0.1", f"--rpc_port={port}"),
                *("--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"),
                *(f"--rpc_thread_num={place.threads}", "--enable_offload=true"),
            ]
        )
        await_port(port)
        staging_nbytes = max(STAGING_NBYTES_MIN, 2 * place.round_nbytes)
        bucket_keys = math.gcd(place.blocks.count, BUCKET_KEYS_MAX)  # only full ones are written
        os.environ.update(
            MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS="1",
            MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT=str(bucket_keys),
            MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES=str(staging_nbytes),
            MOONCAKE_OFFLOAD_USE_URING="true",
        )
        self._store = MooncakeDistributedStore()
        failed = self._store.setup(
            {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": str(2 * place.round_nbytes),
                "local_buffer_size": str(staging_nbytes),
                "protocol": "tcp",
                "master_server_addr": f"127.0.0.1:{port}",
                "enable_ssd_offload": "true",
                "ssd_offload_path": str(place.directory),
            }
        )
        if failed:
            raise OSError(f"the client could not be set up: {failed}")
        self._store.register_buffer(place.blocks.address, 2 * place.round_nbytes)

    def put(self, keys: Sequence[bytes]) -> None:
        names, places, sizes = self._batch(keys, first_row=0)
        refused = sum(code != 0 for code in self._store.batch_put_from(names, places, sizes))
        if refused:
            raise OSError(f"{refused} of {len(keys)} blocks were refused")

    def flush(self) -> None:
        """Wait until all of it was offloaded. It is not synced."""
        wanted = self._blocks.count * self._blocks.nbytes
        deadline = time.monotonic() + WAIT_S
        while sum(file.stat().st_size for file in self._directory.rglob("*.bucket")) < wanted:
            if time.monotonic() > deadline:
                raise OSError("not all of it was offloaded in time")
            time.sleep(POLL_S)

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        names, places, sizes = self._batch(keys, first_row=self._blocks.count)
        got = self._store.batch_get_into(names, places, sizes)
        return [nbytes == self._blocks.nbytes for nbytes in got]

    def chill(self) -> bool:
        return False

    def close(self) -> None:
        self._store.close()
        self._master.terminate()
        self._master.wait(WAIT_S)

    def _batch(
        self, keys: Sequence[bytes], *, first_row: int
    ) -> tuple[list[str], list[int], list[int]]:
        nbytes = self._blocks.nbytes
        first = self._blocks.address + first_row * nbytes
        places = [first + index * nbytes for index in range(len(keys))]
        return [key.hex() for key in keys], places, [nbytes] * len(keys)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def await_port(port: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > deadline:
            raise OSError("mooncake_master does not listen")
        time.sleep(POLL_S)
