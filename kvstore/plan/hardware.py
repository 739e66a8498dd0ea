"""Sizes and traffic -> drives, bandwidth and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.plan.sizing import DAY_S, Sizing

MONTH_S = 30 * DAY_S
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One NVMe drive. dwpd: times its size it may be written a day. Bandwidths in bytes/s."""

    nbytes: int
    dwpd: float
    read: int
    write: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """In any currency: a GiB of dram and a drive, a month; a GPU (or what prefills), an hour."""

    dram_gib_month: float
    drive_month: float
    gpu_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What to buy. Bandwidths in bytes/s; drives: how many for each reason.

    break_even: the bandwidth at which loading takes as long as prefill; None: nobody said how fast
    that is. costs a million hit tokens; None without prices.
    """

    dram_bytes: int
    file_bytes: int
    writes_per_day: float
    mean_read: float
    peak_read: float
    peak_write: float
    drives: Mapping[str, int]
    break_even: float | None
    cost_per_hit: float | None = None
    cost_per_million_tokens: float | None = None
    recompute_per_million_tokens: float | None = None


def needs_of(
    sizing: Sizing,
    drive: Drive,
    *,
    bytes_per_token: float,
    prefill_tokens_per_s: float | None = None,
    scale: float = 1.0,
    prices: Prices | None = None,
    gpus: int = 1,
    drives_min: int = 1,
) -> Needs:
    """Return what a workload needs; scale: so many times as much of it at once. gpus: so many
    reach `prefill_tokens_per_s` together. bytes_per_token: as files have them. drives_min: so many
    are paid for in any case."""
    result, setup = sizing.result, sizing.result.setup
    block = setup.file_record_nbytes * scale
    dram = round(setup.dram_blocks * setup.record_nbytes * scale)
    file = round(setup.file_blocks * block)
    writes_per_day = sizing.written_per_day * scale
    peak_read = sizing.peak_reads * block / sizing.peak_s
    peak_write = sizing.peak_writes * block / sizing.peak_s
    drives = {
        "capacity": file / drive.nbytes,
        "endurance": writes_per_day / (drive.dwpd * drive.nbytes),
        "read bandwidth": peak_read / drive.read,
        "write bandwidth": peak_write / drive.write,
    }
    pace = prefill_tokens_per_s
    if pace:
        drives["break-even"] = bytes_per_token * pace / drive.read
    counts = {reason: max(1, math.ceil(count - 1e-9)) for reason, count in drives.items()}
    hits = (result.traffic.dram_hits + result.traffic.file_hits) / sizing.seconds * scale
    tokens = hits * result.block_tokens * MONTH_S
    bought = max(drives_min, *counts.values())
    cost = per_hit = recompute = None
    if prices is not None and tokens:
        month = prices.dram_gib_month * dram / GIB + prices.drive_month * bought
        cost = month / tokens * 1e6
        per_hit = month / (result.hit_requests / sizing.seconds * scale * MONTH_S)
        recompute = prices.gpu_hour * gpus / 3600 / pace * 1e6 if pace else None
    return Needs(
        dram_bytes=dram,
        file_bytes=file,
        writes_per_day=writes_per_day,
        mean_read=result.traffic.file_reads * block / sizing.seconds,
        peak_read=peak_read,
        peak_write=peak_write,
        drives=counts,
        break_even=bytes_per_token * pace if pace else None,
        cost_per_hit=per_hit,
        cost_per_million_tokens=cost,
        recompute_per_million_tokens=recompute,
    )
