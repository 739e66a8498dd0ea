"""Random sizes and times, as words say them: `lognormal:30,1.2`.

| words | mean |
|---|---|
| constant:V | V |
| uniform:LOW,HIGH | (LOW + HIGH) / 2 |
| exponential:MEAN | MEAN |
| geometric:MEAN | MEAN, from 1 on |
| lognormal:MEDIAN,SIGMA | MEDIAN x exp(SIGMA^2 / 2) |

Draws come from `random.Random`: a seed gives the same ones in every release of Python so far.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstore.model.errors import InvalidRequest

_Draw = Callable[[random.Random], float]


@dataclass(frozen=True)
class Draws:
    """A distribution of numbers >= 0. mean: of what is drawn."""

    words: str
    mean: float
    draw: _Draw

    def whole(self, source: random.Random) -> int:
        """Draw a number and round it."""
        return round(self.draw(source))


def parse_draws(words: str) -> Draws:
    """Return the distribution that words name. Raises InvalidRequest."""
    name, _, rest = words.strip().partition(":")
    try:
        values = [float(each) for each in rest.split(",")]
    except ValueError:
        values = []
    make = _MAKE.get(name)
    if make is None or not all(0 <= each < math.inf for each in values):
        raise InvalidRequest(f"{words!r} is no distribution: write one of {_KNOWN}")
    count, distribution = make
    if len(values) != count:
        raise InvalidRequest(f"{words!r}: {name} takes {count} numbers: write one of {_KNOWN}")
    mean, draw = distribution(*values)
    return Draws(words.strip(), mean, draw)


def _constant(value: float) -> tuple[float, _Draw]:
    return value, lambda source: value


def _uniform(low: float, high: float) -> tuple[float, _Draw]:
    if low > high:
        raise InvalidRequest(f"uniform:{low:g},{high:g}: the lower number first")
    return (low + high) / 2, lambda source: source.uniform(low, high)


def _exponential(mean: float) -> tuple[float, _Draw]:
    return mean, lambda source: source.expovariate(1 / mean) if mean else 0.0


def _geometric(mean: float) -> tuple[float, _Draw]:
    if mean < 1:
        raise InvalidRequest(f"geometric:{mean:g}: the mean is at least 1")
    if mean == 1:
        return _constant(1.0)
    scale = 1 / math.log1p(-1 / mean)
    return mean, lambda source: 1.0 + int(math.log(1.0 - source.random()) * scale)


def _lognormal(median: float, sigma: float) -> tuple[float, _Draw]:
    if not median or sigma > 5:
        raise InvalidRequest(f"lognormal:{median:g},{sigma:g}: MEDIAN > 0, SIGMA up to 5")
    mu = math.log(median)
    return median * math.exp(sigma**2 / 2), lambda source: source.lognormvariate(mu, sigma)


_MAKE: Mapping[str, tuple[int, Callable[..., tuple[float, _Draw]]]] = {
    "constant": (1, _constant),
    "uniform": (2, _uniform),
    "exponential": (1, _exponential),
    "geometric": (1, _geometric),
    "lognormal": (2, _lognormal),
}
_KNOWN = "constant:V uniform:LOW,HIGH exponential:MEAN geometric:MEAN lognormal:MEDIAN,SIGMA"


def zipf(count: int, exponent: float) -> Callable[[random.Random], int]:
    """Return what draws 0 to count - 1, number k with a probability as 1 / (k + 1)^exponent."""
    weights, total = [], 0.0
    for rank in range(1, count + 1):
        total += rank**-exponent
        weights.append(total)
    numbers = range(count)
    return lambda source: source.choices(numbers, cum_weights=weights)[0]
