"""One-sided reads by NIXL's UCX backend.

NIXL registers memory for remote writes as well, so only daemons that may write each other's arenas
should use it: `ucx` does not. Its own thread lets the library work, and takes a core for that.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.peer.onesided.driver import (
    OFFER_NBYTES_MAX,
    DriverError,
    DriverMissing,
    Piece,
    Regions,
    State,
    prepare_ucx,
)

INSTALL = "pip install --no-deps nixl-cu12"
LOOK_S = 50e-6  # between two looks at a read under way: NIXL tells nobody when it ends


@dataclass(slots=True)
class _Remote:
    """A peer. open: its endpoint may be used."""

    agent: str
    open: bool = True


@dataclass(slots=True)
class _Read:
    """temporary: regions registered for this read alone."""

    handle: Any
    temporary: list[int]


class NixlDriver:
    """Implements `Driver`. Offers are the metadata of NIXL's agents."""

    name = "nixl"

    def __init__(self, agent: str) -> None:
        """agent: a name no other daemon has. Raises DriverError; DriverMissing without NIXL."""
        prepare_ucx()
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it writes to stdout
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise DriverMissing(f"NIXL does not load ({error}): {INSTALL}") from error
        try:
            self._agent = nixl_agent(agent, nixl_agent_config(backends=["UCX"]))
        except Exception as error:
            raise DriverError(f"NIXL does not start: {error}") from error
        if "UCX" not in self._agent.backends:
            raise DriverError("NIXL has no UCX backend here")
        self._regions: Regions[Any] = Regions()
        self._remotes: dict[str, _Remote] = {}

    def offer(self) -> bytes:
        """See `Driver`."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, address: int, nbytes: int) -> None:
        """See `Driver`."""
        try:
            registered = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        except Exception as error:
            raise DriverError(f"registering {nbytes} bytes: {error}") from error
        self._regions.add(address, nbytes, registered)

    def withdraw(self, address: int) -> None:
        """See `Driver`."""
        registered = self._regions.pop(address)
        if registered is not None:
            self._agent.deregister_memory(registered)

    def connect(self, offer: bytes) -> _Remote:
        """See `Driver`. A new offer of the same agent takes the place of its last one."""
        if not 0 < len(offer) <= OFFER_NBYTES_MAX:
            raise DriverError("not an offer of NIXL memory")
        try:
            agent = self._agent.add_remote_agent(offer)
        except Exception as error:
            raise DriverError(f"no way to a peer by NIXL: {error}") from error
        name = agent.decode() if isinstance(agent, bytes) else str(agent)
        if name == self._agent.name:
            raise DriverError("a peer offers our own memory")
        remote = self._remotes[name] = _Remote(name)
        return remote

    def disconnect(self, remote: _Remote) -> None:
        """See `Driver`."""
        if not remote.open:
            return
        remote.open = False
        if self._remotes.get(remote.agent) is remote:
            del self._remotes[remote.agent]
            try:
                self._agent.remove_remote_agent(remote.agent)
            except Exception as error:
                raise DriverError(f"a peer could not be let go: {error}") from error

    def post(self, remote: _Remote, pieces: Sequence[Piece]) -> _Read:
        """See `Driver`."""
        if not remote.open:
            raise DriverError("the peer is disconnected")
        agent, temporary = self._agent, [p for p in pieces if not self._holds(p)]
        for piece in temporary:
            self.register(piece.target, piece.nbytes)
        read = _Read(None, [piece.target for piece in temporary])
        try:
            here = agent.get_xfer_descs([(p.target, p.nbytes, 0) for p in pieces], "DRAM")
            there = agent.get_xfer_descs([(p.source, p.nbytes, 0) for p in pieces], "DRAM")
            read.handle = agent.initialize_xfer("READ", here, there, remote.agent)
            agent.transfer(read.handle)
        except Exception as error:
            if read.handle is None:
                self._forget(read)
                raise DriverError(f"a read was not begun: {error}") from error
        return read

    def _holds(self, piece: Piece) -> bool:
        return self._regions.find(piece.target, piece.nbytes) is not None

    def _forget(self, read: _Read) -> None:
        for address in read.temporary:
            self.withdraw(address)

    def state(self, read: _Read) -> State:
        """See `Driver`."""
        try:
            word = self._agent.check_xfer_state(read.handle)
        except Exception:  # of every kind its bindings have: the transfer has failed
            word = "ERR"
        if word == "PROC":
            return State.UNDER_WAY
        try:
            read.handle.release()
        except Exception:
            return State.UNDER_WAY  # it cannot be aborted yet
        self._forget(read)
        return State.DONE if word == "DONE" else State.FAILED

    def progress(self) -> None:
        """See `Driver`. NIXL's own thread does."""

    def wait(self, wake_fd: int, timeout_s: float, *, reading: bool) -> None:
        """See `Driver`."""
        select.select([wake_fd], [], [], min(timeout_s, LOOK_S) if reading else timeout_s)

    def close(self) -> None:
        """See `Driver`."""
        for remote in list(self._remotes.values()):
            self.disconnect(remote)
        for address, _, _ in list(self._regions):
            self.withdraw(address)
        del self._agent
