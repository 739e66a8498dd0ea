"""Counts what is looked at in the index between two turns of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.decide.resting import Resting
from kvstore.decide.rows import Rows
from kvstore.model.block import BlockKey, Group, Namespace, Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, root_key
from tests.store.node import DAEMON_SESSION, Node

TINY = Namespace(2, (Group("all", 64),), ())
PREFIX_BLOCKS = 1000


class CountedLoop(asyncio.SelectorEventLoop):
    """turns: rows looked at, and blocks woken, in each turn."""

    threads = None

    def __init__(self) -> None:
        super().__init__()
        self.looked_at = 0
        self.turns: list[int] = []

    def _run_once(self) -> None:
        self.looked_at = 0
        super()._run_once()  # type: ignore[misc]
        self.turns.append(self.looked_at)


@contextmanager
def counting(loop: CountedLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count all walks over rows, and what they wake."""
    some, kept, wake = Rows.some, Rows.kept, Resting.wake

    def counted_some(rows: Rows, keeper: int, begin: int, end: int) -> list[int]:
        loop.looked_at += max(0, min(end, rows.end) - begin)
        return some(rows, keeper, begin, end)

    def counted_kept(rows: Rows, keeper: int) -> Iterator[int]:
        for row in kept(rows, keeper):
            loop.looked_at += 1
            yield row

    def counted_wake(blocks: Resting, row: int) -> Any:
        loop.looked_at += 1
        return wake(blocks, row)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "some", counted_some)
        patch.setattr(Rows, "kept", counted_kept)
        patch.setattr(Resting, "wake", counted_wake)
        yield


async def put(node: Node, spec: Namespace, keys: Sequence[BlockKey]) -> None:
    """Put a prefix of zeros of a namespace with one part."""
    grant = await node.store.puts.reserve(
        DAEMON_SESSION,
        spec.id,
        keys,
        first_block=0,
        parent=None,
        spans=(Span(Part(0, 0), 0, len(keys)),),
    )
    sums = [checksum(bytes(spec.groups[0].record_nbytes))] * len(keys)
    await node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums)


def fill(node: Node, spec: Namespace, blocks: int, first: int = 0) -> list[BlockKey]:
    """Put prefixes of so many blocks; return their keys. first: a name of prefixes."""
    node.store.namespaces.register(spec)
    stored: list[BlockKey] = []
    while len(stored) < blocks:
        tokens = spec.block_tokens * min(PREFIX_BLOCKS, blocks - len(stored))
        keys = KeyChain(root_key(spec.id), spec.block_tokens).update([first] * tokens)
        node.run(put(node, spec, keys))
        stored, first = stored + keys, first + 1
    return stored
