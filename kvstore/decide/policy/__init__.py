"""Who leaves when a tier is full, and who may enter. Pure: no I/O, no clock of its own.

`base.py` is what a policy has to be, `registry.py` finds one by name; `lru.py` and
`hazard_density.py` (which learns in `hazard.py`) are two, over the tree in `prefix_tree.py`.
`write_budget.py` says what is worth its wear of flash, by what `returns.py` has learned.
"""

from kvstore.decide.policy.base import Policy, PolicyFactory
from kvstore.decide.policy.hazard_density import HazardDensity
from kvstore.decide.policy.lru import TailFirstLru
from kvstore.decide.policy.registry import policy_by_name
from kvstore.decide.policy.write_budget import WriteBudget

__all__ = [
    "HazardDensity",
    "Policy",
    "PolicyFactory",
    "TailFirstLru",
    "WriteBudget",
    "policy_by_name",
]
