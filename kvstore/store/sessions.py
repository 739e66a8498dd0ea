"""Who uses the store: sessions with their processes, and the namespaces of models."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

from kvstore.decide.namespaces import UNKNOWN_MODEL, NamespaceUse
from kvstore.decide.planner import ProcessId, SessionId
from kvstore.model.block import Namespace, NamespaceId, padded
from kvstore.model.errors import InvalidRequest, KVStoreError
from kvstore.store.node import Node
from kvstore.tier.dram import ExtentHandle

logger = logging.getLogger(__name__)


class Process(NamedTuple):
    """One process of a session, alive while its arena socket is open."""

    session: SessionId
    id: ProcessId


class Namespaces:
    """The namespaces that this node knows. require_salt: it takes those alone whose keys are salted
    by user."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._planner = node.planner
        self._write_behind = node.write_behind
        self._leases = node.leases
        self.require_salt = False

    def register(self, namespace: Namespace) -> NamespaceId:
        """Learn a namespace; of too many, one is forgotten: see `Namespaces`.

        Raises InvalidRequest if its records cannot fit into the arena, or its keys lack salt.
        """
        if self.require_salt and not namespace.salted:
            raise InvalidRequest(
                "this tenant takes salted keys alone: set require_salt in the settings of the "
                "connector, and let the middleware TenantSalt set the salt"
            )
        largest = max(group.record_nbytes for group in namespace.groups)
        if largest > self._node.arena.record_nbytes_max:
            raise InvalidRequest(
                f"records of {largest} bytes do not fit: the daemon's dram.extent is "
                f"{self._node.arena.record_nbytes_max} bytes"
            )
        writable = self._write_behind.caps.record_nbytes_max
        if writable is not None and padded(largest) > writable:
            raise InvalidRequest(
                f"records of {largest} bytes do not fit into a frame of at most {writable} bytes: "
                "raise the daemon's file.segment"
            )
        known = self._planner.index.namespaces
        if known.spec(namespace.id) is None:
            known.make_room(namespace, lambda each: any(self._leases.reservations(each)))
        return self._planner.index.register(namespace)

    @property
    def record_nbytes_max(self) -> int:
        """The largest record of all namespaces, in whole pages; 0: there are none."""
        specs = [each.spec for each in self._planner.index.namespaces if each.spec is not None]
        sizes = [group.record_nbytes for spec in specs for group in spec.groups]
        return padded(max(sizes, default=0))

    def learn(self, namespace: Namespace) -> None:
        """Take what an earlier life knew; one that does not fit any more is nobody's."""
        with contextlib.suppress(KVStoreError):
            self.register(namespace)

    def get(self, namespace_id: NamespaceId) -> Namespace:
        """Return a registered namespace. Raises UnknownNamespace."""
        return self._planner.namespace(namespace_id)

    def all(self) -> list[NamespaceUse]:
        """Return what there is of each namespace, by id. Of what was found on disk and is not
        indexed yet, nothing is counted."""
        found = (
            self._write_behind.recall.found_namespaces
            if self._write_behind.recall.unrecalled_runs
            else ()
        )
        uses = {each: NamespaceUse(each, None, 0, UNKNOWN_MODEL) for each in found}
        uses |= {each.id: each.use for each in self._planner.index.namespaces}
        return sorted(uses.values())


class Sessions:
    """Clients: each is a session of one or several processes."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._leases = node.leases
        self.on_engines: list[Callable[[], None]] = []  # told when `engines` has changed
        self.on_left: list[Callable[[SessionId], None]] = []  # told of each session that has ended

    def open(self, token: str, client: str, engines: tuple[str, ...] = ()) -> SessionId:
        """Return the session of `token`, a new one if none is alive. engines: where it answers."""
        session = self._leases.open(token, client)
        known = self._leases.find(session)
        if engines and known is not None and known.engines != engines:
            known.engines = engines
            for tell in self.on_engines:
                tell()
        return session

    @property
    def engines(self) -> tuple[str, ...]:
        """Where the engines of all live sessions answer."""
        found = (e for s in self._leases.sessions() if not s.ended for e in s.engines)
        return tuple(sorted(set(found)))

    def serves(self, engine: str, *, besides: SessionId) -> bool:
        """Say whether an engine at that address has a live session beside this one."""
        sessions = self._leases.sessions()
        return any(engine in s.engines for s in sessions if not s.ended and s.id != besides)

    def engines_of(self, session: SessionId) -> tuple[str, ...] | None:
        """Return where the engine of a session answers; None: it has ended."""
        found = self._leases.find(session)
        return found.engines if found is not None and not found.ended else None

    def join(self, session: SessionId, token: str, pid: int = 0) -> Process:
        """Add a process to a session; `leave` when its socket closes. Raises SessionEnded.

        pid: its process id, 0 if this host cannot see it.
        """
        return Process(session, self._leases.join(session, token, pid))

    def memory(self, session: SessionId) -> list[ExtentHandle]:
        """Return the memory that a session maps beside the arena's, to write into. Raises
        Unavailable."""
        return self._node.staging.handles(session) if self._node.staging is not None else []

    def processes(self, session: SessionId) -> Collection[int]:
        """Return the ids of a session's processes, none if there is no such session."""
        return self._leases.processes(session)

    def number(self, session: SessionId) -> int:
        """Return what others may know a session by: it entitles to nothing. 0: there is none."""
        found = self._leases.find(session)
        return found.number if found is not None else 0

    def leased_bytes(self, session: SessionId) -> int:
        """Return what the leases of a session hold of the arena, those in limbo included."""
        found = self._leases.find(session)
        return sum(each.nbytes for each in found.leases.values()) if found is not None else 0

    def leave(self, process: Process) -> None:
        """Note that a process is gone: its session ends."""
        session = self._leases.find(process.session)
        self._leases.leave(process.session, process.id)
        if self._node.staging is not None and not self._leases.processes(process.session):
            self._node.staging.end(process.session)
        for tell in self.on_left:
            tell(process.session)
        if session is not None and session.engines:
            for tell_engines in self.on_engines:
                tell_engines()
        self._node.room.set()
        logger.info("session=%r state=ended", session.name if session is not None else "")
