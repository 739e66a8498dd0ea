"""`kvstore events`: read what is announced to routers, and tell an indexer of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import click

from kvstore.cli.target import connect, daemon_options
from kvstore.client import Client
from kvstore.events.register import Registration
from kvstore.events.register import register as register_at
from kvstore.events.wire import (
    PAYLOAD_NBYTES_MAX,
    Batch,
    ReadAllBlocksCleared,
    ReadBlockStored,
    read,
    sequence_of,
)
from kvstore.model.errors import ConfigError, InvalidRequest

OFF = "this daemon announces nothing: set events.publish, see `kvstore serve --print-config`"
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
SHOWN_HASHES = 4
UNREAD_BATCHES_MAX = 1000


@click.group()
def events() -> None:
    """Read KV events, or tell an indexer where they are. All commands print JSON with --json.

    \b
    Examples:
      kvstore events watch
      kvstore events register http://router:8090 --instance 7
    """


@events.command(short_help="Print KV events as they come.")
@daemon_options
@click.argument("address", required=False, metavar="[tcp://HOST:PORT]")
@click.option("--topic", default="", help="Only topics that begin so.")
@click.option("--type", "kind", type=click.Choice(KINDS), help="Only events of this type.")
@click.option("--medium", type=click.Choice(["GPU", "CPU", "STORAGE"]), help="Only of this tier.")
@click.option("--batches", type=click.IntRange(1), help="End after so many batches.")
def watch(
    *,
    target: str,
    as_json: bool,
    address: str | None,
    topic: str,
    kind: str | None,
    medium: str | None,
    batches: int | None,
) -> None:
    """Print the KV events of a daemon, or of whoever announces at an address: engines do it in the
    same form. Who joins is told first what is there now.

    \b
    Examples:
      kvstore events watch
      kvstore events watch --type BlockRemoved --medium CPU
      kvstore events watch tcp://10.0.0.7:5557 --topic kv@ --json | jq .events
    """
    try:
        import zmq
    except ImportError as error:
        raise ConfigError("this needs pyzmq: pip install 'kvstore-tiers[events]'") from error
    if address is None:
        with connect(target) as client:
            address = str(_announced(client)["publish"])
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, UNREAD_BATCHES_MAX),
            (zmq.MAXMSGSIZE, PAYLOAD_NBYTES_MAX),
        ):
            socket.setsockopt(option, value)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise InvalidRequest(f"{address[:200]!r} is not an address: {error}") from error
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        with suppress(KeyboardInterrupt):  # the usual way out
            for told, number, batch in _batches(socket.recv_multipart, batches):
                _show(told, number, _only(batch, kind, medium), as_json)


def _batches(
    receive: Callable[[], Sequence[bytes]], most: int | None
) -> Iterator[tuple[str, int, Batch]]:
    """Yield (topic, sequence number, batch) as they come; say on stderr what was missed."""
    last: dict[bytes, int] = {}
    while most is None or most > 0:
        frames = receive()
        try:
            number, batch = _batch(frames)
        except InvalidRequest as error:
            click.echo(f"not a batch: {error}", err=True)
            continue
        topic = frames[0].decode(errors="replace")
        missed = number - last.get(frames[0], number - 1) - 1
        last[frames[0]] = number
        if missed:
            click.echo(f"missed {missed} batches of {topic!r}", err=True)
        most = None if most is None else most - 1
        yield topic, number, batch


def _batch(frames: Sequence[bytes]) -> tuple[int, Batch]:
    if len(frames) != 3:
        raise InvalidRequest(f"{len(frames)} frames; a batch has three")
    return sequence_of(frames[1]), read(frames[2])


def _only(batch: Batch, kind: str | None, medium: str | None) -> Batch:
    batch.events = [
        each
        for each in batch.events
        if kind in (None, _kind(each)) and medium in (None, getattr(each, "medium", None))
    ]
    return batch


def _kind(event: object) -> str:
    return type(event).__name__.removeprefix("Read")


def _show(topic: str, number: int, batch: Batch, as_json: bool) -> None:
    if not batch.events:
        return
    if as_json:
        told = [{"type": _kind(each), **_fields(each)} for each in batch.events]
        line = {"topic": topic, "sequence": number, "dp_rank": batch.dp_rank, "at": batch.at}
        click.echo(json.dumps({**line, "events": told}))
    else:
        at = datetime.fromtimestamp(batch.at).strftime("%H:%M:%S.%f")[:-3]
        for each in batch.events:
            click.echo(f"{at} {topic}{' ' if topic else ''}{_line(each)}")
    sys.stdout.flush()


def _fields(event: object) -> dict[str, Any]:
    names = getattr(event, "__struct_fields__", ())
    return {name: _plain(getattr(event, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _line(event: object) -> str:
    if isinstance(event, ReadAllBlocksCleared):
        return "cleared"
    hashes: list[int | bytes] = getattr(event, "block_hashes", [])
    shown = " ".join(map(_hash_text, hashes[:SHOWN_HASHES]))
    more = f" and {len(hashes) - SHOWN_HASHES} more" if len(hashes) > SHOWN_HASHES else ""
    what = "stored " if isinstance(event, ReadBlockStored) else "removed"
    medium = getattr(event, "medium", None) or "-"
    return f"{what} {medium:7} {len(hashes)} blocks: {shown}{more}"


def _hash_text(number: int | bytes) -> str:
    """Return a block's hash as `kvstore scan` prints the key: of ours it is the first 8 bytes."""
    if isinstance(number, bytes):
        return number.hex()
    return (number % (1 << 64)).to_bytes(8, "little").hex()


