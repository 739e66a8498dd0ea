"""Which eviction policies there are, by the names that settings use.

Another package adds one by an entry point in the group `kvstore.policies`: its name is the
setting's value, its object a `PolicyFactory`. It should pass `kvstore.testing.policy`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points

from kvstore.decide.policy.base import PolicyFactory
from kvstore.decide.policy.hazard_density import HazardDensity
from kvstore.decide.policy.lru import TailFirstLru
from kvstore.decide.rows import Rows
from kvstore.model.errors import ConfigError

ENTRY_POINTS = "kvstore.policies"


def _lru(now: Callable[[], float], rows: Rows | None = None) -> TailFirstLru:
    return TailFirstLru(rows)


BUILT_IN: dict[str, PolicyFactory] = {
    "lru": _lru,
    "hz": HazardDensity,
}


def policy_by_name(name: str, shadow_blocks: int | None = None) -> PolicyFactory:
    """Return what makes the policy a setting names. Raises ConfigError with the names there are.

    shadow_blocks: of a policy that chooses between orders by models of its tier, None: as it likes.
    """
    if shadow_blocks is not None and name == "hz":
        return partial(HazardDensity, shadow_blocks=shadow_blocks)
    if name in BUILT_IN:
        return BUILT_IN[name]
    added = entry_points(group=ENTRY_POINTS)
    if name not in added.names:
        known = ", ".join([*BUILT_IN, *sorted(added.names)])
        raise ConfigError(f"no eviction policy {name!r}; choose one of {known}")
    try:
        factory: PolicyFactory = added[name].load()
    except ImportError as error:
        raise ConfigError(f"the eviction policy {name!r} cannot be imported: {error}") from error
    return factory
