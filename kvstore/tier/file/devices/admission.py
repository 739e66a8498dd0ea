"""Which devices are in use: found at the start, taken out when they fail, readmitted later.

On each device, only its own tombstones kill. That is sound because a delete is answered only when
every device has taken its tombstone (`tombstones.py`). The tombstones that a device missed are
written to it before it is used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.system.background import keep_running, next_beat
from kvstore.system.threads import ended
from kvstore.tier.file.devices import roster
from kvstore.tier.file.devices.device import Device, DeviceState, Mount, Placed
from kvstore.tier.file.devices.sequences import Sequences
from kvstore.tier.file.devices.survey import survey, tick_s
from kvstore.tier.file.devices.tombstones import catch_up
from kvstore.tier.file.failure import DiskFailed, DiskFull, DiskUnreadable
from kvstore.tier.file.threads import run_blocking
from kvstore.tier.file.tier import FileTier, Recovered

RETRY_S = 1.0  # pause before a device is tried again; it doubles up to RETRY_MAX_S
RETRY_MAX_S = 60.0
CLOSE_S = 1.0  # for tasks under way at the end
SOUND_S = 600.0  # after so long without an error, the pause starts from RETRY_S again
REFUSALS_MAX = 3  # times a device is refused because parts of it cannot be read
FULL_ROOM_NBYTES = 16 << 20  # a full device takes frames again when so much is free
_MISSED_TOO_MUCH = "it missed more deletes than are kept for it"
_Opened = tuple[FileTier, Recovered]
_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Keeps an index of the frames."""

    async def withdrawn(self, mount: Mount) -> None:
        """Forget the frames on `mount`: they cannot be read. Do not free them."""

    def admitted(self) -> None:
        """Recall the frames of devices that have just been admitted."""