@events.command(short_help="Tell an indexer of a daemon's events.")
@daemon_options
@click.argument("url")
@click.option("--instance", type=click.IntRange(0), required=True, help="The engine's id there.")
@click.option("--model", help="As requests name it.  [default: events.model, or the only one]")
@click.option("--block-size", type=click.IntRange(1), help="Tokens.  [default: the model's]")
@click.option("--address", metavar="HOST", help="Of this host, where events are on all of its.")
def register(
    *,
    target: str,
    as_json: bool,
    url: str,
    instance: int,
    model: str | None,
    block_size: int | None,
    address: str | None,
) -> None:
    """Register the daemon's stream with Dynamo's indexer at URL, as another rank of an engine.

    The engine that uses the daemon is registered there as INSTANCE; the daemon's stream goes under
    the same instance with its own data-parallel rank (events.dp_rank). Register again after the
    indexer was restarted.

    \b
    Examples:
      kvstore events register http://indexer:8090 --instance 7
      kvstore events register http://indexer:8090 --instance 7 --address 10.0.0.7
    """
    with connect(target) as client:
        stats = _announced(client)
        if stats["topics"] != [""]:
            raise InvalidRequest("events.topics is engines: llm-d finds those by their topic")
        known = {
            (use.namespace.title, use.namespace.block_tokens)
            for use in client.admin.namespaces()
            if use.namespace is not None and model in (None, use.namespace.title)
        }
    names, sizes = {name for name, _ in known}, {size for _, size in known}
    if len(names) > 1 or (not names and not model):
        found = ", ".join(sorted(names)) or "none yet"
        raise InvalidRequest(f"say which model by --model; this daemon has {found}")
    if block_size is None and len(sizes) != 1:
        raise InvalidRequest("say the block size by --block-size: no engine has told it yet")
    what = Registration(
        instance,
        model or names.pop(),
        block_size or sizes.pop(),
        int(stats["dp_rank"]),
        _reached(str(stats["publish"]), address),
        _reached(str(stats["replay"]), address),
    )
    said = register_at(url, what)
    click.echo(json.dumps(what._asdict()) if as_json else said)


def _reached(endpoint: str, address: str | None) -> str:
    """Return the address that others connect to. Raises InvalidRequest."""
    anywhere = endpoint.startswith(("tcp://0.0.0.0:", "tcp://[::]:"))
    if anywhere and address is None:
        raise InvalidRequest(f"{endpoint} is every address of this host: say one by --address")
    return f"tcp://{address}:{endpoint.rpartition(':')[2]}" if anywhere else endpoint


def _announced(client: Client) -> dict[str, Any]:
    """Return what the daemon says of its events. Raises ClickException if it has none."""
    stats = client.admin.stats().get("events")
    if stats is None:
        raise click.ClickException(OFF)
    return dict(stats)
