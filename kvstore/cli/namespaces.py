"""`kvstore namespaces`, and how other commands find the one that is meant."""

from __future__ import annotations

import json

import click

from kvstore.block import Namespace, NamespaceId
from kvstore.cli.target import connect, daemon_options
from kvstore.cli.words import SHORT_CHARS
from kvstore.client import Client


@click.command()
@daemon_options
def namespaces(target: str, as_json: bool) -> None:
    """List the namespaces a daemon knows: id, blocks, tokens a block, model and groups.

    Blocks of two namespaces are never shared. One without details was found on disk; an engine that
    uses it has not come yet.

    \b
    Examples:
      kvstore namespaces
      kvstore namespaces --json | jq -r 'select(.blocks > 0) | .namespace'
    """
    with connect(target) as client:
        found = client.namespaces()
    for namespace_id, namespace, blocks in found:
        if as_json:
            spec = json.loads(namespace.to_json()) if namespace else None
            click.echo(
                json.dumps({"namespace": namespace_id.hex(), "blocks": blocks, "spec": spec})
            )
        else:
            click.echo(f"{namespace_id.hex()} {blocks:>9} blocks  {_summary(namespace)}")


def namespace_option(help_text: str) -> str:
    """Return the help of a --namespace that `find_namespace` reads."""
    return f"{help_text} The first digits of its id do; not needed where there is only one."


def find_namespace(client: Client, start: str | None) -> tuple[NamespaceId, Namespace]:
    """Return the one registered namespace whose id starts so. Raises UsageError that lists them."""
    known = client.namespaces()
    meant = [item for item in known if item[0].hex().startswith((start or "").lower())]
    usable = [(each, namespace) for each, namespace, _ in meant if namespace is not None]
    if len(usable) == 1:
        _, namespace = usable[0]
        return client.register(namespace), namespace
    if meant and not usable:
        raise click.ClickException(
            f"namespace {meant[0][0].hex()[:SHORT_CHARS]} was found on disk, and what it stands "
            "for is known only when an engine that uses it has started"
        )
    listed = "".join(
        f"\n  {each.hex()[:SHORT_CHARS]} {_summary(namespace)}" for each, namespace, _ in known
    )
    if not known:
        raise click.ClickException("the daemon knows no namespace yet: start an engine first")
    problem = f"no namespace starts with {start}" if not meant else "several namespaces fit"
    raise click.UsageError(f"{problem}; say --namespace with one of:{listed}")


def _summary(namespace: Namespace | None) -> str:
    if namespace is None:
        return "found on disk, not registered yet"
    identity = dict(namespace.identity)
    groups = len(namespace.groups)
    return (
        f"{namespace.block_tokens} tokens a block, {groups} group{'s' * (groups > 1)}, model "
        f"{identity.get('model', '?')[:SHORT_CHARS]}, weights "
        f"{identity.get('weights', '?')[:SHORT_CHARS]}"
    )
