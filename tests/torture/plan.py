"""What befalls a daemon in each of its lives: drawn from a seed, so that a run can be repeated.

The plan and what every client draws come again with the seed; how the processes interleave is up
to the machine.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tests.torture.control import CALLS, WRITES, Rule

# How a life ends. Those named like a call die in it; "tear" in the middle of writing a frame.
DEATHS = (
    *("timer", "write", "tear", "tombstone", "fdatasync", "create", "seal"),
    *("punch", "unlink", "sync_directory", "read", "scrub", "start", "gc"),
)
TROUBLES = {
    "full": Rule(WRITES, "error", code=errno.ENOSPC),
    "write error": Rule(WRITES, "error"),
    "sync error": Rule(("fdatasync", "sync_directory"), "error"),
    "read error": Rule(("read",), "error"),
    "punch error": Rule(("punch", "unlink"), "error"),
    "hang": Rule((*WRITES, "read", "fdatasync"), "hang"),
}
WOUNDS = ("tear", "rot")
LIVES_PER_CAP = 5


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the daemon. churn: its cap is small, so that it evicts all the time.

    trouble: what the disk does for a while; wound: what happens to the files of the dead; "": none.
    """

    number: int
    churn: bool
    death: str
    trouble: str
    wound: str
    codec: str
    seed: int

    @property
    def rule(self) -> Rule | None:
        """What kills it from inside; None: a signal does."""
        draw = Random(self.seed)
        if self.death in ("start", "gc"):
            return Rule(CALLS, "die", skip=draw.randint(0, 40))
        if self.death == "tear":
            return Rule(("write",), "tear", skip=draw.randint(0, 8))
        call = "read" if self.death == "scrub" else self.death
        return Rule((call,), "die", skip=draw.randint(0, 2)) if call in CALLS else None


def plan(
    lives: int,
    seed: int,
    deaths: Sequence[str] = DEATHS,
    lives_per_cap: int = LIVES_PER_CAP,
    troubles: Sequence[str] = tuple(TROUBLES),
) -> list[Life]:
    """Return the lives of a run. Every death comes before any comes again; after `lives_per_cap`
    lives the cap changes."""
    draw = Random(seed)
    return [
        Life(
            number=number,
            churn=number // lives_per_cap % 2 == 1,
            death=death,
            trouble=draw.choice([*troubles, *[""] * len(troubles)]),
            wound=draw.choice([*WOUNDS, "", ""]),
            codec=draw.choice(["raw", "raw", "lz4"]),
            seed=draw.getrandbits(32),
        )
        for number, death in enumerate(_rounds(lives, draw, deaths))
    ]


def _rounds(count: int, draw: Random, deaths: Sequence[str]) -> list[str]:
    rounds: list[str] = []
    while len(rounds) < count:
        rounds += draw.sample(deaths, len(deaths))
    return rounds[:count]
