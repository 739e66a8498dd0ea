"""What the scheduler side loads, into which blocks."""

from __future__ import annotations

import pytest

from tests.connectors.vllm.scheduler_engine import (
    Engine,
    keys_of,
    make_request,
    saved,
)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_load_pairs_slots_with_device_blocks_and_skips_null_blocks(engine):
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 4)
    # One block held locally; the window of 6 tokens before token 20 begins in block 3.
    engine.admit(request, ([9, 11, 12, 13, 14], [0, 0, 0, 16, 17]), 16)
    meta = engine.step()
    (order,) = meta.loads
    assert order.complete
    assert order.instance == "daemon-1"
    full, window = order.spans
    assert full.device_blocks == (11, 12, 13, 14)
    assert [slot.offset // 4096 for slot in full.slots] == [1, 2, 3, 4]
    assert full.checksums == (1, 2, 3, 4)
    assert full.keys == tuple(keys_of(request)[1:5])
    assert window.device_blocks == (16, 17)
    assert [slot.offset // 4096 for slot in window.slots] == [5, 6]
    assert meta.handed_out == [11, 12, 13, 14, 16, 17]
    assert engine.client.released == [], "each worker releases the lease itself"
    assert engine.step().loads == []


def test_a_load_that_misses_a_block_is_marked(engine):
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 0)
    engine.admit(request, ([9, 11, 12, 13, 14], [0, 0, 15, 16, 17]), 20)  # one window block more
    (order,) = engine.step().loads
    assert not order.complete


def test_a_hit_that_the_engine_did_not_take_gives_the_lease_back(engine):
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 0)
    engine.admit(request, ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]), 0)
    assert engine.client.released == [1]
    assert engine.step().loads == []


def test_a_request_aborted_during_its_load_saves_nothing(engine):
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 0)
    engine.admit(request, ([1, 2, 3, 4, 5], [0, 0, 0, 6, 7]), 20)
    engine.step()
    request.num_computed_tokens = 20  # vLLM claims so before the bytes are there
    engine.side.request_finished(request)
    assert not engine.side.has_pending_saves
    assert saved(engine.step()) == {}


@pytest.mark.parametrize("known", [True, False], ids=["known", "passed by"])
def test_blocks_that_another_connector_loads_into_are_announced(engine, known):
    """Some versions of MultiConnector show those blocks only to the one that loads."""
    request = make_request(22)
    if known:
        engine.side.on_new_request(request)
        engine.side.num_new_matched_tokens(request, 4)
    engine.manager.tables["r"] = ([1, 2, 3], [0, 5, 6])
    engine.admit(request, ((), ()))
    assert engine.step().handed_out == ([2, 3, 5, 6] if known else [1, 2, 3, 5, 6])


# ---- saving --------------------------------------------------------------------------------------
