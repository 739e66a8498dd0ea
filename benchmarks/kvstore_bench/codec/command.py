"""`kvstore bench codec` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from kvstore_bench.chat.options import PLOT
from kvstore_bench.console import ratio_tables
from kvstore_bench.console.commands import JSON, measuring, show


@click.command(short_help="Measure how records are coded, beside other codecs.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkpoint of transformers, which computes KV of three texts.",
)
@click.option(
    "--dump",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Read KV from this file; with --model, write it there.",
)
@click.option("--tokens", type=click.IntRange(64), default=2048, show_default=True)
@click.option("--block-tokens", type=click.IntRange(8), default=16, show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=9, show_default=True)
@JSON
@PLOT
def codec(
    *, model: Path | None, dump: Path | None, as_json: bool, plot: Path | None, **size: int
) -> None:
    """Measure bytes and speed of the forms of a record, on real KV, on one core.

    L3 is exact, EP is lossy. Beside them: a plain copy, and lz4, zstd, zipnn and blosc2 as far as
    they are installed. Sides alternate; figures are medians.

    \b
    Examples:
      kvstore bench codec --model /models/gemma --dump kv.npz
      kvstore bench codec --dump kv.npz --json | jq .l3
      kvstore bench codec --model /models/gemma --plot codecs.png
    """
    with measuring(as_json, *(("torch", "transformers") if model else ()), plot=plot):
        from kvstore_bench.codec import kv as real
        from kvstore_bench.codec.codec import CodecPlan, run
        from kvstore_bench.codec.picture import plot_codec

        def say(text: str) -> None:
            click.echo(text, err=True)

        plan = CodecPlan(**size)
        found = real.open_kv(model, dump, plan.tokens, say)
        result = run(found, plan, say)
        show(result, as_json, ratio_tables.print_codec)
        if plot:
            plot_codec(result, plot)
