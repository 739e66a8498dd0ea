"""What an argument is, for click: with its type, on every click that the package admits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    Kind = click.ParamType
else:
    # click's types take a parameter since 8.4. Engines' environments often hold an older click.
    class Kind(click.ParamType):
        def __class_getitem__(cls, item: Any) -> type[click.ParamType]:
            return cls


def check_finite(options: Mapping[str, Any]) -> None:
    """Raise UsageError for nan and infinity, which click's ranges let through."""
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise click.UsageError(f"--{name.replace('_', '-')} {value}: say a finite number")
