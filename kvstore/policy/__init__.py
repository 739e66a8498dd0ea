"""Who leaves when a tier is full, and who may enter. Pure: no I/O, no clock of its own."""

from kvstore.policy.base import Policy
from kvstore.policy.tail_first_lru import TailFirstLru
from kvstore.policy.write_budget import WriteBudget

__all__ = ["Policy", "TailFirstLru", "WriteBudget"]
