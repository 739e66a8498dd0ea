"""The same daemon on several directories, of which some are missing, fail, hang or fill up.

What is on a directory that is not there may be missed, and has to be there again with it. What was
answered as durable while others were in trouble has to be there, wherever it is.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path
from random import Random

from kvstore import Client
from kvstore.testing.wait import until
from kvstore.tier.file import Audit
from tests.torture.control import CALLS, WRITES, Rule
from tests.torture.plan import Life
from tests.torture.world import END_S, TROUBLE_S, World
from tests.torture.wounds import records

_CHANGES = (*WRITES, "probe", "punch", "unlink")
TROUBLES = {
    "full": Rule((*WRITES, "probe"), "error", code=errno.ENOSPC),
    "read only": Rule(_CHANGES, "error", code=errno.EROFS),
    "sync error": Rule(("fdatasync", "sync_directory"), "error"),
    "dead": Rule(CALLS, "error"),
    "hang": Rule(CALLS, "hang"),
}
SETTINGS = ("file.hang_s=0.5",)
AWAY = 0.4  # the chance that some are missing when a life begins
BACK = 0.5  # and come back while it lasts
WELL_S = END_S / 2


class SeveralWorld(World):
    """See the module. Trouble befalls one of the directories."""

    def __init__(self, directories: int) -> None:
        names = [f"disk{number}" for number in range(directories)]
        super().__init__(settings=SETTINGS, directories=names)
        self.away = self.back = 0  # directories that were, ever
        self._away: list[Path] = []
        self._comes_back = False

    def _live(self, life: Life) -> None:
        self._bring_back()
        draw = Random(f"{life.seed} away")
        if life.number and draw.random() < AWAY:
            self._take_away(draw)
        super()._live(life)

    def _last(self, life: Life) -> None:
        self._bring_back()
        super()._last(life)

    def _take_away(self, draw: Random) -> None:
        count = draw.randrange(1, len(self._directories))
        self._away = draw.sample(self._directories, count)
        self._comes_back = draw.random() < BACK
        for path in self._away:
            self.journal.away |= {item for _, _, run in Audit(path).runs for item in records(run)}
            path.rename(_aside(path))
        self.away += count

    def _bring_back(self) -> None:
        for path in self._away:
            _aside(path).rename(path)
        self._away = []
        self.journal.away = set()

    def _warm_up(self, life: Life, *args: object) -> None:
        super()._warm_up(life, *args)  # type: ignore[arg-type]
        if self._away and self._comes_back:
            self.back += len(self._away)
            self._bring_back()
            self._see_all_well(life, "it came back")

    def _trouble(self, life: Life, draw: Random) -> None:
        rule = TROUBLES[life.trouble]
        self._control.set(rule.on(draw.randrange(len(self._directories))))
        time.sleep(draw.uniform(*TROUBLE_S))
        self._control.set()
        self._see_all_well(life, f"{life.trouble!r} was over")
        self._flush_after(life)

    def _see_all_well(self, life: Life, since: str) -> None:
        """See that every directory that is there is in use again."""

        def well() -> bool:
            devices = client.admin.stats()["file"]["devices"]
            away = set(map(str, self._away))
            return all(each["state"] == "ok" for each in devices if each["path"] not in away)

        with Client(self.daemon.target, arena=False) as client:
            try:
                until(well, WELL_S)
            except TimeoutError:
                self._found(life, [f"hung: a directory is not in use since {since}"])


def _aside(path: Path) -> Path:
    return path.with_suffix(".away")
