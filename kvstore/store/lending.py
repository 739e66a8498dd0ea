"""Room of a tier that moves between tenants: lent where it is free, given back where it is owed.

The caps of all tenants together never exceed the tier's. So caps are lowered first, the stores
evict by their own policies, and others are raised only by what has really been given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.decide.shares import Claim, caps_for, raised
from kvstore.store.store import Store

if TYPE_CHECKING:  # a daemon without a bucket starts without what it takes to use one
    from kvstore.tier.object import ObjectTier

MIB = 1 << 20
LOOK_S = 0.05
IDLE_LOOK_S = 0.25  # while nothing changes,
REST_LOOK_S = 1.0  # and has not for a while, nor has anybody asked for room
REST_AFTER_S = 5.0
HEADROOM_SHARE = 8  # of a guarantee, one part is kept free ahead of a tenant that fills up
HEADROOM_NBYTES_MAX = 256 * MIB
GROWTH_LOOKS = 4  # so many looks ahead, at the pace of the last one
ROOM_WAIT_S = 2.0
ROOM_POLL_S = 0.004
STEP_NBYTES = MIB


class Part(Protocol):
    """What one tenant has of one tier, in bytes."""

    guaranteed: int
    most: int
    weight: float

    @property
    def used(self) -> int:
        """What its blocks take."""

    @property
    def held(self) -> int:
        """What it takes from the system: not less than `used` for long."""

    @property
    def cap(self) -> int: ...

    @property
    def least(self) -> int:
        """What it needs to take a record at all."""

    def set_cap(self, nbytes: int) -> None:
        """Let it hold this much; what is over it is evicted at once, as far as nobody holds it."""


class DramPart:
    """A part of DRAM: the arena of one store. Its memory is the system's until it is reserved."""

    def __init__(
        self, store: Store, guaranteed: int, most: int, weight: float, *, fixed: bool = False
    ) -> None:
        """fixed: it has what is guaranteed, always."""
        self.guaranteed, self.most, self.weight = guaranteed, most, weight
        self._store = store
        self._fixed = fixed
        store.arena.growth.promised_bytes = guaranteed

    @property
    def used(self) -> int:
        return self._store.arena.physical_nbytes

    @property
    def held(self) -> int:
        return self._store.arena.reserved_nbytes

    @property
    def cap(self) -> int:
        return self._store.arena.capacity_bytes

    @property
    def least(self) -> int:
        return self.guaranteed if self._fixed else self._store.namespaces.record_nbytes_max

    @property
    def free(self) -> int:
        """What the next records find without evicting any."""
        arena = self._store.arena
        return min(arena.capacity_bytes, arena.extents.nbytes) - arena.physical_nbytes

    def set_cap(self, nbytes: int) -> None:
        self._store.caps.set_dram(nbytes)


class FilePart:
    """A part of the file tier: as much in each of the tenant's directories."""

    def __init__(self, store: Store, guaranteed: int, most: int, weight: float) -> None:
        self.guaranteed, self.most, self.weight = guaranteed, most, weight
        self._store = store

    @property
    def used(self) -> int:
        return self._store.caps.file_used

    held = used

    @property
    def cap(self) -> int:
        return self._store.caps.file_cap

    @property
    def least(self) -> int:
        return min(self.guaranteed, HEADROOM_NBYTES_MAX)

    def set_cap(self, nbytes: int) -> None:
        self._store.caps.set_file(nbytes)


