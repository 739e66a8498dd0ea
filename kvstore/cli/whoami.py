"""`kvstore whoami`: which tenant and role a daemon takes the caller for."""

from __future__ import annotations

import json

import click

from kvstore.cli.target import connect, daemon_options


@click.command()
@daemon_options
def whoami(target: str, as_json: bool) -> None:
    """Show your tenant, your role, and what says so: the socket, a certificate or a token.

    \b
    Examples:
      kvstore whoami
      kvstore whoami --json | jq .role
    """
    with connect(target) as client:
        principal = client.admin.whoami()
    if as_json:
        about = {"tenant": principal.tenant, "role": principal.role.word, "by": principal.name}
        click.echo(json.dumps({"target": target} | about))
        return
    click.echo(f"tenant {principal.tenant}, role {principal.role.word}, by {principal.name}")
