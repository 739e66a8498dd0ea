"""The options by which commands are told a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.plan import KV_DTYPES

F = TypeVar("F", bound=Callable[..., Any])


def ratio_options(command: F) -> F:
    """Add --ratio and --file-ratio."""
    ratio = click.option(
        "--ratio",
        type=click.FloatRange(1.0, 100.0),
        default=1.0,
        show_default=True,
        help="How many times smaller stored blocks are: 1.38 coded by L3 in 16 bits, exactly.",
    )
    file_ratio = click.option(
        "--file-ratio",
        type=click.FloatRange(1.0, 100.0),
        help="The same of the file tier; default: --ratio. Lossy blocks have 1.8 with fine parts,"
        " as dram keeps them, and 3.0 without, as files do.",
    )
    return ratio(file_ratio(command))


def model_options(command: F) -> F:
    """Add --model and --kv-dtype."""
    model = click.option(
        "--model",
        type=click.Path(exists=True, path_type=Path),
        metavar="PATH",
        help="A model's config.json, or its folder: gives the KV size and the cost of prefill.",
    )
    dtype = click.option(
        "--kv-dtype",
        type=click.Choice(["auto", *KV_DTYPES]),
        default="auto",
        show_default=True,
        help="Data type of the KV; auto takes it from config.json.",
    )
    return model(dtype(command))
