"""Open all devices of a tier at its start, and go on without those that fail or hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from kvstore.model.errors import ConfigError, Incompatible, KVStoreError
from kvstore.system.threads import ended
from kvstore.tier.file.devices.device import Device, DeviceState
from kvstore.tier.file.failure import DiskFailed, DiskFull

T = TypeVar("T")
TICK_S_MAX = 1.0
# After these errors the tier starts without the device; others are for the operator.
_AWAY = frozenset({errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ENOSPC})


def tick_s(hang_s: float) -> float:
    """Return how often to look whether a device hangs."""
    return min(hang_s / 4, TICK_S_MAX)


async def survey(
    devices: Sequence[Device], look: Callable[[Device], Awaitable[T]], hang_s: float
) -> dict[Device, T]:
    """Return the results of `look`. Devices that fail or hang are noted, if another one works.

    Raises errors that the operator must correct, and the error of a device if none works. Then, and
    if cancelled, no directory stays locked but those of devices that do not answer within `hang_s`:
    they are unlocked when they do.
    """
    looks: dict[asyncio.Future[T], Device]
    looks = {asyncio.ensure_future(look(device)): device for device in devices}
    try:
        return await _answers(looks, hang_s)
    except BaseException:
        for each, device in looks.items():
            each.cancel()
            device.leaving = asyncio.create_task(_let_go(each))
        await ended([device.leaving for device in devices if device.leaving], hang_s)
        raise


async def _answers(looks: Mapping[asyncio.Future[T], Device], hang_s: float) -> dict[Device, T]:
    pending, answers = set(looks), dict[Device, T]()
    while pending:
        done, pending = await asyncio.wait(pending, timeout=tick_s(hang_s))
        for each in [look for look in looks if look in done]:
            error = each.exception()
            if error is None:
                answers[looks[each]] = each.result()
            elif _is_away(error):
                looks[each].note(DeviceState.FAILED, str(error))
            else:
                raise error
        if answers and all(looks[each].watch.oldest_s > hang_s for each in pending):
            break
    for each in pending:
        looks[each].note(DeviceState.HUNG, "no answer at the start")
        looks[each].leaving = asyncio.create_task(_let_go(each))
    if looks and not answers:
        raise next(error for each in looks if (error := each.exception()) is not None)
    return answers


async def _let_go(look: asyncio.Future[Any]) -> None:
    """Unlock a directory that was opened, now or when its call ends."""
    await asyncio.wait([look])
    if look.cancelled() or look.exception() is not None:
        return
    if isinstance(answer := look.result(), tuple):
        with contextlib.suppress(KVStoreError):
            await answer[0].abandon()


def _is_away(error: BaseException) -> bool:
    """Say whether the tier may start without the device."""
    if isinstance(error, Incompatible):
        return False
    if isinstance(error, ConfigError):
        return isinstance(error.__cause__, OSError) and error.__cause__.errno in _AWAY
    return isinstance(error, DiskFailed | DiskFull)
