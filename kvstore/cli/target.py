"""What the client commands share: which daemon, how to print, how to read ids."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import click

from kvstore.cli.kind import Kind
from kvstore.client import Client
from kvstore.client.target import default_target
from kvstore.model.block import KEY_NBYTES
from kvstore.settings import Settings, default_socket
from kvstore.transport.unix_sockets import target_of

F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = "kvstore.shown"


class Target(Kind[str]):
    """A daemon's address; a path means its unix socket."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        target = target_of(str(value))
        if not target.startswith("unix:") and not target.rpartition(":")[2].isdigit():
            self.fail(f"{value!r} is neither unix:/path/kvstore.sock nor host:port", param, ctx)
        return target


class Hash(Kind[bytes]):
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


class Text(Kind[str]):
    """Text that a daemon is sent: UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is no text in UTF-8: copy it as the daemon prints it", param, ctx)
        return text


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    ctx.meta.setdefault(_SHOWN, {})[parameter.name] = value


def shown() -> dict[str, Any]:
    """Return what the command that runs was told about its daemon, as arguments of `Client`."""
    ctx = click.get_current_context(silent=True)
    return dict(ctx.meta.get(_SHOWN, {})) if ctx is not None else {}


def daemon_uid() -> int | None:
    """Return what --daemon-uid says in the command that runs."""
    uid: int | None = shown().get("daemon_uid")
    return uid


def _file_option(name: str, words: str) -> Callable[[F], F]:
    variable = f"KVSTORE_{name[2:].replace('-', '_').upper()}"
    return click.option(
        name,
        type=click.Path(dir_okay=False),
        envvar=variable,
        expose_value=False,
        callback=_keep,
        help=f"{words} [env var: {variable}]",
    )


_SHOWN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--daemon-uid",
        type=click.IntRange(0),
        is_eager=True,  # before the target, which it helps to find
        expose_value=False,
        callback=_keep,
        metavar="UID",
        help="The user that runs the daemon, if it is neither you nor root.",
    ),
    _file_option("--token-file", "Over TLS: file with your token."),
    _file_option("--tls-ca", "Over TLS: PEM file of the authorities of its certificate."),
    _file_option("--tls-cert", "Over TLS: PEM file of your own certificate."),
    _file_option("--tls-key", "Over TLS: PEM file of its key."),
    click.option(
        "--server-name",
        envvar="KVSTORE_SERVER_NAME",
        default="",
        expose_value=False,
        callback=_keep,
        metavar="NAME",
        help="Over TLS: the name in its certificate, if not the target's. "
        "[env var: KVSTORE_SERVER_NAME]",
    ),
)


def shown_options(command: F) -> F:
    """Add what a client shows its daemon: --daemon-uid, --token-file, --tls-ca and so on."""
    for option in reversed(_SHOWN_OPTIONS):
        command = option(command)
    return command


def daemon_options(command: F) -> F:
    """Add --target, --json, and what is shown to the daemon."""
    target = click.option(
        "--target",
        type=Target(),
        default=lambda: default_target(daemon_uid()),
        show_default="$KVSTORE_TARGET, or the first default unix socket that exists",
        help="unix:/path/kvstore.sock, a path, or host:port.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return target(shown_options(as_json(command)))


def target_for(settings: Settings) -> str:
    """Return the daemon that these settings are for; if they leave that open, the usual one."""
    if settings.server.socket != default_socket():
        return f"unix:{settings.server.socket_path}"
    return default_target(daemon_uid())


def connect(target: str) -> Client:
    """Return a client that asks, but maps and leases nothing."""
    _hush()
    return Client(target, arena=False, name="cli", **shown())


@cache
def _hush() -> None:
    """Keep the client's log off stderr: a command says itself why it fails, once."""
    logging.getLogger("kvstore.client").addHandler(logging.NullHandler())
