"""The options of `kvstore bench`, apart from what the commands do with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvstore.errors import KVStoreError
from kvstore_bench.generator import Shape, SizeRange

Command = Callable[..., None]

DEFAULT = Shape()
FILE = click.Path(dir_okay=False, path_type=Path)


def _sizes(ctx: Any, param: Any, value: str | None) -> SizeRange | None:
    """Read LOW[:HIGH], as the callback of an option."""
    try:
        return None if value is None else SizeRange.parse(value)
    except KVStoreError as error:
        raise click.BadParameter(str(error)) from error


GENERATOR: tuple[Callable[[Command], Command], ...] = (
    click.option("--conversations", type=click.IntRange(1), metavar="N",
                 help=f"How many.  [default: {DEFAULT.conversations}, or all of the file]"),
    click.option("--turns", type=click.IntRange(1), metavar="T",
                 help=f"Turns of each.  [default: {DEFAULT.turns}, or all of the file]"),
    click.option("--first-tokens", callback=_sizes, metavar="LOW[:HIGH]",
                 help="Size of each first question, in words.  [default: 1000]"),
    click.option("--turn-tokens", callback=_sizes, metavar="LOW[:HIGH]",
                 help="Size of each further question.  [default: 64]"),
    click.option("--answer-tokens", callback=_sizes, metavar="LOW[:HIGH]",
                 help="Size of each recorded answer.  [default: 32]"),
    click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path),
                 help="Sizes are exact tokens of this local tokenizer (needs transformers)."),
    click.option("--seed", type=int, default=0, show_default=True,
                 help="Of the generated text and of random arrivals."),
)  # fmt: skip

CHAT: tuple[Callable[[Command], Command], ...] = (
    click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="Where the server is."
    ),
    click.option("--model", help="Model to ask for.  [default: the only one served]"),
    click.option(
        "--endpoint",
        type=click.Choice(["chat", "completions"]),
        default="chat",
        show_default=True,
        help="`completions` sends the history as one plain transcript.",
    ),
    click.option(
        "--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as bearer token."
    ),
    click.option("--input", "source", type=FILE, help="Conversation JSON (vLLM's format)."),
    *GENERATOR,
    click.option(
        "--answers",
        type=click.Choice(["live", "file"]),
        default="live",
        show_default=True,
        help="What goes into the history: the model's answers, or the recorded ones, so that"
        " the answers of one run do not change the prompts of the next.",
    ),
    click.option(
        "--order",
        type=click.Choice(["round-robin", "sequential"]),
        default="round-robin",
        show_default=True,
        help="All first turns, then all second ones (a small KV space"
        " cannot keep a conversation until it goes on); or one conversation after another.",
    ),
    click.option(
        "--only-turns",
        callback=_sizes,
        metavar="LOW[:HIGH]",
        help="Ask only these turns, such as 2:3; starting after turn 1 needs --answers file.",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1),
        metavar="C",
        help="Conversations in flight.  [default: 1; all with --request-rate]",
    ),
    click.option(
        "--request-rate",
        type=click.FloatRange(0, min_open=True),
        metavar="R",
        help="Send R requests/s on average, as a Poisson process, instead of one as soon as"
        " another is done.",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        default=32,
        show_default=True,
        help="Longest answer.",
    ),
    click.option("--min-tokens", type=click.IntRange(0), help="Shortest answer (vLLM)."),
    click.option("--ignore-eos", is_flag=True, help="Answer to --max-tokens always (vLLM)."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="Of sampling."),
    click.option("--extra-body", default="{}", metavar="JSON", help="Merged into every request."),
    click.option(
        "--warmup",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        metavar="N",
        help="Unmeasured requests before the first, as long as it, sharing no prefix.",
    ),
    click.option(
        "--request-timeout-s",
        type=click.FloatRange(0, min_open=True),
        default=600.0,
        show_default=True,
        help="Longest wait for a whole answer.",
    ),
    click.option(
        "--kvstore-metrics",
        metavar="URL",
        help="A kvstore daemon's Prometheus page: report what its counters did.",
    ),
    click.option(
        "--allow-errors",
        is_flag=True,
        help="Go on after failed requests, and do not let them set the exit status.",
    ),
    click.option(
        "--json", "as_json", is_flag=True, help="Print JSON on stdout instead of a table."
    ),
    click.option("--output", type=FILE, help="Write the JSON to this file, too."),
    click.option("--save-text", is_flag=True, help="Put the answers into the JSON."),
    click.option(
        "--save-conversations", type=FILE, help="Write what was said, as --input reads it."
    ),
    click.option(
        "--plot", type=FILE, help="Draw TTFT by turn and by prompt length (png, svg, pdf)."
    ),
    click.option(
        "--no-progress", is_flag=True, help="No progress bar (there is none without a tty)."
    ),
)


def generator_options(command: Command) -> Command:
    """Add the options of the synthetic generator; absent ones stay None."""
    return _add(GENERATOR, command)


def chat_options(command: Command) -> Command:
    """Add the options of `chat`, the generator's among them."""
    return _add(CHAT, command)


def _add(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    # The option applied last is listed first in --help.
    for option in reversed(options):
        command = option(command)
    return command
