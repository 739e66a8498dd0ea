"""`kvstore tree`: what is stored, as a tree of prefixes."""

from __future__ import annotations

import json
from typing import Any

import click

from kvstore.cli.namespaces import Start, find_namespace_id, namespace_id_option
from kvstore.cli.target import Hash, connect, daemon_options
from kvstore.client import Client
from kvstore.model.words import SHORT_CHARS, duration, size
from kvstore.rpc.v1 import kvstore_pb2 as pb

DEPTH, LIMIT = 3, 50


@click.command()
@daemon_options
@click.option("--namespace", type=Start(), help=namespace_id_option("Prefixes of this namespace."))
@click.option("--prefix", type=Hash(), help="What goes on from this block, by its key.")
@click.option("--through", type=Hash(), help="The way from the start of a prefix to this block.")
@click.option("--request", metavar="ID", help="The way to the last block that a request asked for.")
@click.option(
    "--conversation", metavar="ID", help="The way to the last block of a conversation's prompt."
)
@click.option("--session", metavar="ID", hidden=True)  # what --conversation was called
@click.option(
    "--depth",
    type=click.IntRange(1, 8),
    default=DEPTH,
    show_default=True,
    help="How many runs behind each other.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=LIMIT,
    show_default=True,
    help="How many runs.",
)
def tree(
    *,
    target: str,
    as_json: bool,
    namespace: str | None,
    prefix: bytes | None,
    through: bytes | None,
    request: str | None,
    conversation: str | None,
    session: str | None,
    depth: int,
    limit: int,
) -> None:
    """Show what is stored as a tree of prefixes, the largest first.

    A line is a prefix run: blocks of which only the last has several blocks behind it, or none.
    Bytes and hits are those of the run and all behind it. Tokens are never shown.

    \b
    Examples:
      kvstore tree
      kvstore tree --namespace 5e88 --depth 1 --limit 10
      kvstore tree --request chatcmpl-8c1f
      kvstore tree --json | jq 'select(.hits == 0).all_file_bytes'
    """
    conversation = session if conversation is None else conversation
    if sum(each is not None for each in (prefix, through, request, conversation)) > 1:
        raise click.UsageError("say one of --prefix, --through, --request and --conversation")
    with connect(target) as client:
        only = find_namespace_id(client, namespace)
        if request is not None or conversation is not None:
            through = _last_key(client, request, conversation)
        found = client.admin.tree(
            only, prefix or b"", through=through or b"", depth=depth, limit=limit
        )
    if as_json:
        for run in found.runs:
            click.echo(json.dumps(_run_json(run, found)))
        return
    if not found.runs:
        click.echo(
            "nothing is stored there"
            if through is None
            else "its last block is not stored; blocks before that may be: see `kvstore explain`"
        )
        return
    for line in _lines(found):
        click.echo(line)


def _last_key(client: Client, request: str | None, conversation: str | None) -> bytes:
    if request is not None:
        outcomes = client.admin.outcomes(request, limit=1)
        if not outcomes:
            raise click.ClickException(f"no request {request} is remembered")
        return outcomes[0].last_key
    known = client.admin.conversations(conversation or "", limit=1)
    if not known.items:
        raise click.ClickException(f"no conversation {conversation} is known")
    return known.items[0].last_key


def _run_json(run: pb.PrefixRun, reply: pb.TreeReply) -> dict[str, Any]:
    return {
        "parent": run.parent - 1 if run.parent else None,
        "namespace": reply.namespaces[run.namespace].hex(),
        "first_key": run.first_key.hex(),
        "last_key": run.last_key.hex(),
        "begin": run.begin,
        "end": run.end,
        "children": run.children,
        "dram_bytes": run.dram_bytes,
        "file_bytes": run.file_bytes,
        "blocks": run.blocks,
        "all_dram_bytes": run.all_dram_bytes,
        "all_file_bytes": run.all_file_bytes,
        "hits": run.hits,
        "used_age_s": run.used_age_s if run.HasField("used_age_s") else None,
    }


def _lines(reply: pb.TreeReply) -> list[str]:
    """Return the runs, each below the one it goes on from."""
    below: dict[int, list[int]] = {}
    for place, run in enumerate(reply.runs):
        below.setdefault(run.parent, []).append(place)
    lines: list[str] = []
    left = [(place, 0) for place in reversed(below.get(0, []))]
    while left:
        place, indent = left.pop()
        run, shown = reply.runs[place], below.get(place + 1, [])
        lines.append("  " * indent + _line(run, reply, run.children - len(shown)))
        left += [(each, indent + 1) for each in reversed(shown)]
    if reply.next:
        lines.append("and more: raise --limit, or name a --prefix")
    if reply.left_out_blocks:
        lines.append(f"{reply.left_out_blocks} more blocks are stored; so many are not drawn")
    return lines


def _line(run: pb.PrefixRun, reply: pb.TreeReply, hidden: int) -> str:
    one = run.end == run.begin + 1
    blocks = f"block {run.begin}" if one else f"blocks {run.begin}-{run.end - 1}"
    used = f", used {duration(run.used_age_s)} ago" if run.HasField("used_age_s") else ""
    start = f" of {reply.namespaces[run.namespace].hex()[:SHORT_CHARS]}" if not run.parent else ""
    more = f"; {hidden} more go on" if hidden > 0 else ""
    return (
        f"{blocks}{start}: {run.blocks} blocks, {size(run.all_dram_bytes)} dram, "
        f"{size(run.all_file_bytes)} file, {run.hits} hits{used}  {run.last_key.hex()}{more}"
    )
