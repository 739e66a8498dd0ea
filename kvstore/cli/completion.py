"""`kvstore completion`: what makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_KVSTORE_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete commands, options and file names.

    bash 4.4 or newer; zsh needs `compinit` before it.

    \b
    Examples:
      kvstore completion bash > ~/.local/share/bash-completion/completions/kvstore
      kvstore completion zsh >> ~/.zshrc
      kvstore completion fish > ~/.config/fish/completions/kvstore.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # the three that click brings
    click.echo(kind(ctx.find_root().command, {}, "kvstore", VARIABLE).source())
