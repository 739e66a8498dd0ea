"""`kvstore selftest`: does a daemon give back what it is given?"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

from kvstore.cli.target import connect, daemon_options, shown
from kvstore.client import Client
from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId
from kvstore.model.errors import KVStoreError
from kvstore.model.hint import Prefix
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.words import duration, size

BLOCKS = 16
RECORD_NBYTES = 128 << 10
BLOCK_TOKENS = 16
FLUSH_S = 30.0
NAMESPACE = Namespace(BLOCK_TOKENS, (Group("full", RECORD_NBYTES),), (("model", "selftest"),))


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was tried. result: "ok", "skipped" or "failed"."""

    about: str
    result: str
    found: str
    seconds: float = 0.0

    def line(self) -> str:
        return f"{self.result:<7}  {self.about:<10}  {self.found}"


class _Failed(Exception):
    """The daemon did not do what it should; the message says what."""


class _Skipped(Exception):
    """This daemon cannot do it, and need not; the message says why."""


@click.command()
@daemon_options
@click.pass_context
def selftest(ctx: click.Context, target: str, as_json: bool) -> None:
    """Put blocks, get them back, compare, flush them to disk, read them from there, and clean up.

    It stores 2 MiB for a moment, in a namespace of its own, and touches no other blocks. Exit code
    1 if a step fails, 3 if no daemon answers.

    \b
    Examples:
      kvstore selftest
      kvstore selftest --json | jq -r '.steps[] | select(.result == "failed")'
    """
    steps = []
    for step in _steps(target):
        steps.append(step)
        if not as_json:
            click.echo(step.line())
    works = all(step.result != "failed" for step in steps)
    if as_json:
        told = {"target": target, "works": works, "steps": [asdict(step) for step in steps]}
        click.echo(json.dumps(told))
    else:
        click.echo("it works" if works else "something does not work: see above")
    ctx.exit(0 if works else 1)


def _steps(target: str) -> Iterator[Step]:
    """Yield steps as they are done. Raises Unavailable if no daemon answers."""
    with connect(target) as streams:
        yield _tried("answers", lambda: f"release {streams.admin.ping()} at {target}", fatal=True)
        blocks = _Blocks(streams)
        try:
            yield from _uses(blocks, streams)
        finally:
            cleaned = _tried("clean up", blocks.delete)
        yield cleaned


def _uses(blocks: _Blocks, streams: Client) -> Iterator[Step]:
    yield (put := _tried("put", blocks.put))
    if put.result != "ok":
        return
    yield _tried("get", lambda: blocks.get(streams))
    yield (flush := _tried("flush", blocks.flush))
    if flush.result == "ok":  # before a second client uses the blocks, which keeps them in memory
        yield _tried("disk", blocks.from_disk)
    yield _tried("memory", lambda: _through_arena(streams.target, blocks))


def _tried(about: str, work: Callable[[], str], *, fatal: bool = False) -> Step:
    began = time.perf_counter()
    try:
        result, found = "ok", work()
    except _Skipped as why:
        result, found = "skipped", str(why)
    except (_Failed, KVStoreError) as why:
        if fatal and isinstance(why, KVStoreError):
            raise
        result, found = "failed", str(why)
    seconds = time.perf_counter() - began
    if result == "ok":
        found += f", in {duration(seconds)}"
    return Step(about, result, found, seconds)


class _Blocks:
    """Random blocks under random tokens: two of these do not meet."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tokens = [secrets.randbits(32) for _ in range(BLOCKS * BLOCK_TOKENS)]
        self._keys = _keys(self._tokens)
        self._records = [os.urandom(RECORD_NBYTES) for _ in range(BLOCKS)]

    def put(self) -> str:
        done = self._client.put(self._client.register(NAMESPACE), self._keys, self._records)
        if done.refused:
            raise _Failed(f"{done.refused} of {BLOCKS} blocks found no room: see `kvstore status`")
        return f"{BLOCKS} blocks, {size(BLOCKS * RECORD_NBYTES)}"

    def get(self, client: Client) -> str:
        got = client.get(client.register(NAMESPACE), self._keys)
        for number, (record, wanted) in enumerate(zip(got, self._records, strict=True)):
            if record is None:
                raise _Failed(f"block {number} is gone again: see `kvstore status`")
            if record != wanted:
                raise _Failed(
                    f"block {number} does not have the bytes that were put: please report this"
                )
        return f"{BLOCKS} blocks, every byte as it was put"

    def flush(self) -> str:
        if not self._client.admin.stats()["file"]["capacity_bytes"]:
            raise _Skipped("no file tier: nothing survives a restart (file.path)")
        self._client.admin.flush(FLUSH_S)
        durable = sum(item.durable for item in self._stored())
        if durable < BLOCKS:
            raise _Failed(f"{durable} of {BLOCKS} blocks are on disk: see `kvstore status`")
        return f"{BLOCKS} blocks are on disk, and survive a restart"

    def from_disk(self) -> str:
        report = self._client.hints.demote(
            Prefix.of_tokens(NAMESPACE, self._tokens), deadline_s=FLUSH_S
        )
        if not report.done_blocks:
            raise _Skipped("the blocks were not demoted, so they were not read from disk")
        self.get(self._client)
        return f"{report.done_blocks} blocks were demoted, then read back from disk unchanged"

    def delete(self) -> str:
        self._client.admin.delete(NAMESPACE.id, self._keys)
        if left := len(self._stored()):
            raise _Failed(f"{left} blocks remain: kvstore clear --namespace {NAMESPACE.id.hex()}")
        return "nothing remains"

    def _stored(self) -> list[Any]:
        mine = set(self._keys)
        return [item for item in self._client.admin.scan(NAMESPACE.id) if item.key in mine]


def _keys(tokens: list[int]) -> list[BlockKey]:
    return KeyChain(root_key(NamespaceId(NAMESPACE.id)), BLOCK_TOKENS).update(tokens)


def _through_arena(target: str, blocks: _Blocks) -> str:
    """Get the blocks as engines of this host do, out of shared memory."""
    if not target.startswith("unix:"):
        raise _Skipped("shared memory is for clients of the unix socket")
    with Client(target, name="selftest", **shown()) as client:
        return blocks.get(client)
