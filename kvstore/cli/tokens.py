"""Token ids on the command line, and the block that `kvstore put` stored under them."""

from __future__ import annotations

from typing import Any

import click

from kvstore.cli.kind import Kind

TOKENS_MAX = 65536  # of one block


class Tokens(Kind[tuple[int, ...]]):
    """Token ids with commas: 1,15043,3186."""

    name = "ids"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "1,2,3,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(each) for each in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} are no token ids: write 1,15043,3186", param, ctx)
        if len(found) > TOKENS_MAX or not all(0 <= token < 1 << 32 for token in found):
            self.fail(f"a block has 1 to {TOKENS_MAX} tokens, each in 0..2**32-1", param, ctx)
        return found
