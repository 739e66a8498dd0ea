"""What an argument is, for click: with its type, on every click that the package admits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    Kind = click.ParamType
else:
    # click's types take a parameter since 8.4. Engines' environments often hold an older click.
    class Kind(click.ParamType):
        def __class_getitem__(cls, item: Any) -> type[click.ParamType]:
            return cls
