"""What came out, in numbers, and whether it is enough."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore_bench.llamacpp.course import OURS, PHASES, Seen

LIMITS = {
    "ttft_ratio_same": 0.04,
    "ttft_ratio_new_process": 0.04,
    "ttft_ratio_restart": 0.05,
    "bytes_vs_snapshots": 0.4,
    "different_answers": 0,
}
ROWS = (*(f"ttft_{phase}_s" for phase in PHASES), "chat_ttft_s", "chat_total_s")
"""What is compared with the disk cache."""


@dataclass(frozen=True, slots=True)
class Check:
    """One of the numbers, and the most that it may be."""

    field: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


def numbers(seen: Mapping[str, Seen]) -> dict[str, Any]:
    """Return medians, ratios to the time without a cache, bytes, answers that differ, and where the
    disk cache was faster.

    Fields of the exact cache have no prefix, those of others default_ and disk_.
    """
    none = seen["none"]
    cold = _median(none, "first")
    found: dict[str, Any] = {"ttft_cold_s": cold}
    for system, each in seen.items():
        if system == "none":
            continue
        name = "" if system == "kvstore" else f"{system}_"
        for phase in PHASES:
            median = _median(each, phase)
            found[f"{name}ttft_{phase}_s"] = median
            found[f"{name}ttft_ratio_{phase}"] = median / cold
        found[f"{name}chat_ttft_s"] = _chat_median(each)
        found[f"{name}chat_ttft_vs_none"] = _chat_median(each) / _chat_median(none)
        found[f"{name}chat_bytes"] = each.chat_bytes
        found[f"{name}chat_total_s"] = sum(answer.total_s for answer in each.chats)
        found[f"{name}different_answers"] = _different(none, each)
        found[f"{name}chat_different_answers"] = _different_chats(none, each)
    found["chat_none_ttft_s"] = _chat_median(none)
    found["chat_snapshot_bytes"] = sum(answer.state_bytes for answer in none.chats)
    if "kvstore" in seen:
        found["bytes_vs_snapshots"] = found["chat_bytes"] / found["chat_snapshot_bytes"]
        found["loaded_tokens"] = {
            phase: [answer.loaded_tokens for answer in answers]
            for phase, answers in seen["kvstore"].phases.items()
        }
    for system in OURS:
        if {system, "disk"} <= seen.keys():
            name = "" if system == "kvstore" else f"{system}_"
            found[f"{name}slower_than_disk"] = [
                row for row in ROWS if found[f"{name}{row}"] >= found[f"disk_{row}"]
            ]
    return found


def checks(found: Mapping[str, Any]) -> list[Check]:
    """Return what was asked for, as far as it was measured."""
    return [Check(name, found[name], most) for name, most in LIMITS.items() if name in found]


def _median(seen: Seen, phase: str) -> float:
    return statistics.median(answer.ttft_s for answer in seen.phases[phase])


def _chat_median(seen: Seen) -> float:
    return statistics.median(answer.ttft_s for answer in seen.chats) if seen.chats else 0.0


def _different(none: Seen, other: Seen) -> int:
    """Count answers that are not those of a model without a cache."""
    wanted = [answer.answer for answer in none.phases["first"]]
    differ = sum(
        answer.answer != expected
        for answers in other.phases.values()
        for answer, expected in zip(answers, wanted, strict=True)
    )
    return differ + _different_chats(none, other)


def _different_chats(none: Seen, other: Seen) -> int:
    """The same of the conversations: what follows a different answer has another prompt."""
    return sum(
        answer.answer != expected.answer
        for answer, expected in zip(other.chats, none.chats, strict=True)
    )
