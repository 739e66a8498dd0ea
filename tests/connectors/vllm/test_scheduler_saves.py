"""What the scheduler side saves, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstore.model.block import BlockKey
from kvstore.model.tokens import BlockTokens
from kvstore_vllm.metadata import pieces
from kvstore_vllm.tracked import Tracked
from tests.connectors.vllm.scheduler_engine import (
    BLOCK,
    NAMESPACE,
    Engine,
    keys_of,
    make_request,
    run_prompt,
    saved,
)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_blocks_are_saved_by_the_step_after_the_one_that_computed_them(engine):
    request = make_request(18)
    tables = ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    assert saved(run_prompt(engine, request, tables)) == {}
    engine.sample(request, 99)
    meta = engine.step(cached=[(request, None, 1)])
    # All of the full group; of the window group only what a resume at the prompt's end needs.
    assert saved(meta) == {
        (0, 0): 1,
        (0, 1): 2,
        (0, 2): 3,
        (0, 3): 4,
        (1, 2): 13,
        (1, 3): 14,
    }
    (order,) = meta.saves
    assert order.keys == tuple(keys_of(request)[:4])
    assert order.parent is None


def test_generated_blocks_are_saved_when_full_and_at_the_end(engine):
    request = make_request(18)
    run_prompt(engine, request, ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15]))
    engine.sample(request, 70)
    assert len(saved(engine.step(cached=[(request, None, 1)]))) == 6
    engine.sample(request, 71)  # token 19, the last of block 4, is computed by the next step
    assert saved(engine.step(cached=[(request, None, 1)])) == {}
    engine.sample(request, 72)
    engine.side.request_finished(request)
    assert engine.side.has_pending_saves
    meta = engine.step()
    assert saved(meta) == {(0, 4): 5, (1, 4): 15}
    (order,) = meta.saves
    assert order.first_block == 4
    assert order.parent == keys_of(request)[3]
    assert not engine.side.has_pending_saves


def test_a_block_is_keyed_only_when_its_tokens_are_final():
    """With drafts, the newest token may differ from the one whose KV was computed."""
    engine = Engine(drafts=True)
    request = make_request(16)
    run_prompt(engine, request, ([1, 2, 3, 4], [11, 12, 13, 14]))
    meta = engine.step()
    assert (0, 3) not in saved(meta)
    engine.manager.tables["r"] = ([1, 2, 3, 4], [0, 12, 13, 14])
    engine.sample(request, 70)
    assert saved(engine.step()) == {(0, 3): 4, (1, 3): 14}


def test_a_late_block_that_was_given_away_meanwhile_is_not_saved():
    engine = Engine(drafts=True)
    request = make_request(16)
    run_prompt(engine, request, ([1, 2, 3, 4], [11, 12, 13, 14]))
    engine.step()
    engine.manager.tables["r"] = ([1, 2, 3, 4], [0, 0, 0, 0])
    engine.sample(request, 70)
    assert saved(engine.step()) == {(0, 3): 4}


def test_rejected_drafts_are_not_saved():
    engine = Engine(drafts=True)
    request = make_request(14)
    run_prompt(engine, request, ([1, 2, 3, 4], [11, 12, 13, 14]))
    engine.sample(request, 70)
    engine.step(cached=[(request, None, 4)])  # one token and three drafts: positions 14 to 17
    request.num_computed_tokens = 15  # all drafts rejected
    engine.sample(request, 71)
    assert (0, 3) not in saved(engine.step(cached=[(request, None, 1)]))


def test_null_blocks_are_never_saved(engine):
    request = make_request(18)
    run_prompt(engine, request, ([1, 2, 3, 4, 5], [0, 0, 0, 14, 15]))
    assert {key for key in saved(engine.step()) if key[0] == 1} == {(1, 3)}


def test_loaded_blocks_are_not_saved_again(engine):
    request = make_request(26)
    engine.client.hit_blocks = 4
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 0)
    engine.admit(request, ([1, 2, 3, 4], [0, 0, 5, 6]), 16)
    engine.step()
    request.num_computed_tokens = 16
    tables = ([1, 2, 3, 4, 7, 8, 9], [0, 0, 5, 6, 10, 11, 12])
    engine.admit(request, tables)
    engine.step(new=[(request, tables, 10)])
    assert saved(engine.step()) == {(0, 4): 7, (0, 5): 8, (1, 4): 10, (1, 5): 11}


def test_a_preempted_requests_blocks_are_saved_before_they_are_overwritten(engine):
    request = make_request(18)
    run_prompt(engine, request, ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15]))
    request.num_preemptions, request.num_computed_tokens = 1, 0
    request.status = SimpleNamespace(name="PREEMPTED")
    assert len(saved(engine.step())) == 6
    assert saved(engine.step()) == {}, "one step later the blocks are somebody else's"


def test_long_prompts_are_saved_in_bounded_orders_that_continue_each_other(engine):
    request = make_request(BLOCK * 300)
    table = list(range(1, 301))
    run_prompt(engine, request, (table, [0] * 300))
    orders = engine.step().saves
    assert [order.first_block for order in orders] == [0, 128, 256]
    keys = keys_of(request)
    assert [key for order in orders for key in order.keys] == keys
    assert [order.parent for order in orders] == [None, keys[127], keys[255]]


def test_blocks_given_to_running_requests_are_announced(engine):
    request = make_request(8)
    meta = run_prompt(engine, request, ([1, 2], [11, 12]))
    assert meta.handed_out == [1, 2, 11, 12]
    engine.sample(request, 70)
    meta = engine.step(cached=[(request, ([3], [13]), 1)])
    assert meta.handed_out == [3, 13]


def test_a_consumer_saves_nothing_and_a_producer_loads_nothing():
    request = make_request(18)
    consumer = Engine(saves=False)
    run_prompt(consumer, request, ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15]))
    assert saved(consumer.step()) == {}
    producer = Engine(loads=False)
    producer.client.hit_blocks = 3
    run_prompt(producer, make_request(18), ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15]))
    assert producer.client.asked == []
    assert saved(producer.step())


def test_after_a_reset_nothing_is_shared_with_the_past(engine):
    request = make_request(18)
    run_prompt(engine, request, ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15]))
    engine.side.reset_cache()
    meta = engine.step(cached=[(request, None, 1)])
    assert saved(meta) == {}, "computed under the old weights"
    assert meta.epoch
    engine.side.on_new_request(make_request(18, "new"))
    assert not set(engine.client.asked[-1].keys) & set(keys_of(request))


def test_blocks_that_the_step_zeroes_are_not_saved(engine):
    """Workers may zero them before they tell the connector of the step."""
    request = make_request(18)
    run_prompt(engine, request, ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15]))
    engine.zeroed = [2, 14]
    assert saved(engine.step(cached=[(request, None, 1)])) == {
        (0, 0): 1,
        (0, 2): 3,
        (0, 3): 4,
        (1, 2): 13,
    }


def test_blocks_that_were_there_before_are_told_apart(engine):
    """The cache may have them: it is asked, before they are encoded."""
    for cached, reused in ((8, True), (0, False)):
        request = make_request(18, f"r{cached}", num_computed_tokens=cached)
        tables = ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
        engine.side.on_new_request(request)
        engine.side.num_new_matched_tokens(request, cached)
        engine.admit(request, tables)
        engine.step(new=[(request, tables, 18 - cached)])
        (order,) = engine.step(cached=[(request, None, 1)]).saves
        assert order.reused == reused
        engine.side.request_finished(request)
        engine.step()


def test_salts_keep_prefixes_apart(engine):
    for salt in (None, "alice", "bob"):
        engine.side.on_new_request(make_request(18, f"salt {salt}", cache_salt=salt))
    first_keys = [asked.keys[0] for asked in engine.client.asked]
    assert len(set(first_keys)) == 3
    assert first_keys[1] == keys_of(make_request(18), b"alice")[0]


def test_tokens_go_to_a_daemon_that_announces_and_to_no_other(engine):
    adapter = SimpleNamespace(lora_name="poet", lora_int_id=1, lora_path="/nowhere")
    tables = ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])

    def orders(**fields):
        request = make_request(18, **fields)
        assert saved(run_prompt(engine, request, tables)) == {}
        engine.sample(request, 99)
        return engine.step(cached=[(request, None, 1)]).saves

    assert [order.tokens for order in orders(name="a")] == [None]
    assert engine.client.asked[-1].tokens is None
    engine.client.announces = True
    (order,) = orders(name="b")
    assert order.tokens == BlockTokens.of(range(4 * BLOCK))
    assert engine.client.asked[-1].tokens == BlockTokens.of(range(4 * BLOCK))
    (one, two) = pieces(order, [1, 1], 4)
    assert (one.tokens, two.tokens) == (
        BlockTokens.of(range(2 * BLOCK)),
        BlockTokens.of(range(2 * BLOCK, 4 * BLOCK)),
    )
    # A prompt with a salt is nobody else's.
    assert [order.tokens for order in orders(name="c", cache_salt="s")] == [None]
    assert engine.client.asked[-1].tokens is None
    tracked = Tracked(make_request(18, lora_request=adapter), BlockKey(bytes(32)), NAMESPACE)
    assert tracked.tokens(1, 2) == BlockTokens.of(range(BLOCK, 2 * BLOCK), "poet")


def test_a_prompt_beyond_a_lookups_bound_has_the_window_there_as_well(engine):
    """A lookup asks for three blocks, so what the prompt's end needs alone would never be found."""
    engine.client.batch_keys_max = 3
    request = make_request(26)  # six full blocks
    tables = tuple([start + block for block in range(7)] for start in (1, 11))
    run_prompt(engine, request, tables)
    engine.sample(request, 99)
    meta = engine.step(cached=[(request, None, 1)])
    blocks = {group: {b for g, b in saved(meta) if g == group} for group in (0, 1)}
    assert blocks == {0: set(range(6)), 1: {1, 2, 4, 5}}
    assert max(len(order.keys) for order in meta.saves) == 3


def test_a_lookup_asks_for_no_more_than_the_daemon_takes(engine):
    engine.client.batch_keys_max = 3
    request = make_request(26)
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 0)
    (asked,) = engine.client.asked
    assert list(asked.keys) == keys_of(request)[:3]
