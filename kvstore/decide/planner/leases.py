"""Sessions, leases and limbo: who may touch which slot, until when, and what happens if they die.

A lease is a pin with a deadline. A client that was stopped past its deadline may still have a copy
under way, so the slots of an expired lease are not reused: they are in *limbo* until the holder
releases the lease (and is told it was no longer held) or all processes of its session are gone.
Limbo is bounded: a session with too much of it gets no new leases. What the daemon leases for other
hosts is bounded for each of them: a slow one keeps nobody else waiting.

A lease may hold frames as well, for a client that reads them in their files. These need no limbo:
nothing is ever written where a frame was, so who is late reads a hole, or finds no file, and
touches only memory of its own. Past the deadline they are released at once.

An id is what entitles to a session or a lease, so nobody may guess one: see `Leases.new_id`. Others
are shown a session's `name` or `number`, which no call takes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType

from kvstore.decide.index import HeldSlot, StoredFrame
from kvstore.model.block import BlockKey, NamespaceId, Span, padded
from kvstore.model.errors import SessionEnded, Unavailable

SessionId = NewType("SessionId", int)
ProcessId = NewType("ProcessId", int)

DAEMON_SESSION = SessionId(-1)  # no message can name it: theirs are not negative


@dataclass(slots=True)
class Lease:
    """Slots pinned for a session. `write` is set for a reservation and says where it will go.

    frames: pinned too, each once; framed_nbytes of the file tier. borrower: the other host that the
    daemon holds it for, "" for none.
    """

    id: int
    session: SessionId
    deadline: float
    held: Sequence[HeldSlot | None]
    nbytes: int
    readers: int = 1
    expired: bool = False
    write: Reservation | None = None
    frames: Sequence[StoredFrame] = ()
    framed_nbytes: int = 0
    borrower: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a commit needs to know of its reserve.

    conversation: whose blocks they are; "": nobody has told. refined: what is stored without its
    fine part is to be replaced. bases: over the spans, the checksums of bases: the fine parts of
    those that are stored already are added to them.
    """

    namespace_id: NamespaceId
    keys: Sequence[BlockKey]
    first_block: int
    parent: BlockKey | None
    spans: tuple[Span, ...]
    refused: int
    conversation: str = ""
    refined: bool = False
    copy: bool = False  # of what another host has
    bases: Sequence[int] = ()


