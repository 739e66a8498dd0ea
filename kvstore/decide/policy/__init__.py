"""Who leaves when a tier is full, and who may enter. Pure: no I/O, no clock of its own.

`base.py` is what a policy has to be, `registry.py` finds one by name, `guarded.py` goes on where
one fails. `lru.py` and `hazard_density.py` are two, over the tree in `prefix_tree.py`, which is
columns of the index's rows; the second learns in `hazard.py`, keeps its order in `leaves.py`, and
asks `shadow.py` which order to follow. `write_budget.py` says what is worth its wear of flash, by
what `returns.py` has learned; `spare_writes.py` lends what one budget does not use to others.
"""

from kvstore.decide.policy.base import Policy, PolicyFactory
from kvstore.decide.policy.guarded import Guarded
from kvstore.decide.policy.hazard_density import HazardDensity
from kvstore.decide.policy.lru import TailFirstLru
from kvstore.decide.policy.registry import policy_by_name
from kvstore.decide.policy.shadow import Choice
from kvstore.decide.policy.spare_writes import SpareWrites
from kvstore.decide.policy.write_budget import WriteBudget

__all__ = [
    "Choice",
    "Guarded",
    "HazardDensity",
    "Policy",
    "PolicyFactory",
    "SpareWrites",
    "TailFirstLru",
    "WriteBudget",
    "policy_by_name",
]