class ObjectPart:
    """A part of the bucket: the objects of one tenant, by the last count and what was written
    since. share: what it would have if all wanted more than there is; of that, a part is always
    kept free ahead of it, since others give room back as fast as they list and delete."""

    def __init__(
        self, tier: ObjectTier, guaranteed: int, most: int, weight: float, share: int
    ) -> None:
        self.guaranteed, self.most, self.weight, self.share = guaranteed, most, weight, share
        self._tier = tier

    @property
    def used(self) -> int:
        return self._tier.writes.physical_nbytes if self._tier.is_counted else 0

    @property
    def held(self) -> int:
        """Until it is counted, it may hold all that it may have."""
        return self.used if self._tier.is_counted else self.cap

    @property
    def cap(self) -> int:
        return self._tier.capacity_bytes

    @property
    def least(self) -> int:
        one = self._tier.run_nbytes_max + STEP_NBYTES  # caps are whole steps, rounded down
        return max(self.share // HEADROOM_SHARE, one)

    def set_cap(self, nbytes: int) -> None:
        if self._tier.is_counted or nbytes > self.cap:
            self._tier.set_capacity(nbytes)

    def set_owed(self, nbytes: int) -> None:
        """Let it keep this much, even before others have given back what is missing to its cap."""
        self._tier.keep(nbytes)

    def start_empty(self) -> None:
        """Begin without room, before it is counted: others may have all of it."""
        self._tier.set_capacity(0)


class _Ask(NamedTuple):
    """Somebody waits until a tenant within its guarantee has so much free."""

    part: DramPart
    wanted: int
    found: asyncio.Future[None]


class Lending:
    """The room of one tier. capacity_bytes: of all tenants together."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._settled = False  # the last look changed nothing
        self._wake = asyncio.Event()  # somebody has no room
        self._rests_at = 0.0
        self.overshoot_nbytes = 0  # at the worst moment that was looked at
        self._parts: dict[str, Part] = {}
        self._leaving: dict[str, int] = {}  # bytes that may still be held by who is being closed
        self._used: dict[str, int] = {}
        self._asks: dict[str, deque[_Ask]] = {}  # of each tenant, who came first
        self._looker: asyncio.Task[None] | None = None  # while somebody asks

    def add(self, name: str, part: Part) -> None:
        self._settled = False
        self._parts[name] = part

    def leave(self, name: str) -> None:
        """Move the room of who is about to be closed no more; it is lent after `remove`."""
        part = self._parts.pop(name, None)
        if part is not None:
            self._leaving[name] = max(part.held, part.cap)

    def remove(self, name: str) -> None:
        """Lend what somebody had, who holds nothing any more."""
        self._settled = False
        for each in (self._parts, self._leaving, self._used):
            each.pop(name, None)

    @property
    def _whole_bytes(self) -> int:
        """What those who stay have together."""
        return self.capacity_bytes - sum(self._leaving.values())

    def part(self, name: str) -> Part | None:
        return self._parts.get(name)

    async def run(self) -> None:
        """Look again and again until cancelled."""
        before: list[int] = []
        while True:
            used = [part.used for part in self._parts.values()]
            if used != before or not self._settled or self._wake.is_set():
                before = used
                self.stir()
                self._wake.clear()
                self.look()
                await asyncio.sleep(LOOK_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REST_LOOK_S if self._rests else IDLE_LOOK_S):
                    await self._wake.wait()

    @property
    def _rests(self) -> bool:
        return time.monotonic() >= self._rests_at

    def stir(self) -> None:
        """Look more often for a while: somebody takes room, or is about to."""
        if self._rests:
            self._wake.set()
        self._rests_at = time.monotonic() + REST_AFTER_S

    def look(self) -> None:
        """Move caps towards what is needed, as far as that goes now."""
        parts = list(self._parts.values())
        self.overshoot_nbytes = max(
            self.overshoot_nbytes, sum(each.held for each in parts) - self._whole_bytes
        )
        claims = [self._claim(name, part) for name, part in self._parts.items()]
        before = [claim.cap for claim in claims]
        targets = [_step(each) for each in caps_for(self._whole_bytes, claims)]
        for part, target in zip(parts, targets, strict=True):
            if isinstance(part, ObjectPart):
                part.set_owed(target)
        lowered = [min(cap, target) for cap, target in zip(before, targets, strict=True)]
        _set(parts, before, lowered)
        held = [part.held for part in parts]
        higher = raised(self._whole_bytes, held, lowered, targets)
        _set(parts, lowered, [_step(each) for each in higher])
        self._settled = [part.cap for part in parts] == before

    def counted(self, name: str) -> None:
        """Look now, since what a tenant holds was counted anew: what it has more is no growth."""
        if (part := self._parts.get(name)) is not None:
            self._used[name] = part.used
            self.look()

    def _claim(self, name: str, part: Part) -> Claim:
        used = part.used
        grown = max(0, used - self._used.get(name, used))
        self._used[name] = used
        usual = min(HEADROOM_NBYTES_MAX, part.guaranteed // HEADROOM_SHARE)
        asked = self._asked(name)
        asked += STEP_NBYTES - 1 if asked else 0  # caps are whole steps, rounded down
        ahead = max(GROWTH_LOOKS * grown, asked)
        headroom = max(part.least, STEP_NBYTES, usual if ahead else 0, ahead)
        # Under its cap's last part it evicts, so it does not grow: but it could use more.
        if used and part.cap - used < headroom:
            headroom = max(headroom, usual)
        return Claim(part.guaranteed, part.most, part.weight, used, headroom, part.cap)

    async def given_back(self, name: str, wait_s: float = ROOM_WAIT_S) -> bool:
        """Wait until others hold no more than is left beside a tenant's cap; False: they do."""
        deadline = time.monotonic() + wait_s
        while True:
            self.look()
            others = sum(part.held for each, part in self._parts.items() if each != name)
            if others + self._parts[name].cap <= self._whole_bytes:
                return True
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(ROOM_POLL_S)

    async def room(self, name: str, nbytes: int, wait_s: float = ROOM_WAIT_S) -> None:
        """Wait until a tenant within its guarantee has so much free, at most `wait_s`.

        Who is over its guarantee waits for nothing: its own policy makes room. However many wait,
        one task looks for all of them, and those of one tenant go on in the order they came.
        """
        self.stir()
        part = self._parts.get(name)
        if not isinstance(part, DramPart):
            return
        before = self._asked(name)
        if part.free >= before + nbytes:
            return
        if part.used + before + nbytes > part.guaranteed and part.cap >= part.guaranteed:
            self._wake.set()
            return
        wanted = min(nbytes, max(0, part.guaranteed - part.used - before))
        ask = _Ask(part, wanted, asyncio.get_running_loop().create_future())
        asks = self._asks.setdefault(name, deque())
        asks.append(ask)
        if self._looker is None or self._looker.done():
            self._looker = asyncio.create_task(self._look_for_room())
        try:
            await asyncio.wait([ask.found], timeout=wait_s)
        finally:
            if ask in asks:
                asks.remove(ask)
        if ask.found.done():
            ask.found.result()

    def _asked(self, name: str) -> int:
        """Return the bytes that those of a tenant wait for, together within its guarantee."""
        return sum(each.wanted for each in self._asks.get(name, ()))

    async def _look_for_room(self) -> None:
        """Look until nobody waits any more."""
        try:
            while any(self._asks.values()):
                self.look()
                for asks in self._asks.values():
                    _answer(asks)
                await asyncio.sleep(ROOM_POLL_S)
        except Exception as error:
            for each in [ask for asks in self._asks.values() for ask in asks]:
                each.found.set_exception(error)
            self._asks.clear()


def _answer(asks: deque[_Ask]) -> None:
    """Let those go on, the first ones first, for whom there is room."""
    given = 0
    while asks:
        part, wanted, found = asks[0]
        owed = max(0, part.guaranteed - part.used - given)
        if part.free - given < min(wanted, owed):
            return
        given += wanted
        asks.popleft()
        if not found.done():
            found.set_result(None)


def _step(nbytes: int) -> int:
    """Return whole steps: caps that moved by a page would make extents of a page."""
    return nbytes // STEP_NBYTES * STEP_NBYTES


def _set(parts: Sequence[Part], before: Sequence[int], after: Sequence[int]) -> None:
    for part, old, new in zip(parts, before, after, strict=True):
        if new != old:
            part.set_cap(new)
