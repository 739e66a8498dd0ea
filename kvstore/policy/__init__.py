"""Who leaves when a tier is full. Pure: no clock, no I/O, no idea of bytes."""

from kvstore.policy.base import Policy
from kvstore.policy.tail_first_lru import TailFirstLru

__all__ = ["Policy", "TailFirstLru"]
