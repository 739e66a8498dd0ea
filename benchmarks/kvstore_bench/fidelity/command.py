"""`kvstore bench fidelity` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from kvstore_bench.chat.options import PLOT
from kvstore_bench.console import ratio_tables
from kvstore_bench.console.commands import JSON, measuring, show, steps


@click.command(short_help="Measure what lossy records change in what a model says.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="A checkpoint of transformers.",
)
@click.option(
    "--tokens", type=click.IntRange(64), default=2048, show_default=True, help="Of each prompt."
)
@click.option(
    "--follow",
    type=click.IntRange(8),
    default=256,
    show_default=True,
    help="Tokens behind each prompt, at which the model is judged.",
)
@click.option("--block-tokens", type=click.IntRange(8), default=16, show_default=True)
@JSON
@PLOT
def fidelity(*, model: Path, as_json: bool, plot: Path | None, **size: int) -> None:
    """Measure what each form of a record changes in what a model says, for how many bytes.

    Prose, code and chat: the model reads a prompt's KV after it was stored and loaded, and then
    the rest of the text. KL and agreement are against exact KV. Beside L3 and EP: fp8, int8 for
    each token, NVFP4, and TurboQuant at 4 bits.

    \b
    Examples:
      kvstore bench fidelity --model /models/gemma
      kvstore bench fidelity --model /models/gemma --json | jq .ep54.kl
      kvstore bench fidelity --model /models/gemma --plot fidelity.png
    """
    with measuring(as_json, "torch", "transformers", plot=plot):
        from kvstore_bench.fidelity.fidelity import FidelityPlan, run, steps_of
        from kvstore_bench.fidelity.picture import plot_fidelity

        with steps("fidelity", steps_of(), as_json) as say:
            result = run(model, FidelityPlan(**size), say)
        show(result, as_json, ratio_tables.print_fidelity)
        if plot:
            plot_fidelity(result, plot)
