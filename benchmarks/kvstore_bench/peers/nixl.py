"""NIXL's POSIX plug-in: transfers between registered memory and files, one file a block.

A transfer library, no store: which file holds which block, and what is safe, is the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from nixl_cu12._api import nixl_agent, nixl_agent_config

from kvstore_bench.peers.system import Place, System

AGENT = "bench"


def open_system(place: Place) -> System:
    return Nixl(place)


class Nixl:
    def __init__(self, place: Place) -> None:
        self._directory = place.directory
        self._blocks = place.blocks
        self._agent = nixl_agent(AGENT, nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {"use_uring": "true"})
        everything = (place.blocks.address, 2 * place.round_nbytes, 0, "")
        self._memory = self._agent.register_memory([everything], "DRAM")
        self._put: list[str] = []

    def put(self, keys: Sequence[bytes]) -> None:
        self._put = [self._path(key) for key in keys]
        files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600) for path in self._put]
        self._transfer("WRITE", list(range(len(keys))), files)

    def flush(self) -> None:
        for path in (*self._put, str(self._directory)):
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.close(descriptor)

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        paths = [self._path(key) for key in keys]
        found = [os.path.exists(path) for path in paths]
        rows = [self._blocks.count + index for index, there in enumerate(found) if there]
        files = [
            os.open(path, os.O_RDONLY | os.O_DIRECT)
            for path, there in zip(paths, found, strict=True)
            if there
        ]
        if files:
            self._transfer("READ", rows, files)
        return found

    def chill(self) -> bool:
        return True

    def close(self) -> None:
        self._agent.deregister_memory(self._memory)

    def _transfer(self, kind: str, rows: Sequence[int], files: Sequence[int]) -> None:
        """Move whole blocks between rows of our memory and files, which are closed."""
        agent, nbytes = self._agent, self._blocks.nbytes
        places = [(self._blocks.address + row * nbytes, nbytes, 0) for row in rows]
        registered = agent.register_memory([(0, nbytes, file, "") for file in files], "FILE")
        memory = agent.get_xfer_descs(places, "DRAM")
        handle = agent.initialize_xfer(kind, memory, registered.trim(), AGENT)
        try:
            state = agent.transfer(handle)
            while state == "PROC":  # the plug-in works while it is asked
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(f"the transfer ended as {state}")
        finally:
            agent.release_xfer_handle(handle)
            agent.deregister_memory(registered)
            for file in files:
                os.close(file)

    def _path(self, key: bytes) -> str:
        return str(self._directory / key.hex())
