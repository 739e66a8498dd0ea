"""What one seed found, and how much it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Outcome:
    """What one seed found. Counts are there to see that it did something. kind: of the records."""

    seed: int
    kind: str = ""
    violations: list[str] = field(default_factory=list)
    calls: int = 0
    loads: int = 0
    files_read: int = 0
    lives: int = 0
    durable: int = 0
    faults: int = 0
    rotten: int = 0
    evicted: int = 0
    away: int = 0
    taken_out: int = 0
    fine_served: int = 0
    thinned: int = 0
    encrypted: int = 0
    tenants: int = 0
    lent: int = 0
    nonces: int = 0
    nonce_reused: int = 0
    stores: int = 1
    messages: int = 0
    copies: int = 0
    cuts: int = 0
    flips: int = 0
    partitions: int = 0
    twins: int = 0
    quarantined: int = 0
    fleet_deletes: int = 0
    fleet_refused: int = 0
    kept_applied: int = 0
    dropped_all: int = 0

    def count(self, kind: str) -> int:
        return sum(text.startswith(f"{kind}:") for text in self.violations)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
