"""The stages of a request, made of the marks between its sending and its first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

STAGES = {
    "request": ("sent", "asked", "HTTP, and the way to the engine's scheduler"),
    "lookup": ("asked", "offered", "until the scheduler takes the answer"),
    "order": ("offered", "ordered", "device blocks, and the way to the worker"),
    "load": ("ordered", "loaded", "bytes come, are verified and copied, and a step notices"),
    "schedule": ("loaded", "computing", "until the step begins that computes the rest"),
    "compute": ("computing", "computed", "the model"),
    "answer": ("computed", "first_token", "sampling, and the way back"),
}
"""By name: the marks it lies between, and what happens there."""
OWN = {
    "schedule": ("asked", "computing", ""),
}
"""The same where the engine holds the prefix itself."""

Marks = Sequence[tuple[str, float]]


def stages_of(marks: Marks, sent_s: float, first_token_s: float) -> dict[str, float]:
    """Return the milliseconds of each stage of the request between two moments.

    Of a mark that comes several times the first one counts. Without a load, the stages of one are
    missing, and `schedule` begins with the request.
    """
    at: dict[str, float] = {"sent": sent_s, "first_token": first_token_s}
    for name, when in marks:
        if sent_s <= when <= first_token_s:
            at.setdefault(name, when)
    stages = STAGES if "loaded" in at else STAGES | OWN
    skipped = () if "loaded" in at else ("lookup", "order", "load")
    return {
        name: 1e3 * (at[end] - at[begin])
        for name, (begin, end, _) in stages.items()
        if name not in skipped and begin in at and end in at
    }


def medians(requests: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each stage that all requests have."""
    return {
        name: median(each[name] for each in requests)
        for name in STAGES
        if requests and all(name in each for each in requests)
    }


def read_marks(text: str) -> list[tuple[str, float]]:
    """Read what the connector wrote; a line that is not whole yet is left out."""
    lines = (line.split(" ") for line in text.splitlines())
    return [(line[0], float(line[1])) for line in lines if len(line) == 2]
