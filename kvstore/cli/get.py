"""`kvstore get`: read one record out of a daemon."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from kvstore.cli.namespaces import Start, find_namespace, namespace_option
from kvstore.cli.outputs import check_outputs
from kvstore.cli.put import IDENTITY
from kvstore.cli.target import Hash, connect, daemon_options
from kvstore.cli.tokens import Tokens
from kvstore.client import Client
from kvstore.model.block import BlockKey, Namespace, NamespaceId
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, block_key, root_key
from kvstore.model.words import SHORT_CHARS, reason_text


@click.command()
@daemon_options
@click.option("--namespace", type=Start(), help=namespace_option("Namespace of the block."))
@click.option("--group", type=click.IntRange(0), default=0, show_default=True)
@click.option("--shard", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write here instead of to the standard output.",
)
@click.option("--tokens", type=Tokens(), help="Token ids of the block, instead of KEY.")
@click.argument("key", required=False, type=Hash())
def get(
    *,
    target: str,
    as_json: bool,
    namespace: str | None,
    group: int,
    shard: int,
    output: Path | None,
    tokens: tuple[int, ...] | None,
    key: bytes | None,
) -> None:
    """Read one record of the block KEY, verified against its checksum.

    Exit code 1 if it is not stored. --json prints size and checksum instead of the bytes. --tokens
    finds a block that `kvstore put` stored; with --namespace, the last block of any prefix.

    \b
    Examples:
      kvstore get 0a1b... -o block.bin
      kvstore get --namespace 5e88 --group 1 0a1b... | sha256sum
      kvstore get --json 0a1b...
      kvstore get --tokens 1,2,3
    """
    check_outputs(output)
    if (key is None) == (tokens is None):
        raise click.UsageError("say either KEY or --tokens")
    if output is None and not as_json and sys.stdout.isatty():
        raise click.UsageError("bytes do not belong on a terminal: use -o FILE, --json or a pipe")
    with connect(target) as client:
        if tokens is not None:
            namespace_id, key = _block_of(client, namespace, tokens)
        else:
            namespace_id, _ = find_namespace(client, namespace)
        assert key is not None
        (record,) = client.get(namespace_id, [BlockKey(key)], group=group, shard=shard)
        if record is None:
            (state,) = client.admin.explain(namespace_id, [BlockKey(key)]).ranges
            why = reason_text(state.reason, state.left_s) if state.reason else "not this part of it"
            raise click.ClickException(f"{key.hex()} is not stored: {why}")
    if output is not None:
        output.write_bytes(record)
    if as_json:
        about = {"key": key.hex(), "namespace": namespace_id.hex(), "group": group, "shard": shard}
        click.echo(json.dumps(about | {"nbytes": len(record), "xxh3": f"{checksum(record):016x}"}))
    elif output is None:
        sys.stdout.buffer.write(record)
    else:
        click.echo(f"wrote {len(record)} bytes to {output}")


def _block_of(
    client: Client, start: str | None, tokens: tuple[int, ...]
) -> tuple[NamespaceId, BlockKey]:
    """Return the last block of a prefix. Without a namespace: of those `kvstore put` made."""
    if start is None:
        spec = _stored_under(client, tokens)
        namespace_id = client.register(spec)
    else:
        namespace_id, spec = find_namespace(client, start)
    keys = KeyChain(root_key(namespace_id), spec.block_tokens).update(tokens)
    if not keys:
        raise click.UsageError(f"a block of this namespace has {spec.block_tokens} tokens")
    return namespace_id, keys[-1]


def _stored_under(client: Client, tokens: tuple[int, ...]) -> Namespace:
    """Return the namespace in which `kvstore put` stored something under these tokens."""
    made = [
        (namespace_id, spec)
        for namespace_id, spec, blocks, *_ in client.admin.namespaces()
        if blocks and spec and spec.identity == IDENTITY and spec.block_tokens == len(tokens)
    ]
    found = [
        spec
        for namespace_id, spec in made
        if client.admin.explain(
            namespace_id, [block_key(root_key(namespace_id), tokens)]
        ).hit_blocks
    ]
    if not found:
        raise click.ClickException("`kvstore put` stored nothing under these tokens")
    if len(found) > 1:
        ids = " or ".join(spec.id.hex()[:SHORT_CHARS] for spec in found)
        raise click.UsageError(
            f"{len(found)} sizes are stored under these tokens: say --namespace {ids}"
        )
    return found[0]
