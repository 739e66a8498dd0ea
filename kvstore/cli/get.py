"""`kvstore get`: read one record out of a daemon."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from kvstore.block import BlockKey
from kvstore.checksum import checksum
from kvstore.cli.namespaces import find_namespace, namespace_option
from kvstore.cli.target import Hash, connect, daemon_options
from kvstore.cli.words import reason_text


@click.command()
@daemon_options
@click.option("--namespace", metavar="HEX", help=namespace_option("Where the block is."))
@click.option("--group", type=click.IntRange(0), default=0, show_default=True)
@click.option("--shard", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write here instead of to the standard output.",
)
@click.argument("key", type=Hash())
def get(
    *,
    target: str,
    as_json: bool,
    namespace: str | None,
    group: int,
    shard: int,
    output: Path | None,
    key: bytes,
) -> None:
    """Read the bytes of one part of the block KEY, verified against its checksum.

    Exit code 1 if it is not stored. --json prints size and checksum, and no bytes.

    \b
    Examples:
      kvstore get 0a1b... -o block.bin
      kvstore get --namespace 5e88 --group 1 0a1b... | sha256sum
      kvstore get --json 0a1b...
    """
    if output is None and not as_json and sys.stdout.isatty():
        raise click.UsageError("bytes do not belong on a terminal: use -o FILE, --json or a pipe")
    with connect(target) as client:
        namespace_id, _ = find_namespace(client, namespace)
        (record,) = client.get(namespace_id, [BlockKey(key)], group=group, shard=shard)
        if record is None:
            (state,) = client.explain(namespace_id, [BlockKey(key)]).ranges
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
