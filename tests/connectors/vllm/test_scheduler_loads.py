"""What the scheduler side loads, into which blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.connectors.vllm.scheduler_engine import (
    LOSSY_NAMESPACE,
    Engine,
    keys_of,
    make_request,
    saved,
)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def lossy() -> Engine:
    return Engine(LOSSY_NAMESPACE)


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


# ---- lossy blocks --------------------------------------------------------------------------------


def load_lossy(engine, *, fidelity="base", tables=([1, 2, 3, 4, 5], [0, 0, 0, 6, 7]), tokens=22):
    request = make_request(tokens, kv_transfer_params={"kvstore": {"fidelity": fidelity}})
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (20, True)
    engine.admit(request, tables, 20)
    (order,) = engine.step().loads
    return request, order


def test_fine_parts_ride_along_with_what_they_refine(lossy):
    lossy.client.coarse = {2, 4}
    _, order = load_lossy(lossy)
    assert order.complete, "a fine part that is missing is no failure"
    assert not order.refined
    full, window = order.spans
    assert (full.group, window.group) == (0, 1)
    assert full.device_blocks == (1, 2, 3, 4, 5)
    assert window.device_blocks == (6, 7)
    # 7 base slots, then the fine ones: of blocks 0 to 4, and of blocks 3 and 4 of the window.
    assert [fine and fine.slot.offset // 4096 for fine in full.fines] == [None, 8, None, 10, None]
    assert [fine and fine.checksum for fine in full.fines] == [None, 8, None, 10, None]
    assert [fine and fine.slot.offset // 4096 for fine in window.fines] == [12, None]
    assert sorted(order.lossy_blocks) == [2, 3, 4, 5, 6, 7], "the first block is exact"


def test_who_insists_loads_nothing_that_lacks_a_fine_part(lossy):
    """The daemon says so before; what it grants all the same is not taken."""
    _, order = load_lossy(lossy, fidelity="fine")
    assert order.refined
    assert order.complete
    again = Engine(LOSSY_NAMESPACE)
    again.client.coarse = {2}
    _, order = load_lossy(again, fidelity="fine")
    assert not order.complete


def test_a_lossy_load_that_misses_a_block_is_marked(lossy):
    _, order = load_lossy(lossy, tables=([1, 2, 3, 4, 5], [0, 0, 8, 6, 7]))
    assert not order.complete


TABLES = ([1, 2, 3, 4, 5, 8], [0, 0, 0, 6, 7, 9])
SHARED = ([1, 2, 3, 4, 5, 11], [0, 0, 0, 6, 7, 12])
OTHERS = [21, 22, 23, 24, 25, 26]


def finish_next(engine, name, tables, computed, fidelity="base"):
    """Let a request run on blocks that the engine holds already; return what it saves."""
    wish = {"kvstore": {"fidelity": fidelity}}
    request = make_request(26, name=name, num_computed_tokens=computed, kv_transfer_params=wish)
    engine.client.hit_blocks = 0
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, computed)
    engine.admit(request, tables)
    engine.step(new=[(request, tables, 26 - computed)])
    return saved(engine.step())


def run_loaded(engine) -> None:
    """Load 5 blocks, compute a sixth, and end the request."""
    request, _ = load_lossy(engine, tokens=26)
    request.num_computed_tokens = 20
    engine.step(new=[(request, TABLES, 6)])
    engine.side.request_finished(request)
    assert saved(engine.step()) == {(0, 5): 8, (1, 5): 9}, "what was loaded is not saved"


def test_blocks_that_a_load_has_filled_are_not_handed_out_when_the_request_runs(lossy):
    """vLLM shows them once more then. Their KV stays what was loaded."""
    request, order = load_lossy(lossy, tokens=26)
    request.num_computed_tokens = 20
    assert lossy.step(new=[(request, TABLES, 6)]).handed_out == [8, 9]
    assert all(block in lossy.side._lossy for block in order.lossy_blocks)


def test_a_request_that_insists_saves_no_block_that_was_loaded_without_its_fine_part(lossy):
    lossy.client.coarse = {1, 2, 3, 4}
    run_loaded(lossy)
    assert finish_next(lossy, "next", SHARED, 20, fidelity="fine") == {
        (0, 0): 1,
        (0, 5): 11,
        (1, 5): 12,
    }


def test_blocks_that_a_request_holds_stay_lossy_though_it_passes_by(lossy):
    run_loaded(lossy)
    request = make_request(26, name="streamed", num_computed_tokens=20, resumable=True)
    lossy.side.on_new_request(request)
    assert lossy.side.num_new_matched_tokens(request, 20) == (0, False)
    lossy.admit(request, SHARED)
    assert lossy.step(new=[(request, SHARED, 6)]).handed_out == [11, 12]
    lossy.side.request_finished(request)
    assert finish_next(lossy, "next", SHARED, 20) == {(0, 0): 1, (0, 5): 11, (1, 5): 12}
    assert lossy.side._passes_by == {}


def test_a_preempted_request_is_handed_its_blocks_anew(lossy):
    """It may compute into them what it had loaded there, or load it once more."""
    request, order = load_lossy(lossy, tokens=26)
    request.num_computed_tokens = 20
    lossy.step(new=[(request, TABLES, 6)])
    lossy.client.hit_blocks = 0
    assert preempted(lossy, request, 0) == (0, False)
    lossy.admit(request, TABLES)
    meta = lossy.step(resumed=[(request, TABLES, 26)])
    assert meta.handed_out == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert not any(block in lossy.side._lossy for block in order.lossy_blocks)

    lossy.client.hit_blocks = 5
    assert preempted(lossy, request, 4) == (16, True)
    lossy.admit(request, TABLES, 16)
    assert lossy.step().handed_out == [2, 3, 4, 5, 6, 7, 8, 9]
    request.num_computed_tokens = 20
    assert lossy.step(resumed=[(request, TABLES, 6)]).handed_out == [8, 9]
    assert all(block in lossy.side._lossy for block in (2, 3, 4, 5, 6, 7))


def preempted(engine, request, local_tokens: int):
    """Preempt a request; return what is offered when it is to run again."""
    request.num_preemptions += 1
    request.num_computed_tokens = 0
    request.status = SimpleNamespace(name="PREEMPTED")
    assert engine.side.num_new_matched_tokens(request, local_tokens) == (None, False)
    return engine.side.num_new_matched_tokens(request, local_tokens)


def test_what_was_loaded_lossy_is_not_saved_for_another_request_either(lossy):
    """The engine keeps it in its own cache, and the daemon may have lost it meanwhile."""
    run_loaded(lossy)
    found = finish_next(lossy, "next", SHARED, 20)
    # The first block is exact. The window's blocks in front of it are not there.
    assert found == {(0, 0): 1, (0, 5): 11, (1, 5): 12}


def test_blocks_that_are_used_for_something_else_are_saved_again(lossy):
    run_loaded(lossy)
    assert finish_next(lossy, "other", ([1, 2, 3, 4, 5, 8], OTHERS), 0) == {
        (0, block): device for block, device in enumerate([1, 2, 3, 4, 5, 8])
    } | {(1, block): OTHERS[block] for block in (4, 5)}


def test_blocks_whose_load_failed_are_computed_and_saved(lossy):
    request, order = load_lossy(lossy)
    assert order.lossy_blocks
    lossy.side.loads_failed({"r"})
    tables = ([1, 2, 3, 4, 5, 8], [10, 11, 12, 6, 7, 9])
    lossy.step(new=[(request, tables, 22)])
    assert (0, 4) in saved(lossy.step())


# ---- saving --------------------------------------------------------------------------------------
