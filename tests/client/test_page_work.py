"""Whatever becomes of work on pages, the engine's thread that waits for it gets an answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvstore import AsyncClient, Client, InvalidRequest, Unavailable
from kvstore.client.page_counters import Counters
from kvstore.client.page_work import Done, start

WAIT_S = 20.0


@pytest.fixture
def client() -> Any:
    with Client("unix:/no/such/daemon.sock") as client:
        yield client


async def good(_: AsyncClient) -> Done:
    return [True, False]


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (Unavailable("gone"), "away"),
        (InvalidRequest("wrong"), "failed"),
        (ValueError("a bug"), "failed"),
        (asyncio.CancelledError(), "away"),
    ],
)
def test_work_that_fails_is_a_miss(client: Client, error: BaseException, counted: str) -> None:
    counters = Counters()

    async def fail(_: AsyncClient) -> Done:
        raise error

    assert start(client, counters, 2, fail).result(WAIT_S) == [False, False]
    assert counters.as_dict()[counted] == 2
    assert start(client, counters, 2, good).result(WAIT_S) == [True, False]


def test_a_client_that_is_closed_answers_misses(client: Client) -> None:
    counters, begun = Counters(), threading.Event()

    async def forever(_: AsyncClient) -> Done:
        begun.set()
        await asyncio.sleep(3600)
        return [True, True]

    waits = start(client, counters, 2, forever)
    assert begun.wait(WAIT_S)
    assert not waits.cancel()
    client.close()
    assert waits.result(WAIT_S) == [False, False]
    assert start(client, counters, 2, good).result(WAIT_S) == [False, False]
    assert counters.as_dict()["away"] + counters.as_dict()["failed"] == 4
