"""The options of `kvstore bench chat`, apart from what the command does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore_bench.chat.options_workload import COUNT, FILE, GENERATOR, POSITIVE, WORKLOAD, sizes
from kvstore_bench.chat.schedule import ORDERS
from kvstore_bench.console.sections import Command, Options, add, section

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def _numbers(ctx: Any, param: Any, value: str | None) -> list[float] | None:
    """Read 1,2,4, as the callback of an option."""
    if value is None:
        return None
    try:
        numbers = [float(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list like 1,2,4") from error
    if not all(0 < number < float("inf") for number in numbers):
        raise click.BadParameter("all must be above 0")
    if len(set(numbers)) < len(numbers):
        raise click.BadParameter("a value occurs twice")
    return numbers


def _whole_numbers(ctx: Any, param: Any, value: str | None) -> list[int] | None:
    numbers = _numbers(ctx, param, value)
    if numbers is None:
        return None
    if any(number != int(number) for number in numbers):
        raise click.BadParameter("all must be whole numbers")
    return [int(number) for number in numbers]


def _plot(ctx: Any, param: Any, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in PLOT_SUFFIXES:
        raise click.BadParameter(f"{value}: the suffix must be {', '.join(PLOT_SUFFIXES)}")
    return value


_server = section("Server")
_load = section("Load")
_request = section("Requests")
_points = section("Several runs in one")
_output = section("Results")

PLOT = _output("--plot", type=FILE, callback=_plot, metavar="FILE",
               help="Draw the results (png, svg, pdf).")  # fmt: skip

CHAT: Options = (
    _server("--url", default="http://127.0.0.1:8000", show_default=True,
            help="Address of the server."),
    _server("--model", help="Model to ask for.  [default: the only one served]"),
    _server("--endpoint", type=click.Choice(["chat", "completions"]), default="chat",
            show_default=True, help="`completions` sends the history as one text."),
    _server("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as bearer token."),
    _server("--kvstore-metrics", metavar="URL",
            help="Metrics page of a kvstore daemon: report how its counters change."),
    *WORKLOAD,
    _load("--concurrency", type=COUNT, metavar="C",
          help="Conversations in flight.  [default: 1; with a rate or recorded times, all]"),
    _load("--request-rate", type=POSITIVE, metavar="R",
          help="Open loop: R requests/s in total, whether or not the server keeps up."),
    _load("--client-rate", type=POSITIVE, metavar="R",
          help="Open loop as in vLLM's multi_turn: each of --concurrency clients holds one"
          " conversation at a time and sends R requests/s by its own arrival process."),
    _load("--arrivals", "--distribution", "arrivals",
          type=click.Choice(["poisson", "uniform", "constant"]),
          help="Distribution of the gaps between arrivals.  [default: poisson]"),
    _load("--order", type=click.Choice(ORDERS),
          help="round-robin: all first turns, then all second turns (a small KV space cannot keep a"
          " conversation between turns); barrier: the same, and each round ends before the next;"
          " sequential: one conversation after another; fifo, random: among those that are ready."
          "  [default: round-robin]"),
    _load("--only-turns", callback=sizes, metavar="LOW[:HIGH]",
          help="Ask only these turns, such as 2:3; starting after turn 1 needs --answers file."),
    _load("--warmup", type=click.IntRange(0), default=0, show_default=True, metavar="N",
          help="Unmeasured requests before the first one, of its length, sharing no prefix."),
    _load("--warmup-percent", type=click.FloatRange(0, 100, max_open=True), default=0.0,
          metavar="P", help="Exclude the first P % of the requests from the results."),
    _request("--answers", type=click.Choice(["live", "file"]),
             help="Answers in the history: those of the model, or the recorded ones. With recorded"
             " ones, every run sends the same prompts.  [default: live; file for traces]"),
    _request("--max-tokens", type=COUNT,
             help="Longest answer.  [default: that of the workload, or 32]"),
    _request("--min-tokens", type=click.IntRange(0), help="Shortest answer (vLLM)."),
    _request("--ignore-eos/--no-ignore-eos", default=None,
             help="Always generate --max-tokens (vLLM, SGLang).  [default: if the workload gives"
             " the length of answers]"),
    _request("--temperature", type=float, default=0.0, show_default=True,
             help="Sampling temperature."),
    _request("--extra-body", default="{}", metavar="JSON", help="Merged into every request."),
    _request("--hints", is_flag=True,
             help="Send hints to kvstore's connector in kv_transfer_params: the conversation, its"
             " next request if the workload gives the time, and its end."),
    _request("--request-timeout-s", type=POSITIVE, default=600.0, show_default=True,
             help="Longest wait for a whole answer."),
    _request("--allow-errors", is_flag=True,
             help="Continue after failed requests, and ignore them in the exit status."),
    _points("--sweep", callback=_whole_numbers, metavar="C,C,...",
            help="One run for each --concurrency, such as 1,2,4,8."),
    _points("--sweep-rate", callback=_numbers, metavar="R,R,...",
            help="One run for each --request-rate."),
    _points("--patterns", is_flag=True,
            help="The four query patterns: --input-lengths 256,8192 --output-lengths 16,256."),
    _points("--input-lengths", callback=_whole_numbers, metavar="N,N,...",
            help="One run for each length of the first question and each of ..."),
    _points("--output-lengths", callback=_whole_numbers, metavar="N,N,...",
            help="... these lengths of answers; drawn as heat maps."),
    _points("--same-prompts", is_flag=True,
            help="Send the same prompts in every run: later runs then hit blocks that earlier runs"
            " stored."),
    _output("--slo-ttft", type=POSITIVE, metavar="MS",
            help="Goodput counts requests with at most this TTFT ..."),
    _output("--slo-itl", type=POSITIVE, metavar="MS",
            help="... and at most this mean time per further token (TPOT)."),
    _output("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of a table."),
    _output("--output", type=FILE, metavar="FILE",
            help="Write the JSON to this file, too; `kvstore bench compare` reads it."),
    _output("--csv", type=FILE, metavar="FILE",
            help="Write one line per request, with the columns of LMCache's multi-round-qa first."),
    _output("--save-text", is_flag=True, help="Include the answers in the JSON."),
    _output("--save-conversations", type=FILE, metavar="FILE",
            help="Write the conversations in the format that --input reads."),
    PLOT,
    _output("--no-progress", is_flag=True, help="Hide the progress bar (it needs a terminal)."),
)  # fmt: skip


def generator_options(command: Command) -> Command:
    """Add the options of the synthetic generator; absent ones stay None."""
    return add(GENERATOR, command)


def chat_options(command: Command) -> Command:
    """Add the options of `chat`, those of the workload among them."""
    return add(CHAT, command)
