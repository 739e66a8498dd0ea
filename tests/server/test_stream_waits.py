"""How long a streamed get waits for a disk that is slow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server import streams
from kvstore.server.streams import Streams
from tests.store.node import SPEC, Node, chain

KEYS = chain(1, 8)
WAIT_S, READ_S = 0.2, 0.15


def test_it_is_as_long_for_all_windows_as_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW_NBYTES", 1)  # of one record
    waits: list[float] = []
    with Node(None) as node:
        acquire = node.store.gets.acquire

        async def slow(*args: Any, wait_s: float, **options: Any) -> Any:
            waits.append(wait_s)
            await asyncio.sleep(min(READ_S, wait_s))
            return await acquire(*args, wait_s=0.0, **options)

        monkeypatch.setattr(node.store.gets, "acquire", slow)

        async def get() -> int:
            request = pb.GetRequest(namespace_id=SPEC.id, keys=b"".join(KEYS))
            replies = Streams(node.store, node.metrics).get(
                request, namespace=SPEC, keys=KEYS, wait_s=WAIT_S
            )
            return len([reply async for reply in replies])

        assert node.run(get()) == len(KEYS)
    assert waits[0] == WAIT_S
    assert waits[1] <= WAIT_S - READ_S + 0.001
    assert max(waits[2:]) < 0.001
