"""`kvstore page`: where a browser finds a daemon's page."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Any

import click

from kvstore.cli.target import connect, daemon_options
from kvstore.system.page_token import page_token_path, read_page_token


@click.command()
@daemon_options
@click.option("--open", "opens", is_flag=True, help="Open it in this host's browser.")
def page(target: str, as_json: bool, opens: bool) -> None:
    """Print the address of a daemon's page, with the token that it wants.

    Where credentials are configured, the page asks for one of them instead. A page on another host
    is reached by a tunnel: ssh -L 7701:127.0.0.1:7701 HOST.

    \b
    Examples:
      kvstore page
      kvstore page --open
      kvstore page --json | jq -r .address
    """
    with connect(target) as client:
        stats = client.admin.stats()
    found = _found(stats)
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo(found["address"])
        if found["asks_who"]:
            click.echo("it asks for a credential: see `kvstore token create`", err=True)
    if opens and not webbrowser.open(found["address"]):
        click.echo("no browser could be started here: open the address yourself", err=True)


def _found(stats: dict[str, Any]) -> dict[str, Any]:
    """Return where the page is. Raises ClickException if there is none."""
    addresses = stats.get("addresses", {})
    origin = addresses.get("page")
    if not origin:
        raise click.ClickException(
            "the daemon has no page: it needs server.metrics_listen, server.page=true and "
            "pip install 'kvstore-tiers[web]'"
        )
    asks_who = bool(addresses.get("tcp_guard", {}).get("asks_who"))
    token = "" if asks_who else read_page_token(page_token_path(Path(addresses["socket"]["path"])))
    address = f"{origin}?token={token}" if token else origin
    return {"address": address, "asks_who": asks_who}
