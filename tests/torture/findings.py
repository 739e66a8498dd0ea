"""What a run of lives has found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

KINDS = ("lost", "wrong", "resurrected", "foreign", "hung", "bug")


@dataclass(slots=True)
class Findings:
    """What a run found; the violations say in which life."""

    kills: int = 0
    violations: list[str] = field(default_factory=list)
    cap_overshoot_bytes: int = 0
    cap_looks: int = 0
    evicted: int = 0
    checked: int = 0
    start_s_max: float = 0.0
    deaths: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wounds: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str) -> int:
        return sum(f" {kind}: " in text for text in self.violations)
