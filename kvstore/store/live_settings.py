"""The settings a daemon runs with, and how those that are live change meanwhile.

All or nothing: several changes are checked together, as a start would, before the first is made.
What was changed lasts until the daemon ends, or reads its file again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from kvstore.model.errors import ConfigError
from kvstore.settings import (
    Entry,
    Settings,
    TenantSettings,
    entries,
    live_part,
    load_settings,
    overridden,
)
from kvstore.system import logs
from kvstore.system.redaction import without_credentials

logger = logging.getLogger(__name__)

WAIT_S_MAX = 60.0
POLL_S = 0.02


class Changed(NamedTuple):
    """One setting that changed, as people write it."""

    key: str
    before: str
    after: str


class Outcome(NamedTuple):
    """What a change did. pending: what a lowered cap still waits for, "" if for nothing."""

    changed: Sequence[Changed]
    pending: str = ""


class Configurable(Protocol):
    """What settings are for: the caps of one store, or of all tenants'."""

    async def check(self, settings: Settings) -> None:
        """Raise ConfigError on what `reconfigure` could not carry out."""

    def reconfigure(self, settings: Settings) -> None:
        """Take what of the settings can change while the node runs. `check` them first."""

    def over_caps(self) -> str:
        """Say what a lowered cap waits for, "" if every cap is kept."""


class LiveSettings:
    """The settings of one node. path, overrides: where they came from, to be read again.

    changing: is held by whoever changes them, from the look at what they are to the change.
    """

    def __init__(
        self,
        settings: Settings,
        caps: Configurable,
        *,
        path: Path | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.settings = settings
        self.path = path
        self._overrides = tuple(overrides)
        self._caps = caps
        self.changing = asyncio.Lock()
        self.on_change: list[Callable[[], None]] = []  # told after each

    def entries(self) -> Sequence[Entry]:
        """Return every setting, for people: without the credentials an address may have."""
        return [_shown(entry) for entry in entries(self.settings)]

    async def change(self, assignments: Sequence[str], wait_s: float = 0.0) -> Outcome:
        """Change settings by texts such as "dram.capacity=8GiB".

        Waits up to `wait_s` until lowered caps are kept. Raises ConfigError, and has changed
        nothing then.
        """
        async with self.changing:
            wanted = overridden(self.settings, assignments)
            fixed = [each.key for each in _differences(self.settings, wanted) if not each.live]
            if fixed:
                raise ConfigError(
                    f"{', '.join(fixed)}: takes effect at a restart only; nothing was changed"
                )
            changed = await self._take(wanted)
        return Outcome(changed, await self._settled(wait_s))

    def adopt(self, settings: Settings) -> None:
        """Take settings that others have carried out; they hold `changing`."""
        self.settings = settings

    def without(self, tenants: Sequence[TenantSettings]) -> Settings:
        """Return the settings with these tenants alone."""
        return replace(self.settings, tenants=tuple(tenants))

    async def reload(self) -> Outcome:
        """Read the file again, with the overrides of the start on top.

        Takes what is live; what is not is logged. Raises ConfigError, and has changed nothing then.
        """
        async with self.changing:
            wanted = await asyncio.to_thread(load_settings, self.path, self._overrides)
            changed = await self._take(live_part(wanted, self.settings))
            later = [each.key for each in _differences(self.settings, wanted)]
            if later:
                logger.warning("config=at_restart keys=%s", ",".join(later))
        return Outcome(changed, self._caps.over_caps())

    async def _take(self, settings: Settings) -> list[Changed]:
        before = self.settings
        await self._caps.check(settings)
        self._caps.reconfigure(settings)
        logs.set_level(settings.server.log_level)
        self.settings = settings
        for tell in self.on_change:
            tell()
        was = {each.key: _shown(each).value for each in entries(before)}
        changed = [
            Changed(each.key, was.get(each.key, ""), _shown(each).value)
            for each in _differences(before, settings)
        ]
        for each in changed:
            logger.info("config=changed key=%s before=%s after=%s", *each)
        return changed

    async def _settled(self, wait_s: float) -> str:
        """Wait until what is over a cap is gone; return what is not."""
        deadline = time.monotonic() + min(wait_s, WAIT_S_MAX)
        while (over := self._caps.over_caps()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return over


def _differences(before: Settings, after: Settings) -> list[Entry]:
    """Return the settings of `after` that `before` has otherwise."""
    old = set(entries(before))
    return [new for new in entries(after) if new not in old]


def _shown(entry: Entry) -> Entry:
    return entry._replace(value=without_credentials(entry.value))
