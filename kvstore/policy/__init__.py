"""Who leaves when a tier is full, and who may enter. Pure: no I/O, no clock of its own.

`base.py` is what a policy has to be, `registry.py` finds one by name; `lru.py` and
`hazard_density.py` (which learns in `hazard.py`) are two, over the tree in `prefix_tree.py`.
`write_budget.py` says what is worth its wear of flash, by what `returns.py` has learned.
"""

from kvstore.policy.base import Policy, PolicyFactory
from kvstore.policy.hazard_density import HazardDensity
from kvstore.policy.lru import TailFirstLru
from kvstore.policy.registry import policy_by_name
from kvstore.policy.write_budget import WriteBudget

__all__ = [
    "HazardDensity",
    "Policy",
    "PolicyFactory",
    "TailFirstLru",
    "WriteBudget",
    "policy_by_name",
]