class Admission:
    """Runs on one event loop; blocking calls run in the devices' threads."""

    def __init__(self, devices: Sequence[Device], sequences: Sequences, *, hang_s: float) -> None:
        self.devices = devices
        self._sequences = sequences
        self._hang_s = hang_s
        self._tick_s = tick_s(hang_s)
        self._house: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def mounts(self) -> list[Mount]:
        """The devices from which frames are served."""
        return [device.mount for device in self.devices if device.mount is not None]

    @property
    def takes_writes(self) -> bool:
        """Whether a device is not known to refuse them."""
        return any(mount.device.state is DeviceState.OK for mount in self.mounts)

    @property
    def writable(self) -> list[Mount]:
        """The devices that take writes; if none is known to, all in use: each is tried again."""
        sound = [mount for mount in self.mounts if mount.device.state is DeviceState.OK]
        return sound or self.mounts

    async def open(self, listener: Listener, task_failed: Callable[[str], None]) -> None:
        """Admit the devices that are there. Missing and failed ones are admitted later.

        Raises ConfigError and Incompatible if the operator must do something first, and the error
        of a device if there is no other.
        """
        self._listener = listener
        names = await survey(self.devices, self._names, self._hang_s)
        at = {device.path: found for device, found in names.items()}
        away, strange = roster.missing(at), roster.strangers(at)
        for device in self.devices:
            device.is_stranger = device.path in strange
            if device.path in away:
                hint = f"not mounted, or emptied: to use it empty, touch {roster.OWN_NAME} in it"
                device.note(DeviceState.MISSING, hint)
        there = [device for device in names if device.path not in away]
        opened = await self._open_all(there)
        if not opened:
            raise ConfigError(
                f"{', '.join(map(str, away))}: not mounted; mount it, or to start with it empty: "
                f"touch {away[0] / roster.OWN_NAME}"
            )
        try:
            await self._enlist({device: tier for device, (tier, _) in opened.items()})
            for device, (tier, recovered) in opened.items():
                await self._mount(device, tier, recovered)
        except BaseException:
            await self._give_back(opened)
            raise
        listener.admitted()
        self._house = asyncio.create_task(keep_running("devices", self._keep_house, task_failed))
        for device in self.devices:
            if device.mount is None:
                self._trouble(device, device.state, device.reason)

    async def _open_all(self, devices: Sequence[Device]) -> dict[Device, _Opened]:
        while True:
            try:
                return await survey(devices, self._open, self._hang_s)
            except DiskUnreadable:  # in part, all of them: see REFUSALS_MAX
                await asyncio.sleep(RETRY_S)

    async def _give_back(self, opened: Mapping[Device, _Opened]) -> None:
        """Unlock directories that are not used after all, those that hang when they answer."""
        for device, (tier, _) in opened.items():
            device.mount = None
            device.leaving = asyncio.create_task(_abandon(tier))
        await ended([each.leaving for each in opened if each.leaving], self._hang_s)

    async def close(self) -> None:
        """Stop watching the devices. Does not wait for a call that hangs."""
        self._closed = True
        tasks = [self._house, *(device.task for device in self.devices)]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        leaving = [each.leaving for each in self.devices if each.leaving is not None]
        if running or leaving:
            await asyncio.wait([*running, *leaving], timeout=CLOSE_S)

    # ---- trouble -----------------------------------------------------------------------------

    def read_failed(self, place: Placed, error: DiskFailed) -> None:
        """Take the device out, unless it is the only one in use."""
        mount = place.mount
        if mount.is_current and len(self.mounts) > 1:
            mount.tier.health.distrust(place.extent)
            self._take_out(mount, DeviceState.FAILED, str(error))

    def write_failed(self, mount: Mount, error: DiskFull | DiskFailed) -> None:
        """Send writes to other devices until this one takes them again."""
        if not mount.is_current:
            return
        cause = error.__cause__
        if isinstance(error, DiskFull):
            state = DeviceState.FULL
        elif isinstance(cause, OSError) and cause.errno == errno.EROFS:
            state = DeviceState.READ_ONLY
        else:
            state = DeviceState.FAILING
        self._trouble(mount.device, state, str(error))

    def _trouble(self, device: Device, state: DeviceState, reason: str) -> None:
        """Note that a device has a problem, and start the task that tries it again."""
        sound_s = time.monotonic() - device.since if device.state is DeviceState.OK else 0.0
        if not device.retry_s or sound_s > SOUND_S:
            device.retry_s = RETRY_S
        device.note(state, reason)
        if device.task is None:
            device.task = asyncio.create_task(self._tend(device))

    def _take_out(self, mount: Mount, state: DeviceState, reason: str) -> None:
        device = mount.device
        if mount.is_current and not self._closed:
            device.mount = None
            mount.gone.set_result(None)
            device.leaving = asyncio.create_task(self._leave(mount))
            self._trouble(device, state, reason)

    async def _leave(self, mount: Mount) -> None:
        """Abandon a device; returns when its last call has come back, however late."""
        await self._listener.withdrawn(mount)
        mount.device.suspects = await mount.tier.abandon()

    async def _keep_house(self) -> None:
        while True:
            pause_s = next_beat(self._tick_s) - asyncio.get_running_loop().time()
            began = time.monotonic()
            await asyncio.sleep(pause_s)
            # While this process was stopped, it did not wait for a device.
            late_s = time.monotonic() - began - pause_s
            for mount in self.mounts:
                waited_s = mount.device.watch.oldest_s
                if waited_s - late_s > self._hang_s:
                    self._take_out(mount, DeviceState.HUNG, f"no answer for {waited_s:.1f} s")
                elif mount.tier.health.free_bytes_min and (
                    mount.measuring is None or mount.measuring.done()
                ):
                    mount.measuring = asyncio.create_task(_measure_free(mount))

    # ---- back again --------------------------------------------------------------------------

    async def _tend(self, device: Device) -> None:
        """Try a device until it works, with pauses that grow to a bound."""
        while device.state is not DeviceState.OK:
            await asyncio.sleep(device.retry_s)
            device.retry_s = min(2 * device.retry_s, RETRY_MAX_S)
            try:
                if device.leaving is not None:
                    await asyncio.shield(device.leaving)
                await self._try(device)
            except KVStoreError:
                continue  # it still fails; the reason stays the first one
            except Exception:
                _log.exception("device=bug path=%s", device.path)
        device.task = None

    async def _try(self, device: Device) -> None:
        mount = device.mount
        if mount is not None:
            full = device.state is DeviceState.FULL
            room = min(FULL_ROOM_NBYTES, mount.tier.space.capacity_bytes) if full else 0
            await mount.unless_gone(mount.tier.health.try_out(room))
            await catch_up(mount)
            if device.is_stranger:
                self._take_out(mount, DeviceState.FAILED, _MISSED_TOO_MUCH)
            elif mount.is_current:
                device.note(DeviceState.OK)
        elif roster.OWN_NAME in await self._names(device):
            was_strange = device.is_stranger
            tier, recovered = await self._open(device, tried=False)
            if was_strange:
                await self._accept(device, tier)
            await self._mount(device, tier, recovered)
            self._listener.admitted()

    async def _accept(self, device: Device, tier: FileTier) -> None:
        """Enlist a device that was emptied, before anything is written to it.

        The next start would empty a stranger again.
        """
        try:
            await self._enlist({each.device: each.tier for each in self.mounts} | {device: tier})
        except BaseException:
            device.is_stranger = True
            await tier.abandon()
            raise

    async def _mount(self, device: Device, tier: FileTier, recovered: Recovered) -> None:
        """Admit a device after it has got the deletes that it missed."""
        mount = Mount(device, tier)
        try:
            if not device.is_numbered:
                # From here on, new numbers are higher than all on it, missed tombstones included.
                self._sequences.go_on_from(recovered.next_sequence)
                device.missed = {
                    of: replace(header, sequence=self._sequences.take())
                    for of, header in device.missed.items()
                }
                device.is_numbered = True
                await self._outlast(set(self._sequences.in_flight))
            await catch_up(mount)
            if device.is_stranger:
                raise DiskFailed(_MISSED_TOO_MUCH)
        except BaseException:
            await tier.abandon()
            raise
        # No await between the last check and these: from here on it gets every delete.
        device.mount, device.refusals = mount, 0
        device.note(DeviceState.OK)

    async def _outlast(self, numbers: set[int]) -> None:
        """Wait for runs in flight that tombstones on a device would kill: numbered too low."""
        while numbers & self._sequences.in_flight:  # noqa: ASYNC110 - rare, and they end by themselves
            await asyncio.sleep(self._tick_s)

    # ---- looking at devices ------------------------------------------------------------------

    async def _names(self, device: Device) -> list[str]:
        look = partial(roster.names_in, device.watch.disk, device.path)
        return await run_blocking(device.looker, look)

    async def _open(self, device: Device, *, tried: bool = True) -> _Opened:
        tier, fresh = device.make_tier(), device.is_stranger
        tier.space.segments.expected = self._sequences.lowest_in_flight
        # Unreadable parts count as torn and their room is freed, but not at the first attempts.
        whole = len(self.devices) > 1 and device.refusals < REFUSALS_MAX
        try:
            recovered = await tier.open(
                fresh=fresh, tried=tried, whole=whole, suspects=device.suspects
            )
        except DiskUnreadable:
            device.refusals += 1
            raise
        if fresh:
            _log.warning("emptied, because it missed deletes path=%s", device.path)
            device.is_stranger = False
        return tier, recovered

    async def _enlist(self, tiers: Mapping[Device, FileTier]) -> None:
        """Note in each directory which directories make up this tier."""
        for device, tier in tiers.items():
            await tier.run(partial(roster.enlist, device.watch.disk, device.path))
        members = [each.path for each in self.devices if not each.is_stranger]
        for device, tier in tiers.items():
            peers = [path for path in members if path != device.path]
            await tier.run(partial(roster.note_peers, device.watch.disk, device.path, peers))


async def _abandon(tier: FileTier) -> None:
    with contextlib.suppress(KVStoreError):
        await tier.abandon()


async def _measure_free(mount: Mount) -> None:
    with contextlib.suppress(KVStoreError):  # then the last measurement stands
        await mount.unless_gone(mount.tier.health.measure_free())
