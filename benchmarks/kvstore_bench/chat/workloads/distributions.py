"""The random sizes of vLLM's `generate_conversations` configuration.

Meanings and limits are those of vLLM's `benchmarks/multi_turn/bench_dataset.py`. Draws come from
numpy's `RandomState`, whose stream is frozen (NEP 19): a seed gives the same sizes for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.model.errors import InvalidRequest

Draw = Callable[[np.random.RandomState, int], NDArray[Any]]
MEDIAN_RATIO = 0.85

_FIELDS: Mapping[str, tuple[set[str], set[str]]] = {
    "constant": ({"value"}, set()),
    "uniform": ({"min", "max"}, set()),
    "lognormal": (set(), {"average", "median_ratio", "mean", "sigma", "max"}),
    "zipf": ({"alpha"}, {"max"}),
    "poisson": ({"alpha"}, {"max"}),
}


def distribution(where: str, config: Any) -> Draw:
    """Return what draws `size` values >= 0. Raises InvalidRequest that starts with `where`."""
    if not isinstance(config, dict):
        raise InvalidRequest(f"{where}: expected an object with a distribution")
    name = config.get("distribution")
    if not isinstance(name, str) or name not in _FIELDS:
        raise InvalidRequest(f"{where}: unknown distribution {name!r}: use {', '.join(_FIELDS)}")
    needed, optional = _FIELDS[name]
    given = config.keys() - {"distribution"}
    if needed - given or given - needed - optional:
        raise InvalidRequest(
            f"{where}: {name} takes {', '.join(sorted(needed | optional))}, given"
            f" {', '.join(sorted(given)) or 'nothing'}"
        )
    for field in given:
        if isinstance(config[field], bool) or not isinstance(config[field], int | float):
            raise InvalidRequest(f"{where}: {field} must be a number")
        if not 0 <= config[field] < math.inf:
            raise InvalidRequest(f"{where}: {field} must be at least 0")
    return _whole(_draw(where, name, config), config.get("max"))


def _whole(draw: Draw, limit: float | None) -> Draw:
    def sizes(random: np.random.RandomState, size: int) -> NDArray[Any]:
        values = np.round(draw(random, size))
        return (values if not limit else np.minimum(values, limit)).astype(np.int64)

    return sizes


def _draw(where: str, name: str, config: Mapping[str, Any]) -> Draw:
    if name == "constant":
        return lambda random, size: np.full(size, config["value"])
    if name == "uniform":
        low, high = int(config["min"]), int(config["max"])
        if not 0 < low <= high:
            raise InvalidRequest(f"{where}: 0 < min <= max must hold")
        return lambda random, size: random.randint(low, high + 1, size)
    if name == "zipf":
        if config["alpha"] <= 1:
            raise InvalidRequest(f"{where}: alpha must be above 1")
        return lambda random, size: random.zipf(config["alpha"], size)
    if name == "poisson":
        return lambda random, size: random.poisson(config["alpha"], size)
    return _lognormal(where, config)


def _lognormal(where: str, config: Mapping[str, Any]) -> Draw:
    if "average" not in config:
        if not {"mean", "sigma"} <= config.keys():
            raise InvalidRequest(f"{where}: lognormal needs average, or mean and sigma")
        return lambda random, size: random.lognormal(config["mean"], config["sigma"], size)
    ratio, average = config.get("median_ratio", MEDIAN_RATIO), config["average"]
    if not 0 < ratio < 1 or average < 1 or {"mean", "sigma"} & config.keys():
        raise InvalidRequest(
            f"{where}: lognormal with average needs average >= 1, 0 < median_ratio < 1 and"
            " neither mean nor sigma"
        )
    # median / mean of a lognormal is exp(-sigma^2 / 2), and its median exp(mu).
    mu, sigma = math.log(average * ratio), math.sqrt(-2 * math.log(ratio))

    def draw(random: np.random.RandomState, size: int) -> NDArray[Any]:
        values = random.lognormal(mu, sigma, size)
        return np.asarray(values * (average / values.mean()))

    return draw
