"""Engines: a few processes that share a session, over a wire that loses, delays and doubles.

A process may be stopped for longer than a lease lasts, or killed, at any step, between the two
halves of a copy too. Being stopped is not known to the daemon; being killed closes its link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

from kvstore.model.block import BlockKey, Grant, Span
from kvstore.model.errors import InvalidRequest, KVStoreError, SessionEnded, Unavailable
from kvstore.model.hint import HintKind
from kvstore.store import sessions
from tests.sim.daemon import LEASE_S, Daemon
from tests.sim.model import CHAIN_BLOCKS, Item, Space, Version, Violation

T = TypeVar("T")
Call = Callable[[Daemon], Awaitable[Any]]
THINK_S = 0.05
TRAVEL_S = 0.002
TIMEOUT_S = 3.0


class Killed(Exception):
    """The process that was to take the next step is dead."""


class Wire:
    """Carries calls to whichever daemon lives when they arrive."""

    def __init__(self, draw: Random, note: Callable[[BaseException], None]) -> None:
        self.daemon: Daemon | None = None
        self.calls = 0
        self._draw = draw
        self._note = note
        self._flying: dict[int, Call] = {}  # sent, not arrived
        self._late: list[Call] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, work: Callable[[Daemon], Awaitable[T]]) -> T:
        """Call the daemon. Raises what it raises, or Unavailable when no answer comes."""
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._draw.random() > 0.02:
            self._send(work, reply)
        if self._draw.random() < 0.03:
            self._send(work, None)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await reply
        except TimeoutError:
            raise Unavailable("no answer") from None

    def grounded(self) -> list[Call]:
        """Take away what was sent and has not arrived."""
        flying, self._flying = self._flying, {}
        return list(flying.values())

    def cut_off(self) -> None:
        """End the calls that are still being carried out, as a drain does that is over."""
        for task in sorted(self._tasks, key=lambda task: task.get_name()):
            task.cancel()

    def fly(self, calls: list[Call]) -> None:
        """Let some of what was sent to a daemon that has died arrive at the next one."""
        self._late += [work for work in calls if self._draw.random() < 0.5]

    def arrive(self, daemon: Daemon) -> None:
        """Serve from this daemon; what was late is on its way."""
        self.daemon = daemon
        late, self._late = self._late, []
        for work in late:
            self._send(work, None)

    def _send(self, work: Call, reply: asyncio.Future[Any] | None) -> None:
        self.calls += 1
        self._flying[self.calls] = work
        task = asyncio.create_task(self._deliver(self.calls, work, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, number: int, work: Call, reply: asyncio.Future[Any] | None) -> None:
        await asyncio.sleep(self._travel_s())
        self._flying.pop(number, None)
        if self.daemon is None:
            return
        try:
            answer = await work(self.daemon)
        except KVStoreError as error:
            if isinstance(error, InvalidRequest) and "no reservation" not in str(error):
                self._note(Violation("bug", repr(error)))
            await self._answer(reply, error=error)
        except Exception as error:
            self._note(error)
        else:
            await self._answer(reply, answer)

    async def _answer(
        self, reply: asyncio.Future[Any] | None, answer: Any = None, error: Exception | None = None
    ) -> None:
        if reply is None or self._draw.random() < 0.02:
            return
        await asyncio.sleep(self._travel_s())
        if not reply.done():
            reply.set_exception(error) if error else reply.set_result(answer)

    def _travel_s(self) -> float:
        late = self._draw.random() < 0.02
        return self._draw.expovariate(1 / (1.0 if late else TRAVEL_S))


class Process:
    """One process of an engine."""

    def __init__(self, draw: Random) -> None:
        self.alive = True
        self.member: sessions.Process | None = None
        self._draw = draw

    async def step(self) -> None:
        """Take some time, now and then more than a lease lasts. Raises Killed."""
        stopped = self._draw.random() < 0.02
        mean_s = 2 * LEASE_S if stopped else 0.004
        await asyncio.sleep(self._draw.expovariate(1 / mean_s))
        self.check()

    def check(self) -> None:
        """Raise Killed if it is dead: it does nothing any more."""
        if not self.alive:
            raise Killed


class Engine:
    """Opens sessions one after the other, and saves and loads in each until it ends."""

    think_s = THINK_S

    def __init__(
        self, name: str, wire: Wire, draw: Random, note: Callable[[Exception], None], space: Space
    ) -> None:
        self.loads = 0
        self.files_read = 0  # of the loads
        self._space = space
        self._name = name
        self._wire = wire
        self._draw = draw
        self._note = note
        self._session = 0
        self._processes: list[Process] = []

    async def run(self) -> None:
        """Live until cancelled."""
        number = 0
        while True:
            number += 1
            try:
                await self._live(f"{self._name} life {number}")
            except (KVStoreError, Killed):
                pass  # the daemon is away, or this engine was killed: start again
            except Exception as error:
                self._note(error)
            finally:
                self._leave()
            await asyncio.sleep(self._draw.expovariate(1 / self.think_s))

    async def _live(self, token: str) -> None:
        daemon = self._wire.daemon
        if daemon is None:
            return
        self._session = await self._wire.call(lambda daemon: _async(daemon.open(token)))
        self._processes = [Process(self._draw) for _ in range(self._draw.choice([1, 1, 2, 3]))]
        for process in self._processes:
            if self._wire.daemon is not daemon:
                return
            process.member = daemon.join(self._session, token)
        async with asyncio.TaskGroup() as group:
            ops = [group.create_task(self._work(daemon)) for _ in range(2)]
            await asyncio.sleep(self._draw.expovariate(1 / 2.0))
            victim = self._draw.choice(self._processes)  # one dies; the others find out later
            victim.alive = False
            if victim.member is not None:
                daemon.store.sessions.leave(victim.member)
                victim.member = None
            await asyncio.sleep(self._draw.expovariate(1 / 0.5))
            for op in ops:
                op.cancel()

    def _leave(self) -> None:
        """All processes are gone: none of them touches memory any more, then the links close."""
        for process in self._processes:
            process.alive = False
        daemon = self._wire.daemon
        for process in self._processes:
            if process.member is not None and daemon is not None and not daemon.disks[0].dead:
                daemon.store.sessions.leave(process.member)
            process.member = None
        self._processes = []

    def _ops(self) -> list[Callable[[Daemon], Awaitable[None]]]:
        """Return what it does, each as often as it is there."""
        often = [self._save] * 8 + [self._load] * 8 + [self._load_parts] * 2
        return often + [self._delete] * 2 + [self._flush] + [self._hint] * 2

    def _chain_to_save(self) -> list[BlockKey]:
        return self._draw.choice(self._space.chains)

    async def _work(self, daemon: Daemon) -> None:
        ops = self._ops()
        if self._draw.random() < 0.2:
            ops.append(self._clear)
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self.think_s))
            try:
                await self._draw.choice(ops)(daemon)
            except (SessionEnded, Killed):
                if not any(process.alive for process in self._processes):
                    return
            except KVStoreError:
                pass
            except Violation as error:
                self._note(error)

    # ---- what an engine does -----------------------------------------------------------------

    async def _save(self, daemon: Daemon) -> None:
        process = self._draw.choice(self._processes)
        chain = self._chain_to_save()
        begin = self._draw.randrange(CHAIN_BLOCKS)
        keys = chain[begin : begin + self._draw.randint(1, 8)]
        parent = chain[begin - 1] if begin else None
        session = self._session
        spans, made = self._records(daemon, keys, begin)
        sizes = [len(version.data) for version in made] if self._space.spec.varies else []
        refined = self._draw.random() < 0.3
        grant = await self._wire.call(
            lambda d: d.reserve(
                session, keys, begin, parent, spans=spans, sizes=sizes, refined=refined
            )
        )
        versions: list[Version | None] = []
        for slot, version in zip(grant.slots, made, strict=True):
            versions.append(version if slot else None)
            if slot is None:
                continue
            half = slot.nbytes // 2
            process.check()
            daemon.arena.view(slot)[:half] = version.data[:half]
            await process.step()
            daemon.arena.view(slot)[half:] = version.data[half:]
        if self._draw.random() < 0.05:
            await self._wire.call(lambda d: _async(d.release(session, grant.lease_id)))
            return
        durable = self._draw.random() < 0.3
        await self._wire.call(
            lambda d: d.commit(session, grant.lease_id, versions, durable=durable)
        )

    def _records(
        self, daemon: Daemon, keys: list[BlockKey], begin: int
    ) -> tuple[tuple[Span, ...], list[Version]]:
        """Make records of blocks; now and then without their fine parts."""
        space = self._space
        parts = space.parts if self._draw.random() < 0.7 else space.bases
        versions: dict[Item, Version] = {}
        for part in parts:
            for at, key in enumerate(keys):
                nbytes = space.nbytes(part, begin + at, self._draw)
                base = versions.get(Item(key, space.base_of(part))) if part in space.fine else None
                versions[Item(key, part)] = daemon.model.write(Item(key, part), nbytes, base)
        return tuple(Span(part, 0, len(keys)) for part in parts), list(versions.values())

    async def _load(self, daemon: Daemon) -> None:
        chain = self._draw.choice(self._space.chains)
        await self._read(daemon, chain[: self._draw.randint(1, CHAIN_BLOCKS)], None)

    async def _load_parts(self, daemon: Daemon) -> None:
        keys = self._draw.choice(self._space.chains)[:6]
        await self._read(
            daemon, keys, tuple(Span(part, 0, len(keys)) for part in self._space.parts)
        )

    async def _read(
        self, daemon: Daemon, keys: list[BlockKey], spans: tuple[Span, ...] | None
    ) -> None:
        session, readers = self._session, len(self._processes)
        in_files = self._draw.random() < 0.6
        refined = bool(self._space.fine) and self._draw.random() < 0.4
        grant = await self._wire.call(
            lambda d: d.acquire(session, keys, spans, readers, in_files=in_files, refined=refined)
        )
        if grant.leased and (any(grant.slots) or any(grant.places)):
            reads = (self._read_in(p, daemon, session, keys, grant) for p in self._processes)
            outcomes = await asyncio.gather(*reads, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome

    async def _read_in(
        self, process: Process, daemon: Daemon, session: int, keys: list[BlockKey], grant: Grant
    ) -> None:
        """Read as one worker; what it read counts if the release answers that it was held."""
        wrong = 0
        for slot, value in zip(grant.slots, grant.checksums, strict=True):
            if slot is None:
                continue
            half = slot.nbytes // 2
            data = bytes(daemon.arena.view(slot)[:half])
            await process.step()
            data += bytes(daemon.arena.view(slot)[half:])
            wrong += data != daemon.model.data(value)
        changed = await self._read_places(process, daemon, keys, grant)
        held = await self._wire.call(lambda d: _async(d.release(session, grant.lease_id)))
        if held and wrong:
            raise Violation("wrong", f"{wrong} records changed under a lease that was held")
        if held and changed and daemon.keeps_bytes:
            raise Violation("wrong", f"{changed} places changed under a lease that was held")
        self.loads += held
        self.files_read += held and any(grant.places)

    async def _read_places(
        self, process: Process, daemon: Daemon, keys: list[BlockKey], grant: Grant
    ) -> int:
        """Read what is lent in files, of which all that is in its frames is deleted now and then in
        the middle of it; return how many records are not what was put."""
        wrong = 0
        if any(grant.places) and self._draw.random() < 0.3:
            chain = next(chain for chain in self._space.chains if keys[0] in chain)
            await self._wire.call(lambda d: d.delete(chain))
            await process.step()
        for place, value in zip(grant.places, grant.checksums, strict=False):
            if place is None:
                continue
            half = place.nbytes // 2
            first = daemon.read_file(place.path, place.offset, half)
            await process.step()
            second = daemon.read_file(place.path, place.offset + half, place.nbytes - half)
            if first is not None and second is not None:  # else the disk did not answer
                wrong += first + second != daemon.model.data(value)
        return wrong

    async def _delete(self, daemon: Daemon) -> None:
        chain = self._draw.choice(self._space.chains)
        keys = self._draw.sample(chain, self._draw.randint(1, CHAIN_BLOCKS))
        await self._wire.call(lambda d: d.delete(keys))

    async def _clear(self, daemon: Daemon) -> None:
        if self._draw.random() < 0.1:
            await self._wire.call(lambda d: d.clear())

    async def _hint(self, daemon: Daemon) -> None:
        """Say something of the future that need not be true."""
        keys = self._draw.choice(self._space.chains)[: self._draw.randint(1, CHAIN_BLOCKS)]
        kind, seconds = self._draw.choice(list(HintKind)), self._draw.expovariate(1.0)
        await self._wire.call(lambda d: d.hint(kind, keys, seconds))

    async def _flush(self, daemon: Daemon) -> None:
        await self._wire.call(lambda d: d.flush())


async def _async(value: T) -> T:
    return value
