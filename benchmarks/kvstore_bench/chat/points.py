"""Runs that belong together: a sweep over load, or a grid over input and output length.

Every point has prompts of its own (`opened`): the text a point has left in the server's cache would
otherwise be a hit in the next one, and the order of the points would be what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.load import ChatOptions
from kvstore_bench.chat.workloads.workload import Conversation, Workload

POINTS_MAX = 256


@dataclass(frozen=True, slots=True)
class Point:
    """One run. axes: what sets it apart, such as {"concurrency": 4}."""

    name: str
    axes: Mapping[str, Any]
    options: ChatOptions
    workload: Workload


def sweep(
    options: ChatOptions,
    field: Literal["concurrency", "request_rate"],
    values: Sequence[float],
    make: Callable[[str], Workload],
) -> list[Point]:
    """Vary the load. make: returns the workload for a point's tag."""
    _check(len(values))
    points = []
    for number, value in enumerate(values):
        name = f"{field}={value:g}"
        changed = (
            replace(options, concurrency=int(value))
            if field == "concurrency"
            else replace(options, request_rate=value)
        )
        points.append(Point(name, {field: value}, changed, make(f"Point {number + 1}:")))
    return points


def grid(
    options: ChatOptions,
    inputs: Sequence[int],
    outputs: Sequence[int],
    make: Callable[[str, int], Workload],
) -> list[Point]:
    """Vary input and output length; a 2 x 2 grid is the four query patterns.

    make: returns the workload for a point's tag and its input length. Answers are exactly as long
    as asked for (ignore_eos).
    """
    _check(len(inputs) * len(outputs))
    points = []
    for number, (input_tokens, output_tokens) in enumerate(product(inputs, outputs)):
        axes = {"input_tokens": input_tokens, "output_tokens": output_tokens}
        changed = replace(options, max_tokens=output_tokens, ignore_eos=True)
        name = _cell_name(inputs, outputs, input_tokens, output_tokens)
        workload = make(f"Point {number + 1}:", input_tokens)
        points.append(Point(name, axes, changed, workload))
    return points


def opened(workload: Workload, text: str) -> Workload:
    """Put `text` before the first message of every conversation, so that no prefix is shared.

    What conversations of one workload share, they still share.
    """
    dialogues = [
        one.opened_by(text) if isinstance(one, Conversation) else one for one in workload.dialogues
    ]
    return replace(workload, dialogues=dialogues)


def _cell_name(inputs: Sequence[int], outputs: Sequence[int], input_: int, output: int) -> str:
    if len(inputs) == 2 == len(outputs):
        sizes = ["long" if input_ == max(inputs) else "short"]
        sizes.append("long" if output == max(outputs) else "short")
        return f"{sizes[0]}_input_{sizes[1]}_output"
    return f"input={input_} output={output}"


def _check(count: int) -> None:
    if not 1 <= count <= POINTS_MAX:
        raise InvalidRequest(f"a sweep has 1 to {POINTS_MAX} points, not {count}")
