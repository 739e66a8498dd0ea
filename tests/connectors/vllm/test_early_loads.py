"""Loads that begin while the daemon still reads the last blocks into their slots."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvstore import Unavailable
from kvstore.model.outcome import Ready
from kvstore.testing.wait import until
from kvstore_vllm.metadata import LoadOrder, StepMetadata
from tests.connectors.vllm.scheduler_engine import Engine, make_request
from tests.connectors.vllm.test_worker_side import key, load, load_order, make_side
from tests.connectors.vllm.worker_fakes import RECORD, FakeClient, FakePages

TABLES = ([1, 2, 3, 4, 5], [0, 0, 0, 6, 7])


@pytest.fixture(autouse=True)
def one_block_at_once(monkeypatch) -> None:
    monkeypatch.setattr("kvstore_vllm.loading.WINDOW_NBYTES", 1)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def pages() -> FakePages:
    return FakePages()


@pytest.fixture
def side(client, pages):
    side = make_side(client, pages)
    yield side
    client.arrivals.put(Ready(0, over=True))  # for who still waits
    side.close()


def early_order(client: FakeClient, **changes) -> LoadOrder:
    """The load of blocks 0 and 1 of a prefix, of which none is there yet."""
    order = load_order(client, ready_blocks=0, give_up_at=time.monotonic() + 30, **changes)
    spans = [replace(span, blocks=tuple(range(len(span.keys)))) for span in order.spans]
    return replace(order, spans=tuple(spans))


def test_each_block_is_copied_once_it_is_there(side, client, pages):
    first, second = (bytes([50 + at]) * RECORD for at in (0, 1))
    order = early_order(client)
    side.start_loads(StepMetadata(loads=[order]))
    client.arrivals.put(Ready(1, over=False))
    until(lambda: pages.blocks[0, 7] == first)
    assert pages.blocks[0, 8] != second
    assert side.loader.pending
    assert client.released == []
    side.start_loads(StepMetadata(loads=[load_order(client, request_id="beside")]))
    until(lambda: side.counters.totals["loads"] == 1)
    assert side.results(computed=True) == ({"beside"}, set())
    client.arrivals.put(Ready(2, over=False))
    until(lambda: not side.loader.pending)
    assert side.results(computed=True) == ({"r"}, set())
    assert pages.blocks[0, 8] == second
    assert client.waited_for == [1, 2]
    assert client.released == [5, 5]
    totals = side.counters.totals
    assert (totals["loads"], totals["loads_early"], totals["loaded_blocks"]) == (2, 1, 4)


@pytest.mark.parametrize("ends", ["over", "given up", "late", "daemon gone", "damaged"])
def test_a_load_whose_last_block_does_not_come_fails(side, client, ends):
    order = early_order(client)
    if ends == "late":
        order = replace(order, give_up_at=time.monotonic() + 0.05)
    client.arrivals.put(Ready(1, over=False))
    if ends in ("over", "given up"):
        client.arrivals.put(Ready(1, over=True, given_up=ends == "given up"))
    elif ends == "damaged":
        client.arena[RECORD + 3] ^= 1
        client.arrivals.put(Ready(2, over=False))
    elif ends == "daemon gone":
        client.arrivals.put(Unavailable("the daemon is gone"))
    assert load(side, order) == (set(), {"r"})
    totals, given_up = side.counters.totals, ends in ("given up", "late")
    assert (totals["loads_given_up"], totals["loads_failed"]) == (given_up, not given_up)
    assert totals["loaded_blocks"] == 0
    assert client.corrupt == ([key(1)] if ends == "damaged" else [])
    assert client.released == [5]


def asked(engine: Engine, request, ready_blocks: int | None) -> None:
    """Have a request loaded, of which so many blocks are there."""
    engine.client.hit_blocks, engine.client.ready_blocks = 5, ready_blocks
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (20, True)
    engine.admit(request, TABLES, 20)
    (order,) = engine.step().loads
    assert order.ready_blocks == ready_blocks
    assert [span.blocks for span in order.spans] == [(0, 1, 2, 3, 4), (3, 4)]


def test_what_has_come_is_asked_for_once_if_the_rest_did_not_come():
    engine, request = Engine(), make_request(22)
    asked(engine, request, ready_blocks=2)
    give_up_at = time.monotonic() + 5.0
    engine.side.loads_failed({"r"})
    engine.client.hit_blocks = 2
    assert engine.side.num_new_matched_tokens(request, 0) == (None, False)
    assert engine.side.num_new_matched_tokens(request, 0) == (8, True)
    assert [each.early for each in engine.client.asked] == [True, False]
    assert engine.side._tracked["r"].asked_until <= give_up_at
    engine.admit(request, ([1, 2], [6, 7]), 8)
    (order,) = engine.step().loads
    assert order.ready_blocks is None, "this time all of it is there"
    engine.side.loads_failed({"r"})
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)


def test_a_load_of_what_was_there_is_not_asked_for_again():
    engine, request = Engine(), make_request(22)
    asked(engine, request, ready_blocks=None)
    engine.side.loads_failed({"r"})
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    assert len(engine.client.asked) == 1
