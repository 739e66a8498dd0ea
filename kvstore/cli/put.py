"""`kvstore put`: store a file as one block, so that `kvstore get` gives it back."""

from __future__ import annotations

import json
from typing import BinaryIO

import click

from kvstore.cli.target import connect, daemon_options
from kvstore.cli.tokens import Tokens
from kvstore.client import Client
from kvstore.model.block import RECORD_NBYTES_MAX, BlockKey, Group, Namespace
from kvstore.model.keys import block_key, root_key
from kvstore.model.tokens import BlockTokens
from kvstore.model.words import SHORT_CHARS, size

IDENTITY = (("model", "cli"),)


@click.command()
@daemon_options
@click.option("--tokens", type=Tokens(), required=True, help="Token ids to store the bytes under.")
@click.option("--durable", is_flag=True, help="Wait until it is on disk; exit code 1 if it is not.")
@click.argument("file", type=click.File("rb"), default="-")
@click.pass_context
def put(
    ctx: click.Context,
    *,
    target: str,
    as_json: bool,
    tokens: tuple[int, ...],
    durable: bool,
    file: BinaryIO,
) -> None:
    """Store FILE, or the standard input, as a block under token ids, to try a daemon.

    The block is in a namespace of the model "cli"; each size and number of tokens has a namespace.
    A stored block does not change: other bytes under the same tokens are refused. A daemon that
    publishes KV events announces the block: see `kvstore events watch`.

    \b
    Examples:
      echo hello | kvstore put --tokens 1,2,3
      kvstore put --tokens 1,2,3 --durable block.bin
      kvstore get --tokens 1,2,3
    """
    if file.isatty():
        raise click.UsageError("name a FILE, or send the bytes through a pipe")
    record = file.read(RECORD_NBYTES_MAX + 1)
    if not 1 <= len(record) <= RECORD_NBYTES_MAX:
        raise click.ClickException(
            f"there are {'more than 1 GiB' if record else 'no bytes'} to store: a block has 1 byte "
            "to 1 GiB"
        )
    namespace = Namespace(len(tokens), (Group("full", len(record)),), IDENTITY)
    key = block_key(root_key(namespace.id), tokens)
    with connect(target) as client:
        is_durable = _put(client, namespace, key, record, tokens=tokens, durable=durable)
    if as_json:
        about = {"key": key.hex(), "namespace": namespace.id.hex(), "nbytes": len(record)}
        click.echo(json.dumps(about | {"durable": is_durable}))
    else:
        short = namespace.id.hex()[:SHORT_CHARS]
        click.echo(f"stored {size(len(record))} as block {key.hex()} of namespace {short}")
        if durable:
            click.echo("durable" if is_durable else "not durable: see `kvstore status`")
    ctx.exit(1 if durable and not is_durable else 0)


def _put(
    client: Client,
    namespace: Namespace,
    key: BlockKey,
    record: bytes,
    *,
    tokens: tuple[int, ...],
    durable: bool,
) -> bool:
    """Store a block, or find it stored; return whether it is durable, if that was asked."""
    namespace_id = client.register(namespace)
    told = BlockTokens.of(tokens)
    done = client.put(namespace_id, [key], [record], durable=durable, tokens=told)
    if done.refused:
        raise click.ClickException(
            f"the daemon has no room for {size(len(record))}: see `kvstore status`"
        )
    if done.existing and client.get(namespace_id, [key]) != [record]:
        raise click.ClickException(
            "other bytes of this size are stored under these tokens. To replace them: "
            f"kvstore delete --namespace {namespace_id.hex()} {key.hex()}"
        )
    return done.durable
