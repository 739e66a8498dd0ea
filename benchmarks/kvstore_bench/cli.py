"""`kvstore bench`: the benchmarks on the command line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore_bench.generator import Shape, Vocabulary, generate, vocabulary_of
from kvstore_bench.options import chat_options, generator_options
from kvstore_bench.workload import Conversation, dump, load, save

if TYPE_CHECKING:
    from kvstore_bench.runner import ChatOptions, Result
    from kvstore_bench.sample import Sample

EXIT_FAILED_REQUESTS = 1
EXIT_IMPOSSIBLE = 2
PIPED_COLUMNS = 120
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
EXTRA = ("aiohttp", "rich", "matplotlib")


class Impossible(click.ClickException):
    """The run could not be made; shown as one line."""

    exit_code = EXIT_IMPOSSIBLE


@click.group()
def bench() -> None:
    """Measure what a KV cache gains: multi-turn chat against any OpenAI-compatible server."""


@bench.command("make-conversations")
@click.argument("output", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@generator_options
def make_conversations(output: Path, **shape: Any) -> None:
    """Write what the generator makes to OUTPUT (`-` is stdout), as vLLM conversation JSON.

    The same options give the same bytes on every machine.

    \b
    Example:
      kvstore bench make-conversations chats.json --conversations 20 --turns 5 --seed 7
    """
    with _explained():
        conversations = _workload(None, shape)
        if str(output) == "-":
            click.echo(dump(conversations), nl=False)
            return
        save(output, conversations)
    click.echo(f"{output}: {len(conversations)} conversations", err=True)


@bench.command()
@chat_options
def chat(**given: Any) -> None:
    """Hold multi-turn conversations with a server and measure each request.

    Reports TTFT, ITL, TPOT and latency, first turns and resumed ones apart, throughput, errors,
    and where the prompt tokens came from by the server's own counters. Conversations come from
    --input, or are made from a seed.

    \b
    Examples:
      # 20 conversations of 5 turns, each starting with about 2000 to 3000 tokens
      kvstore bench chat --conversations 20 --turns 5 --first-tokens 2000:3000
    \b
      # the same prompts in every run, so that runs can be compared
      kvstore bench make-conversations chats.json --conversations 20
      kvstore bench chat --input chats.json --answers file --json > cold.json
    \b
      # a loaded server: 2 requests/s, with a picture
      kvstore bench chat --request-rate 2 --plot ttft.png

    Exit status: 0 if every request completed (or with --allow-errors), 1 if one failed, 2 if
    nothing could be run.
    """
    with _explained():
        from kvstore_bench.runner import run_chat

        _check_targets(given)
        shape = {name: given[name] for name in GENERATOR_NAMES}
        conversations = _workload(given["source"], shape)
        options = _chat_options(given)
        quiet = given["as_json"] or given["no_progress"] or not sys.stderr.isatty()
        with _progress(_requests(conversations, options), quiet=quiet) as on_sample:
            result = asyncio.run(run_chat(options, conversations, on_sample=on_sample))
        _write(result, given)
    if not given["allow_errors"] and any(sample.failure for sample in result.requests):
        raise SystemExit(EXIT_FAILED_REQUESTS)


GENERATOR_NAMES = (
    "conversations",
    "turns",
    "first_tokens",
    "turn_tokens",
    "answer_tokens",
    "tokenizer",
    "seed",
)


def _check_targets(given: dict[str, Any]) -> None:
    """Find out before a long run, not after it, that its results cannot be written."""
    for name in ("output", "save_conversations", "plot"):
        target = given[name]
        if target and not target.absolute().parent.is_dir():
            raise InvalidRequest(f"{target}: there is no directory {target.parent}")
    if given["plot"]:
        import matplotlib.figure  # noqa: F401

        if given["plot"].suffix not in PLOT_SUFFIXES:
            raise InvalidRequest(f"{given['plot']}: the suffix must be {', '.join(PLOT_SUFFIXES)}")


def _workload(source: Path | None, shape: dict[str, Any]) -> list[Conversation]:
    """Read the file, cut to --conversations and --turns, or generate."""
    if source is None:
        tokenizer = shape.pop("tokenizer")
        vocabulary = vocabulary_of(tokenizer) if tokenizer else Vocabulary()
        given = {name: value for name, value in shape.items() if value is not None}
        return generate(Shape(**given), vocabulary)
    for name in ("first_tokens", "turn_tokens", "answer_tokens", "tokenizer"):
        if shape[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is for generated text, not --input")
    conversations = load(source)[: shape["conversations"]]
    turns = shape["turns"]
    return [item.first_turns(turns) for item in conversations] if turns else conversations


def _chat_options(given: dict[str, Any]) -> ChatOptions:
    from kvstore_bench.runner import ChatOptions

    try:
        body = msgspec.json.decode(given["extra_body"], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(str(error), param_hint="--extra-body") from error
    only = given["only_turns"]
    same = (
        "url", "model", "endpoint", "api_key", "answers", "order", "concurrency", "request_rate",
        "max_tokens", "min_tokens", "ignore_eos", "temperature", "warmup", "request_timeout_s",
        "kvstore_metrics", "seed",
    )  # fmt: skip
    return ChatOptions(
        **{name: given[name] for name in same},
        turns=(only.low, only.high) if only else None,
        body=body,
        keep_going=given["allow_errors"],
    )


def _requests(conversations: Sequence[Conversation], options: ChatOptions) -> int:
    first, last = options.turns or (1, sys.maxsize)
    return sum(max(0, min(last, item.turns) - first + 1) for item in conversations)


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[Sample], None]]:
    if quiet:
        yield lambda sample: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total, last="")

        def advance(sample: Sample) -> None:
            last = f"turn {sample.turn}"
            if sample.failure is not None:
                last += f": {sample.failure.kind}"
            elif sample.ttft_s is not None:
                last += f": TTFT {1e3 * sample.ttft_s:,.0f} ms"
            progress.update(task, advance=1, last=last)

        yield advance


def _write(result: Result, given: dict[str, Any]) -> None:
    """Show the result and write the files that were asked for."""
    report = result.report(save_text=given["save_text"])
    data = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    if given["as_json"]:
        click.echo(data, nl=False)
    else:
        from rich.console import Console

        from kvstore_bench.table import print_report

        # Without a terminal rich assumes 80 columns, too few for the table.
        print_report(report, Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS))
    if given["output"]:
        given["output"].write_bytes(data)
    if given["save_conversations"]:
        save(given["save_conversations"], result.conversations)
    if given["plot"]:
        _plot(result, given["plot"])


def _plot(result: Result, target: Path) -> None:
    from kvstore_bench.plot import plot_ttft

    if all(sample.failure for sample in result.requests):
        click.echo(f"{target}: not drawn, no request completed", err=True)
        return
    options = result.options
    rate = options.request_rate
    load = f"{rate:g} requests/s" if rate else f"{options.concurrency or 1} in flight"
    title = f"{result.model}: {len(result.requests)} requests, {options.order}, {load}"
    plot_ttft({"": result.requests}, target, title=title)


@bench.command()
@click.option("--records", type=click.IntRange(2), default=64, show_default=True)
@click.option("--record-mib", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(5), default=30, show_default=True)
@click.option(
    "--resident-blocks",
    type=click.IntRange(0),
    default=0,
    help="Also time matches with so many small blocks stored (4 KiB each) and a busy writer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def store(
    *, records: int, record_mib: int, rounds: int, resident_blocks: int, as_json: bool
) -> None:
    """Measure the local path of a daemon of our own: put, get and match.

    Put and get are compared with a plain copy of the same bytes, a match of 1000 keys with an RPC
    of the same size that does nothing; both sides alternate in one run.

    \b
    Examples:
      kvstore bench store
      kvstore bench store --resident-blocks 1000000 --json
    """
    with _explained():
        from kvstore_bench.store import StorePlan, run
        from kvstore_bench.store_table import print_store

        plan = StorePlan(records, record_mib << 20, rounds, resident_blocks=resident_blocks)
        result = run(plan, lambda text: click.echo(text, err=True))
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(result), indent=1))
        else:
            print_store(result)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what made a run impossible into one line and EXIT_IMPOSSIBLE."""
    try:
        yield
    except KVStoreError as error:
        raise Impossible(str(error)) from error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise Impossible(f"{place}{error.strerror or error}") from error
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        extra = "pip install 'kvstore-tiers[bench]'"
        raise Impossible(f"{error.name} is not installed: {extra}") from error
