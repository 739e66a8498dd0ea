"""NIXL's UCX backend over TCP: one transfer reads all blocks from the lender's registered memory.

A transfer library, no store: where the blocks are, the borrower is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nixl_cu12._api import nixl_agent, nixl_agent_config

from kvstore_bench.peers.remote.ends import Borrower, Lender
from kvstore_bench.peers.system import Place


def open_lender(place: Place) -> Lender:
    return NixlLender(place)


def open_borrower(place: Place, where: dict[str, Any]) -> Borrower:
    return NixlBorrower(place, where)


class _Agent:
    def __init__(self, name: str, place: Place) -> None:
        self._blocks = place.blocks
        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        everything = (place.blocks.address, 2 * place.round_nbytes, 0, "")
        self._memory = self._agent.register_memory([everything], "DRAM")

    def rows(self, address: int, count: int) -> Any:
        """Return so many blocks from an address on, as NIXL describes them."""
        nbytes = self._blocks.nbytes
        places = [(address + index * nbytes, nbytes, 0) for index in range(count)]
        return self._agent.get_xfer_descs(places, "DRAM")


class NixlLender(_Agent):
    """The sources, where they are: nothing is copied."""

    def __init__(self, place: Place) -> None:
        super().__init__("lender", place)

    def put(self, keys: Sequence[bytes]) -> dict[str, Any]:
        offer = bytes(self._agent.get_agent_metadata())
        return {"offer": offer.hex(), "address": self._blocks.address}

    def close(self) -> None:
        self._agent.deregister_memory(self._memory)


class NixlBorrower(_Agent):
    def __init__(self, place: Place, where: dict[str, Any]) -> None:
        super().__init__("borrower", place)
        self._peer = self._agent.add_remote_agent(bytes.fromhex(where["offer"]))
        if isinstance(self._peer, bytes):
            self._peer = self._peer.decode()
        self._there = where["address"]

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        agent, blocks = self._agent, self._blocks
        here = self.rows(blocks.address + blocks.count * blocks.nbytes, len(keys))
        there = self.rows(self._there, len(keys))
        handle = agent.initialize_xfer("READ", here, there, self._peer)
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        return [state == "DONE"] * len(keys)

    def land(self) -> None:
        """They came into the targets."""

    def forget(self) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._memory)