@dataclass(slots=True)
class Session:
    """One engine instance: its processes, alive while their arena socket is open.

    processes: the process id of each, 0 if this host cannot see it. engines: where it answers.
    """

    id: SessionId
    token: str
    client: str
    number: int
    processes: dict[ProcessId, int] = field(default_factory=dict)
    ended: bool = False
    leases: dict[int, Lease] = field(default_factory=dict)
    limbo_bytes: int = 0
    engines: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What others may see: it entitles to nothing."""
        return f"{self.client or 'unnamed'} #{self.number}"


class Leases:
    """Every session and lease. `unpin` is called for each slot that a lease held, `unpin_frame`
    undoes the pin of a frame.

    new_id: draws the ids: positive, below 2**63, and such that nobody guesses one, or has one left
    of another daemon.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        limbo_bytes_max: int,
        sessions_max: int,
        now: Callable[[], float],
        new_id: Callable[[], int],
        unpin: Callable[[HeldSlot], None],
        unpin_frame: Callable[[StoredFrame], None],
    ) -> None:
        self.lease_s = lease_s
        self.limbo_bytes_max = limbo_bytes_max
        self.sessions_max = sessions_max
        self.on_over: list[Callable[[int], object]] = []  # told the id of each that has ended
        self._now = now
        self._unpin = unpin
        self._unpin_frame = unpin_frame
        self._sessions: dict[SessionId, Session] = {
            DAEMON_SESSION: Session(DAEMON_SESSION, "", "daemon", 0)
        }
        self._by_token: dict[str, SessionId] = {}
        self._new_id = new_id
        self._numbers = itertools.count(1)
        self._limbo_of: Counter[str] = Counter()  # bytes, by borrower
        self.leased_bytes = 0
        self.framed_bytes = 0  # of the file tier, in frames that leases hold
        self.engines_at = -math.inf  # when an engine was last given a lease, or gave one back

    @property
    def limbo_bytes(self) -> int:
        sessions = sum(session.limbo_bytes for session in self._sessions.values())
        return sessions + self._limbo_of.total()

    @property
    def count(self) -> int:
        return sum(len(session.leases) for session in self._sessions.values())

    def sessions(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.id != DAEMON_SESSION]

    def find(self, session_id: SessionId) -> Session | None:
        """Return a session that has not been forgotten; it may have ended."""
        return self._sessions.get(session_id)

    def processes(self, session_id: SessionId) -> Collection[int]:
        """Return the ids of a session's processes, none if it is forgotten."""
        session = self._sessions.get(session_id)
        return session.processes.values() if session is not None else ()

    def open(self, token: str, client: str) -> SessionId:
        """Return the live session of `token`, a new one if there is none."""
        known = self._by_token.get(token)
        if known is not None:
            return known
        if len(self._sessions) > self.sessions_max:
            self._drop_idle_session()
        session = SessionId(self._new_id())
        self._sessions[session] = Session(session, token, client, next(self._numbers))
        self._by_token[token] = session
        return session

    def join(self, session_id: SessionId, token: str, pid: int = 0) -> ProcessId:
        """Add a process to a session. Raises SessionEnded if this token has no such session."""
        session = self._live(session_id)
        if session_id == DAEMON_SESSION or session.token != token:
            raise SessionEnded("the session is not this token's")
        process = ProcessId(self._new_id())
        session.processes[process] = pid
        return process

    def leave(self, session_id: SessionId, process: ProcessId) -> None:
        """Note that a process is gone. It ends its session; the last one to go empties limbo."""
        session = self._sessions.get(session_id)
        if session is None or process not in session.processes:
            return
        del session.processes[process]
        self._end(session)
        if not session.processes:
            for lease in list(session.leases.values()):
                self._drop(session, lease)
            del self._sessions[session_id]

    def grant(
        self,
        session_id: SessionId,
        held: Sequence[HeldSlot | None],
        *,
        readers: int = 1,
        write: Reservation | None = None,
        frames: Sequence[StoredFrame] = (),
        borrower: str = "",
    ) -> Lease:
        """Pin slots, and frames, for a session. Raises SessionEnded, or Unavailable over the limbo
        bound, which a borrower has for itself."""
        if borrower:
            session = self._live(session_id)
            self._check_limbo(f"host {borrower[:8]}", self._limbo_of[borrower])
        else:
            session = self.check(session_id)
        lease = Lease(
            id=self._new_id(),
            session=session_id,
            deadline=self._now() + self.lease_s,
            held=held,
            nbytes=sum(padded(each.nbytes) for each in held if each is not None),
            readers=readers,
            write=write,
            frames=frames,
            framed_nbytes=sum(frame.extent.nbytes for frame in frames),
            borrower=borrower,
        )
        for slot in held:
            if slot is not None:
                slot.pins += 1
        for frame in frames:
            frame.pins += 1
        session.leases[lease.id] = lease
        if session_id != DAEMON_SESSION:
            self.engines_at = self._now()
        self.leased_bytes += lease.nbytes
        self.framed_bytes += lease.framed_nbytes
        return lease

    def check(self, session_id: SessionId) -> Session:
        """Return a session that may hold leases. Raises SessionEnded or Unavailable."""
        session = self._live(session_id)
        if session_id != DAEMON_SESSION and not session.processes:
            raise SessionEnded("the session has not joined the arena")
        self._check_limbo(session.name, session.limbo_bytes)
        return session

    def _check_limbo(self, name: str, nbytes: int) -> None:
        if nbytes > self.limbo_bytes_max:
            raise Unavailable(
                f"{name} has {nbytes} bytes in limbo: its leases expire before it releases them",
                reason="limbo",
            )

    def reservation(self, session_id: SessionId, lease_id: int) -> Lease | None:
        """Return a reservation that may still be committed, or None."""
        session = self._sessions.get(session_id)
        lease = session.leases.get(lease_id) if session else None
        if session is None or session.ended or lease is None or lease.write is None:
            return None
        return None if lease.expired or self._now() > lease.deadline else lease

    def reservations(self, namespace_id: NamespaceId) -> Iterator[Reservation]:
        """Yield what may still be committed into a namespace."""
        for session in self._sessions.values():
            for lease in session.leases.values():
                write = lease.write
                if write is not None and not lease.expired and write.namespace_id == namespace_id:
                    yield write

    def release(self, session_id: SessionId, lease_id: int) -> bool:
        """End one reader's hold. Returns whether the slots and frames were safe until now."""
        session = self._sessions.get(session_id)
        lease = session.leases.get(lease_id) if session else None
        if session is None or lease is None:
            return False
        now = self._now()
        if session_id != DAEMON_SESSION:
            self.engines_at = now
        held = not (lease.expired or session.ended) and now <= lease.deadline
        held = held and not any(frame.is_out for frame in lease.frames)
        lease.readers -= 1
        if lease.readers <= 0:
            self._drop(session, lease)
        return held

    def expire(self) -> int:
        """Move leases past their deadline to limbo. Returns how many."""
        now, count = self._now(), 0
        for session in self._sessions.values():
            for lease in session.leases.values():
                if not lease.expired and now > lease.deadline:
                    self._to_limbo(session, lease)
                    count += 1
        return count

    def let_go_of_frames(self) -> None:
        """End what is held in files: the file tier is about to close."""
        for session in self._sessions.values():
            for lease in session.leases.values():
                if lease.frames:
                    lease.deadline = -math.inf
                    self._let_go(lease)

    def _live(self, session_id: SessionId) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.ended:
            raise SessionEnded("the session has ended: open a new one")
        return session

    def _end(self, session: Session) -> None:
        if session.ended:
            return
        session.ended = True
        self._by_token.pop(session.token, None)
        for lease in session.leases.values():
            if not lease.expired:
                self._to_limbo(session, lease)

    def _to_limbo(self, session: Session, lease: Lease) -> None:
        lease.expired = True
        self._count_limbo(session, lease, lease.nbytes)
        self._let_go(lease)

    def _count_limbo(self, session: Session, lease: Lease, nbytes: int) -> None:
        if not lease.borrower:
            session.limbo_bytes += nbytes
            return
        self._limbo_of[lease.borrower] += nbytes
        if not self._limbo_of[lease.borrower]:
            del self._limbo_of[lease.borrower]

    def _let_go(self, lease: Lease) -> None:
        frames, lease.frames = lease.frames, ()
        self.framed_bytes -= lease.framed_nbytes
        lease.framed_nbytes = 0
        for frame in frames:
            self._unpin_frame(frame)

    def _drop(self, session: Session, lease: Lease) -> None:
        del session.leases[lease.id]
        for told in self.on_over:
            told(lease.id)
        self.leased_bytes -= lease.nbytes
        self._let_go(lease)
        if lease.expired:
            self._count_limbo(session, lease, -lease.nbytes)
        for held in lease.held:
            if held is not None:
                held.pins -= 1
                self._unpin(held)

    def _drop_idle_session(self) -> None:
        """Make room for a session: one without a process holds nothing, so nothing is lost."""
        idle: Iterable[Session] = (s for s in self.sessions() if not s.processes)
        session = next(iter(idle), None)
        if session is None:
            raise Unavailable(
                f"{self.sessions_max} sessions are open", retry_after_s=5.0, reason="sessions"
            )
        del self._sessions[session.id]
        self._by_token.pop(session.token, None)
