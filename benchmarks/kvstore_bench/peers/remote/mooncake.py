"""Mooncake Store over its TCP transport: the lender gives the memory and the master, the borrower
gives none, and gets all blocks in one call into registered memory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake.store import MooncakeDistributedStore

from kvstore_bench.peers.mooncake import WAIT_S, await_port, free_port
from kvstore_bench.peers.remote.ends import Borrower, Lender
from kvstore_bench.peers.system import Place

BUFFER_NBYTES_MIN = 256 << 20
SEGMENT_NBYTES_MIN = 64 << 20  # it takes none below 16 MiB


def open_lender(place: Place) -> Lender:
    return MooncakeLender(place)


def open_borrower(place: Place, where: dict[str, Any]) -> Borrower:
    return MooncakeBorrower(place, where["master"])


class _Client:
    """A client of the store. segment_nbytes: of memory it gives."""

    def __init__(self, place: Place, master: str, segment_nbytes: int) -> None:
        self._blocks = place.blocks
        self._store = MooncakeDistributedStore()
        failed = self._store.setup(
            {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": str(segment_nbytes),
                "local_buffer_size": str(max(BUFFER_NBYTES_MIN, 2 * place.round_nbytes)),
                "protocol": "tcp",
                "master_server_addr": master,
            }
        )
        if failed:
            raise OSError(f"the client could not be set up: {failed}")
        self._store.register_buffer(place.blocks.address, 2 * place.round_nbytes)

    def batch(self, count: int, first_row: int) -> tuple[list[int], list[int]]:
        """Return addresses and sizes of so many rows."""
        nbytes = self._blocks.nbytes
        first = self._blocks.address + first_row * nbytes
        return [first + index * nbytes for index in range(count)], [nbytes] * count


class MooncakeLender(_Client):
    def __init__(self, place: Place) -> None:
        port = free_port()
        self._master = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("mooncake_master")),
                *("--rpc_address=127.0.0.1", f"--rpc_port={port}"),
                *("--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"),
                "--rpc_thread_num=2",
            ]
        )
        await_port(port)
        self._where = f"127.0.0.1:{port}"
        super().__init__(place, self._where, max(SEGMENT_NBYTES_MIN, 3 * place.round_nbytes))

    def put(self, keys: Sequence[bytes]) -> dict[str, Any]:
        names = [key.hex() for key in keys]
        refused = sum(c != 0 for c in self._store.batch_put_from(names, *self.batch(len(keys), 0)))
        if refused:
            raise OSError(f"{refused} of {len(keys)} blocks were refused")
        return {"master": self._where}

    def close(self) -> None:
        self._store.close()
        self._master.terminate()
        self._master.wait(WAIT_S)


class MooncakeBorrower(_Client):
    def __init__(self, place: Place, master: str) -> None:
        super().__init__(place, master, 0)

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        names, nbytes = [key.hex() for key in keys], self._blocks.nbytes
        got = self._store.batch_get_into(names, *self.batch(len(keys), self._blocks.count))
        return [each == nbytes for each in got]

    def land(self) -> None:
        """They came into the targets."""

    def forget(self) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        self._store.close()
