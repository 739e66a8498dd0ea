"""Options that say what is asked. None has a default: which apply depends on the workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore.model.errors import KVStoreError
from kvstore_bench.chat.inputs import TOOLS
from kvstore_bench.chat.workloads.generator import Shape, SizeRange
from kvstore_bench.console.sections import Options, section

DEFAULT = Shape()
FILE = click.Path(dir_okay=False, path_type=Path)
COUNT = click.IntRange(1)
LENGTH = click.IntRange(0)
POSITIVE = click.FloatRange(0, min_open=True)


def sizes(ctx: Any, param: Any, value: str | None) -> SizeRange | None:
    """Read LOW[:HIGH], as the callback of an option."""
    try:
        return None if value is None else SizeRange.parse(value)
    except KVStoreError as error:
        raise click.BadParameter(str(error)) from error


_text = section("Generated text, and cuts of a file")
_trace = section("Traces (--input)")
_qa = section("LMCache's workload (--workload multi-round-qa); defaults are its long-input set")
_sglang = section("SGLang's workload (--workload bench-multiturn; also --request-rate, --arrivals)")
_both = section("Both of these workloads")
_source = section("Workload")

GENERATOR: Options = (
    _text("--conversations", type=COUNT, metavar="N",
          help=f"Number of conversations.  [default: {DEFAULT.conversations}, or all of the file]"),
    _text("--turns", type=COUNT, metavar="T",
          help=f"Turns per conversation.  [default: {DEFAULT.turns}, or all of the file]"),
    _text("--first-tokens", callback=sizes, metavar="LOW[:HIGH]",
          help="Size of each first question, in words.  [default: 1000]"),
    _text("--turn-tokens", callback=sizes, metavar="LOW[:HIGH]",
          help="Size of each further question.  [default: 64]"),
    _text("--answer-tokens", callback=sizes, metavar="LOW[:HIGH]",
          help="Size of each recorded answer.  [default: 32]"),
    _text("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path),
          help="Sizes are exact tokens of this local tokenizer (needs transformers)."),
    _text("--seed", type=int, default=0, show_default=True,
          help="Seed of all text, sizes and arrivals."),
)  # fmt: skip

WORKLOAD: Options = (
    _source("--input", "source", type=FILE, metavar="FILE",
            help="Conversation JSON or a generate_conversations configuration (both vLLM's), or a"
            " trace: Mooncake, Bailian, Weka, LMCache agent (JSON lines), Azure, BurstGPT (CSV);"
            " .gz too. The format is recognised.  [default: generate text]"),
    _source("--workload", type=click.Choice(TOOLS),
            help="Workload of another tool; its parameters are below."),
    *GENERATOR,
    _trace("--speed", type=POSITIVE, metavar="X",
           help="Replay X times as fast as recorded.  [default: 1]"),
    _trace("--start", type=click.FloatRange(0), metavar="S",
           help="Skip requests before second S of the trace."),
    _trace("--end", type=POSITIVE, metavar="S", help="Skip requests from second S of the trace."),
    _trace("--max-requests", type=COUNT, metavar="N", help="Replay the first N requests only."),
    _trace("--gap-cap", type=click.FloatRange(0), metavar="S",
           help="Shorten pauses inside a session to S recorded seconds."),
    _qa("--num-users", type=COUNT, help="Users at a time.  [default: 15]"),
    _qa("--qps", type=POSITIVE, help="Requests/s of all users.  [default: 0.1]"),
    _qa("--shared-system-prompt", type=LENGTH,
        help="Length of the system prompt that all users share.  [default: 1000]"),
    _qa("--user-history-prompt", type=LENGTH,
        help="Length of each user's own context.  [default: 20000]"),
    _qa("--answer-len", type=COUNT, help="Longest answer.  [default: 100]"),
    _qa("--time", type=POSITIVE, help="Seconds in which requests start.  [default: 100]"),
    _qa("--init-user-id", type=LENGTH,
        help="Offset of the user ids; other ids get other contexts.  [default: 0]"),
    _both("--num-rounds", type=COUNT, help="Rounds of each user or client.  [default: 20; 5]"),
    _sglang("--num-clients", type=COUNT, help="Number of clients.  [default: 256]"),
    _sglang("--max-parallel", type=COUNT, help="Requests in flight.  [default: 128]"),
    _sglang("--request-length", type=COUNT, help="Length of first questions.  [default: 512]"),
    _sglang("--output-length", type=COUNT, help="Exact length of answers.  [default: 64]"),
    _sglang("--sub-question-input-length", type=LENGTH,
            help="Length of further questions; 0 is --request-length.  [default: 0]"),
    _sglang("--min-rounds", type=LENGTH, help="Draw each client's rounds from here ..."),
    _sglang("--max-rounds", type=LENGTH, help="... to here.  [default: --num-rounds]"),
    _sglang("--ready-queue-policy", type=click.Choice(["random", "fifo"]),
            help="Which ready client is next.  [default: random]"),
    _sglang("--enable-round-barrier", is_flag=True, default=None,
            help="Start a round only when the previous one has ended."),
)  # fmt: skip
