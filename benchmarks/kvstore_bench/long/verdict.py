"""What came out of a run, as numbers and checks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from kvstore_bench.demo.verdict import Check
from kvstore_bench.long.course import BLOCK_TOKENS, TITLES, Answered, Course

LOADED_SHARE_MIN = 0.99  # of a resumed prompt, where there is room for it
RATIOS_MAX = {"dram": 0.03, "file": 0.06, "restart": 0.08}  # TTFT of the longest prompt over cold
ROOMY = ("dram", "file", "restart", "killed_load", "starved", "beside")
PARTLY = ("small", "killed_save")  # a part of the prompt is stored


def numbers_of(course: Course) -> dict[str, Any]:
    """Return every field of the result by its name."""
    lengths = course.plan.lengths
    fields: dict[str, Any] = {}
    for length in lengths:
        name = f"{length >> 10}k"
        cold_s = _median(course.answered, "cold", length)
        fields[f"ttft_{name}_cold_s"] = cold_s
        fields[f"ttft_{name}_device_hit_s"] = median(
            each.own_ttft_s for each in course.answered if each.length == length
        )
        for phase in RATIOS_MAX:
            ttft_s = _median(course.answered, phase, length)
            fields[f"ttft_{name}_{phase}_vs_cold"] = ttft_s / cold_s
    small = next(each for each in course.answered if each.phase == "small")
    fields["small_arena_loaded_share"] = small.loaded_share
    fields["small_arena_vs_cold"] = small.ttft_s / _median(
        course.answered, "small_cold", small.length
    )
    fields["loaded_share_min"] = min(
        each.loaded_share for each in course.answered if each.phase in ROOMY
    )
    partly = {
        phase: [each.loaded_tokens for each in course.answered if each.phase == phase]
        for phase in PARTLY
    }
    fields["partly_loaded_tokens_min"] = min(min(each, default=0.0) for each in partly.values())
    fields["phases_unseen"] = len(TITLES.keys() - course.snapshots.phases)
    fields["wrong"] = sum(each.wrong for each in course.answered)
    fields["hung"] = len(course.hung)
    fields["engine_dead"] = len(course.dead)
    fields["over_cap_bytes"] = max(
        (each.over_cap_bytes for each in course.snapshots.taken), default=0
    )
    fields["leases_left"] = course.leases_left
    return fields


def checks_of(fields: dict[str, Any], longest: int, leaks: Sequence[str]) -> list[Check]:
    """Judge the fields. longest: tokens of the longest prompt."""
    name = f"{longest >> 10}k"
    none = ("wrong", "hung", "engine_dead", "over_cap_bytes", "phases_unseen", "leases_left")
    ratios = {f"ttft_{name}_{phase}_vs_cold": most for phase, most in RATIOS_MAX.items()}
    return [
        *(Check(field, fields[field], most, at_least=False) for field, most in ratios.items()),
        Check("loaded_share_min", fields["loaded_share_min"], LOADED_SHARE_MIN, at_least=True),
        Check(
            "partly_loaded_tokens_min",
            fields["partly_loaded_tokens_min"],
            BLOCK_TOKENS,
            at_least=True,
        ),
        *(Check(field, fields[field], 0, at_least=False) for field in none),
        Check("leaks", len(leaks), 0, at_least=False),
    ]


def _median(answered: Sequence[Answered], phase: str, length: int) -> float:
    return median(each.ttft_s for each in answered if (each.phase, each.length) == (phase, length))
