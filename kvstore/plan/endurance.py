"""What the endurance of given drives costs: the same tiers under a write budget, replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore.decide.policy.write_budget import BURST_S
from kvstore.plan.hardware import Drive, Needs
from kvstore.plan.sizing import DAY_S, Sizing, measure
from kvstore.replay import Workload
from kvstore.replay.bounds import Bounds
from kvstore.settings import ADMISSIONS

ROUNDS_MAX = 4
SPENT = DAY_S / (DAY_S + 2 * BURST_S)  # a day may see that much more than its share


@dataclass(frozen=True, slots=True)
class Budgeted:
    """Fewer drives, and what keeps them within their endurance. write_bytes_per_day: of all drives
    together. sizing: the best replay of those with each admission."""

    drives: int
    write_bytes_per_day: int
    admission: str
    sizing: Sizing


def within_endurance(
    workload: Workload,
    sizing: Sizing,
    needs: Needs,
    drive: Drive,
    *,
    scale: float = 1.0,
    prefill_flops: Callable[[float], float] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Budgeted | None:
    """Return what the drives that capacity and bandwidth need can do within their endurance; None:
    every block may be written to them.

    In a short trace, a budget that may be saved up and overdrawn for half an hour is more than its
    share. So one is looked for with which no more is written a second than `write_bytes_per_day`
    allows: the replayed hits are those of a long run.
    """
    drives = max(count for reason, count in needs.drives.items() if reason != "endurance")
    if needs.drives["endurance"] <= drives:
        return None
    allowed = drives * drive.nbytes * drive.dwpd
    bounds = Bounds(workload)
    budget = allowed / scale * SPENT
    best: Sizing | None = None
    for admission in ADMISSIONS:
        setup = replace(sizing.result.setup, admission=admission)
        for _ in range(ROUNDS_MAX):
            progress()
            setup = replace(setup, write_bytes_per_day=max(1, int(budget)))
            found = measure(workload, setup, bounds, prefill_flops=prefill_flops)
            over = found.written_per_day * scale / allowed
            if over <= 1.0:
                break
            budget *= 0.95 / over
        if best is None or found.result.token_hit_ratio > best.result.token_hit_ratio:
            best = found
    assert best is not None
    return Budgeted(drives, int(allowed * SPENT), best.result.setup.admission, best)
