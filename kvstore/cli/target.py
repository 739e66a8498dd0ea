"""What the client commands share: which daemon, how to print, how to read ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstore.block import KEY_NBYTES
from kvstore.client import Client
from kvstore.config import default_socket

F = TypeVar("F", bound=Callable[..., Any])


# click's types take a parameter since 8.4. Engines' environments often hold an older click.
if TYPE_CHECKING:
    _Text = click.ParamType[str]
    _Bytes = click.ParamType[bytes]
else:
    _Text = _Bytes = click.ParamType


class Target(_Text):
    """A daemon's address; a bare path means its unix socket."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text.startswith("/"):
            return f"unix:{text}"
        if not text.startswith("unix:") and not text.rpartition(":")[2].isdigit():
            self.fail(f"{text!r} is neither unix:/path/kvstore.sock nor host:port", param, ctx)
        return text


class Hash(_Bytes):
    """32 bytes in hex: a block key or a namespace id, as `kvstore scan` prints them."""

    name = "hex"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> bytes:
        try:
            found = bytes.fromhex(str(value))
        except ValueError:
            found = b""
        if len(found) != KEY_NBYTES:
            self.fail(f"{value!r} is not 64 hex digits: copy it from `kvstore scan`", param, ctx)
        return found


def daemon_options(command: F) -> F:
    """Add --target and --json."""
    target = click.option(
        "--target",
        type=Target(),
        default=lambda: f"unix:{default_socket()}",
        show_default="the default unix socket",
        help="unix:/path/kvstore.sock or host:port.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return target(as_json(command))


def connect(target: str) -> Client:
    """Return a client that asks, but maps and leases nothing."""
    return Client(target, arena=False, name="cli")
