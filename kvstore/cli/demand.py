"""The options that say which traffic to make up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

import click

from kvstore.replay.draws import Draws, parse_draws
from kvstore.replay.synth import KINDS, Demand, with_rate

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = {
    "turns": "Turns per visit.",
    "gap-s": "Seconds from a request to the next of its session.",
    "first-tokens": "Tokens of the first message, after the shared prefix.",
    "turn-tokens": "Tokens of every later message.",
    "answer-tokens": "Tokens of an answer, which the next prompt repeats.",
    "prefix-tokens": "Tokens of each shared prefix: system prompt and tools.",
    "return-gap-s": "Seconds until a session returns for another visit.",
}
_NUMBERS: dict[str, tuple[click.ParamType[Any], str]] = {
    "prefixes": (click.INT, "Number of shared prefixes."),
    "prefix-exponent": (click.FLOAT, "Zipf exponent of their popularity; 0: all equally popular."),
    "return-probability": (click.FLOAT, "Probability that a session returns after a visit."),
    "subagent-probability": (click.FLOAT, "Probability that a turn starts a session of its own."),
    "context-tokens-max": (click.INT, "A session ends before its prompt exceeds this."),
}


def demand_options(command: F) -> F:
    """Add --kind and what changes it; `demand_of` takes them."""
    return traffic_options(command, KINDS)


def traffic_options(command: F, kinds: Iterable[str]) -> F:
    """Add --kind with these choices, and what changes it."""
    kinds = sorted(kinds)
    for name, text in reversed(_WORDS.items()):
        command = click.option(f"--{name}", metavar="DRAWS", help=text)(command)
    for name, (kind, text) in reversed(_NUMBERS.items()):
        command = click.option(f"--{name}", type=kind, help=text)(command)
    rate = click.option("--rate", type=click.FloatRange(1e-6), help="Mean requests per second.")
    kind_ = click.option(
        "--kind",
        type=click.Choice(kinds),
        metavar="KIND",
        default="chat",
        show_default=True,
        help="Kind of traffic; it sets the defaults of the options below. One of "
        + ", ".join(kinds)
        + ".",
    )
    return kind_(rate(command))


def demand_of(kind: str, rate: float | None, options: dict[str, Any]) -> Demand:
    """Return the traffic that options ask for. Raises InvalidRequest."""
    given = {name: value for name, value in options.items() if value is not None}
    changes: dict[str, Draws | float] = {
        name: parse_draws(value) if isinstance(value, str) else value
        for name, value in given.items()
    }
    demand = replace(KINDS[kind], **changes)  # type: ignore[arg-type]
    return demand if rate is None else with_rate(demand, rate)


DEMAND_FIELDS = frozenset(each.name for each in fields(Demand)) - {
    "sessions_per_s",
    "requests_per_s",
}
