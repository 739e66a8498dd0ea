"""`kvstore serve`: one daemon in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from kvstore.model.errors import ConfigError
from kvstore.settings import LOG_FORMATS, LOG_LEVELS, Settings, load_settings
from kvstore.system import logs

logger = logging.getLogger(__name__)


@click.command()
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file; settings it omits keep their defaults.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; repeatable."
)
@click.option(
    "--print-config", is_flag=True, help="Print all settings with their descriptions, and exit."
)
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), help="Short for --set server.log_level=..."
)
@click.option(
    "--log-format", type=click.Choice(LOG_FORMATS), help="Short for --set server.log_format=..."
)
@click.pass_context
def serve(
    ctx: click.Context,
    *,
    config: Path | None,
    overrides: tuple[str, ...],
    print_config: bool,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Run a daemon until SIGTERM or Ctrl-C.

    Both drain the daemon: running calls end, unwritten blocks are written, then it stops. On SIGHUP
    it reads its --config file again and applies the live settings at once (see `kvstore config`).
    The log goes to stderr; the address of the page, with its token, to stdout.

    \b
    Examples:
      kvstore serve --set dram.capacity=16GiB --set file.path=/var/lib/kvstore
      kvstore serve --print-config > kvstore.toml
      kvstore serve --config kvstore.toml --log-format json
    """
    overrides = (*overrides, *_short_options(log_level=log_level, log_format=log_format))
    settings = load_settings(config, overrides)
    if print_config:
        click.echo(settings.to_toml(), nl=False)
        return
    logs.configure(settings.server.log_level, settings.server.log_format)
    try:
        asyncio.run(_run(settings, config, overrides))
    except ConfigError as error:
        if settings.server.log_format != "json":
            raise
        logger.error("node=refused reason=%r", str(error))  # one object a line, also now
        ctx.exit(2)


def _short_options(**given: str | None) -> Sequence[str]:
    return [f"server.{key}={value}" for key, value in given.items() if value is not None]


async def _run(settings: Settings, path: Path | None, overrides: Sequence[str]) -> None:
    # Before gRPC is imported: peers that fail to shake hands would write lines of its own, not of
    # our format, into the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kvstore import daemon

    def started(node: daemon.Node) -> None:
        # On stdout, which is not the log: the address has the token of the page in it.
        if address := node.server.page_address:
            click.echo(f"page: {address}")
            sys.stdout.flush()

    await daemon.serve(settings, path=path, overrides=overrides, started=started)
    # Calls and threads that a hung disk holds must not keep a drained daemon from ending.
    logging.shutdown()
    os._exit(0)
