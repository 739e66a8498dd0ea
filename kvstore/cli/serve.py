"""`kvstore serve`: one daemon in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import click

from kvstore.config import load_settings

_LOG_FORMAT = "%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"


@click.command()
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file; what it does not set keeps its default.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; repeatable."
)
@click.option("--print-config", is_flag=True, help="Print all settings, explained, and exit.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
def serve(
    config: Path | None, overrides: tuple[str, ...], print_config: bool, log_level: str
) -> None:
    """Run a daemon until SIGTERM or Ctrl-C.

    Both drain it: running calls end, what is dirty is written, then it stops.

    \b
    Examples:
      kvstore serve --set dram.capacity=16GiB --set file.path=/var/lib/kvstore
      kvstore serve --print-config > kvstore.toml
      kvstore serve --config kvstore.toml
    """
    settings = load_settings(config, overrides)
    if print_config:
        click.echo(settings.to_toml(), nl=False)
        return
    logging.basicConfig(level=log_level.upper(), format=_LOG_FORMAT)
    from kvstore import node

    async def run() -> None:
        await node.serve(settings)
        # Calls and threads that a hung disk holds must not keep a drained daemon from ending.
        logging.shutdown()
        os._exit(0)

    asyncio.run(run())
