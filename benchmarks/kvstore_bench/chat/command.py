"""`kvstore bench chat`: one run, or several that belong together."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvstore.model.errors import InvalidRequest, KVStoreError
from kvstore_bench.chat.options import chat_options
from kvstore_bench.console.exits import (
    EXIT_FAILED_REQUESTS,
    EXIT_INTERRUPTED,
    check_targets,
    explained,
    need,
    needs,
)
from kvstore_bench.console.progress import progress
from kvstore_bench.console.sections import SectionedCommand

if TYPE_CHECKING:
    from kvstore_bench.chat.load import ChatOptions
    from kvstore_bench.chat.points import Point
    from kvstore_bench.chat.reports.result import Result
    from kvstore_bench.chat.sample import Sample

PATTERN_INPUTS = (256, 8192)
PATTERN_OUTPUTS = (16, 256)


@click.command(cls=SectionedCommand, short_help="Chat with a server, and time its answers.")
@chat_options
def chat(**given: Any) -> None:
    """Hold multi-turn conversations with a server and measure each request.

    It reports TTFT, ITL, TPOT and latency, separately for first and resumed turns, throughput,
    goodput, errors, and the source of prompt tokens by the server's own counters. Ctrl-C ends the
    run and reports the requests measured so far.

    \b
    Examples:
      # 20 conversations of 5 turns, each starting with about 2000 to 3000 tokens
      kvstore bench chat --conversations 20 --turns 5 --first-tokens 2000:3000
    \b
      # the same prompts in every run, so that runs can be compared
      kvstore bench make-conversations chats.json --conversations 20
      kvstore bench chat --input chats.json --answers file --output cold.json
      kvstore bench chat --input chats.json --answers file --output warm.json
      kvstore bench compare cold.json warm.json
    \b
      # a loaded server: 2 requests/s, goodput, a picture and one line per request
      kvstore bench chat --request-rate 2 --slo-ttft 500 --slo-itl 50 --plot run.png --csv run.csv
    \b
      # one run for each concurrency; the four query patterns; a heat map
      kvstore bench chat --sweep 1,2,4,8 --plot sweep.png
      kvstore bench chat --patterns --turns 1 --plot patterns.png
      kvstore bench chat --input-lengths 512,2048,8192 --output-lengths 16,64 --plot heat.png
    \b
      # a recorded trace, ten times as fast; prompts share prefixes where the trace says so
      kvstore bench chat --input mooncake.jsonl.gz --speed 10 --max-requests 500
    \b
      # the same with hints: which sessions end, and when the others ask again
      kvstore bench chat --input mooncake.jsonl.gz --speed 10 --max-requests 500 --hints
    \b
      # the workloads of other tools, by their own parameters
      kvstore bench chat --input generate_multi_turn.json --concurrency 2        # vLLM
      kvstore bench chat --workload multi-round-qa --num-users 15 --num-rounds 20 --qps 0.5
      kvstore bench chat --workload bench-multiturn --num-clients 16 --request-rate 4

    Exit status: 0 if every request completed (or with --allow-errors), 1 if a request or a run of a
    series failed, 2 if nothing could be run, 130 if interrupted.
    """
    with explained():
        need("uvloop", *needs(as_json=given["as_json"], plot=given["plot"]))
        check_targets(*(given[name] for name in ("output", "csv", "save_conversations", "plot")))
        points = _points(given)
        results = _run(points, given)
        _write(points, results, given)
    if any(result.interrupted for result in results.values()):
        raise SystemExit(EXIT_INTERRUPTED)
    requests = (sample for result in results.values() for sample in result.requests)
    failed = any(sample.failure for sample in requests) and not given["allow_errors"]
    if failed or len(results) < len(points):
        raise SystemExit(EXIT_FAILED_REQUESTS)


def _points(given: dict[str, Any]) -> list[Point]:
    """Return what is to be run: one point without axes, a sweep, or a grid."""
    from kvstore_bench.chat import points
    from kvstore_bench.chat.inputs import workload_of

    kinds = {
        "--sweep": given["sweep"],
        "--sweep-rate": given["sweep_rate"],
        "--patterns": given["patterns"],
        "--input-lengths with --output-lengths": given["input_lengths"] or given["output_lengths"],
    }
    asked = [name for name, value in kinds.items() if value]
    if len(asked) > 1:
        raise click.UsageError(f"{' and '.join(asked)} are different series of runs: give one")
    make = partial(workload_of, given)
    if not asked:
        workload = make()
        return [points.Point("", {}, _options(given, workload.prescribed), workload)]

    def tagged(tag: str, first_tokens: int | None = None) -> Any:
        return make(tag=None if given["same_prompts"] else tag, first_tokens=first_tokens)

    options = _options(given, make().prescribed)
    if given["sweep"]:
        return points.sweep(options, "concurrency", given["sweep"], tagged)
    if given["sweep_rate"]:
        return points.sweep(options, "request_rate", given["sweep_rate"], tagged)
    inputs = given["input_lengths"] or (PATTERN_INPUTS if given["patterns"] else ())
    outputs = given["output_lengths"] or (PATTERN_OUTPUTS if given["patterns"] else ())
    if not inputs or not outputs:
        raise click.UsageError("a grid needs both --input-lengths and --output-lengths")
    return points.grid(options, inputs, outputs, tagged)


def _options(given: dict[str, Any], prescribed: Mapping[str, Any]) -> ChatOptions:
    """Build the options: what was asked for wins over what the workload prescribes."""
    from kvstore_bench.chat.load import ChatOptions

    try:
        body = msgspec.json.decode(given["extra_body"], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(str(error), param_hint="--extra-body") from error
    same = (
        "url", "model", "endpoint", "api_key", "answers", "order", "concurrency", "request_rate",
        "client_rate", "arrivals", "max_tokens", "min_tokens", "ignore_eos", "temperature",
        "warmup", "warmup_percent", "request_timeout_s", "kvstore_metrics", "seed", "hints",
    )  # fmt: skip
    only, slo_ttft, slo_itl = given["only_turns"], given["slo_ttft"], given["slo_itl"]
    asked = {name: given[name] for name in same if given[name] is not None}
    return replace(
        ChatOptions(**{**prescribed, **asked}),
        turns=(only.low, only.high) if only else None,
        body=body,
        slo_ttft_s=slo_ttft and slo_ttft / 1e3,
        slo_itl_s=slo_itl and slo_itl / 1e3,
        keep_going=given["allow_errors"],
    )


def _run(points: Sequence[Point], given: dict[str, Any]) -> dict[str, Result]:
    """Run the points one after the other, up to one that is interrupted or cannot be run.

    Raises what made the first one impossible; after it there are results to keep.
    """
    import uvloop  # half the work per event of asyncio's own loop, so times are taken sooner

    quiet = given["as_json"] or given["no_progress"] or not sys.stderr.isatty()
    results: dict[str, Result] = {}
    with progress("requests", sum(map(_requests, points)), quiet=quiet) as say:

        def on_sample(point: str, sample: Sample) -> None:
            say(_label(point, sample))

        for point in points:
            try:
                result = uvloop.run(_run_point(point, partial(on_sample, point.name)))
            except KVStoreError as error:
                if not results:
                    raise
                click.echo(f"{point.name}: {error}", err=True)
                break
            results[point.name] = result
            if result.interrupted:
                break
    return results


async def _run_point(point: Point, on_sample: Callable[[Sample], None]) -> Result:
    from kvstore_bench.chat.runner import run_chat

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def interrupt() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)  # a second one ends the process

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        return await run_chat(point.options, point.workload, on_sample=on_sample, stop=stop)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _requests(point: Point) -> int:
    dialogues = point.workload.dialogues
    first, last = point.options.span(dialogues)
    return sum(max(0, min(last, one.turns) - first + 1) for one in dialogues)


def _label(point: str, sample: Sample) -> str:
    """Say in a few words how a request ended."""
    text = f"{point} turn {sample.turn}".lstrip()
    if sample.failure is not None:
        return f"{text}: {sample.failure.label}"
    return text if sample.ttft_s is None else f"{text}: TTFT {1e3 * sample.ttft_s:,.0f} ms"


def _write(points: Sequence[Point], results: Mapping[str, Result], given: dict[str, Any]) -> None:
    """Show the results and write the files that were asked for."""
    from kvstore_bench.chat.reports import requests_csv, show

    reports = {
        name: result.report(save_text=given["save_text"]) for name, result in results.items()
    }
    document = show.document(points, reports)
    data = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    if given["as_json"]:
        click.echo(data, nl=False)
    else:
        show.print_document(document)
    if given["output"]:
        given["output"].write_bytes(data)
    if given["csv"]:
        requests_csv.write(given["csv"], dict(results))
    if given["save_conversations"]:
        _save(results, given)
    if given["plot"]:
        show.plot(points, results, document, given["plot"])


def _save(results: Mapping[str, Result], given: dict[str, Any]) -> None:
    from kvstore_bench.chat.workloads.workload import Conversation, save

    spoken = [one for result in results.values() for one in result.conversations]
    conversations = [one for one in spoken if isinstance(one, Conversation)]
    if len(conversations) < len(spoken) or len(results) > 1:
        raise InvalidRequest("--save-conversations is for one run of conversations")
    save(given["save_conversations"], conversations)
