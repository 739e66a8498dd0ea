"""What the scheduler side asks, and what it offers to the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstore import (
    Unavailable,
)
from kvstore_vllm.idle import IDLE_WAIT_S
from kvstore_vllm.prefill import Computed
from tests.connectors.vllm.scheduler_engine import (
    BLOCK,
    Engine,
    keys_of,
    make_request,
    run_prompt,
    saved,
)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_the_question_tells_what_computing_a_block_takes_once_that_is_known(engine):
    for name, told in (("a", Computed()), ("b", Computed(1000, 0, 2.0)), ("c", Computed())):
        engine.side.note_computed(told)
        engine.side.on_new_request(make_request(22, name))
    paces = [asked.recompute_s_per_block for asked in engine.client.asked]
    assert paces == [0.0, BLOCK * 2.0 / 1000, BLOCK * 2.0 / 1000]


def test_the_question_counts_with_the_depth_of_what_it_asks_for(engine):
    """A token with 100,000 before it took 10 times as long as one at the start."""
    for depth, seconds in ((500, 1.0), (100_500, 10.0)):
        engine.side.note_computed(Computed(1000, depth * 1000, seconds))
    engine.side.on_new_request(make_request(22))
    (asked,) = engine.client.asked
    assert asked.recompute_s_per_block == pytest.approx(BLOCK * 0.001, rel=0.1)


def test_a_hit_is_offered_beyond_what_the_engine_holds(engine):
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (20, True)
    assert engine.side.num_new_matched_tokens(request, 8) == (12, True)
    assert len(engine.client.asked) == 1, "asking again needs no new lookup"
    assert engine.client.asked[0].keys == keys_of(request)
    assert engine.side.counters.totals["offered_tokens"] == 20, "once, however often it is asked"


def test_a_token_is_left_to_compute(engine):
    request = make_request(20)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (16, True)


@pytest.mark.parametrize("local", [8, 12])
def test_what_the_engine_has_itself_is_not_offered_and_the_lease_goes_back(engine, local):
    request = make_request(22)
    engine.client.hit_blocks = 2
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, local) == (0, False)
    assert engine.client.released == [1]
    assert engine.side.num_new_matched_tokens(request, local) == (0, False)
    assert engine.client.released == [1]


def test_bytes_that_still_come_up_are_waited_for_until_the_deadline(engine, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    request = make_request(22)
    engine.client.hold, engine.client.hit_blocks = True, 5
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (None, False)
    engine.step()
    now = 104.9
    assert engine.side.num_new_matched_tokens(request, 0) == (None, False)
    now = 105.1
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    assert engine.side.counters.totals["lookups_late"] == 1
    engine.client.hold = False
    engine.client.answer()
    assert engine.client.released == [1], "an answer that came too late is given back"
    assert engine.client.doubts == 1, "whoever asks next does not wait as long"


def test_an_answer_in_time_is_offered(engine):
    request = make_request(22)
    engine.client.hold, engine.client.hit_blocks = True, 5
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (None, False)
    engine.client.answer()
    assert engine.side.num_new_matched_tokens(request, 0) == (20, True)


def test_an_answer_is_waited_for_once_a_step_while_nothing_is_computed(engine, monkeypatch):
    waited = []

    def answers(lookup, wait_s):
        waited.append(wait_s)
        engine.client.answer()

    monkeypatch.setattr("kvstore_vllm.lookup.Lookup.wait", answers)
    engine.client.hold, engine.client.hit_blocks = True, 5
    requests = [make_request(22, name) for name in ("first", "second")]
    for request in requests:
        engine.side.on_new_request(request)
    engine.client._held, later = engine.client._held[:1], engine.client._held[1:]
    assert engine.side.num_new_matched_tokens(requests[0], 0) == (20, True)
    assert engine.side.num_new_matched_tokens(requests[1], 0) == (None, False), "waited already"
    assert waited == [IDLE_WAIT_S]
    engine.client._held = later
    another = make_request(8, "another")
    engine.step(cached=[(another, None, 1)])
    assert engine.side.num_new_matched_tokens(requests[1], 0) == (None, False), "it is computing"
    engine.side.request_finished(another)
    assert engine.side.num_new_matched_tokens(requests[1], 0) == (20, True)


def test_a_daemon_that_fails_is_a_miss(engine):
    request = make_request(22)
    engine.client.error = Unavailable("gone")
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    engine.client.available = False
    other = make_request(22, "other")
    engine.side.on_new_request(other)
    assert engine.side.num_new_matched_tokens(other, 0) == (0, False)
    assert len(engine.client.asked) == 1, "with the breaker open nothing is asked"


def test_a_lease_about_to_run_out_is_renewed(engine, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    now = 128.0  # 2 s left of 30
    assert engine.side.num_new_matched_tokens(request, 0) == (None, False)
    assert engine.client.released == [1]
    assert engine.side.num_new_matched_tokens(request, 0) == (20, True)


def test_an_estimate_is_asked_for_again_and_never_offered(engine, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    request = make_request(22)
    engine.client.hit_blocks, engine.client.leased = 5, False
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (None, False)
    assert len(engine.client.asked) == 1, "not at once: other leases must end first"
    now = 101.0
    engine.client.leased = True
    assert engine.side.num_new_matched_tokens(request, 0) == (None, False)
    assert engine.side.num_new_matched_tokens(request, 0) == (20, True)


def test_blocks_held_locally_are_not_promoted(engine):
    engine.manager.get_computed_blocks = lambda request: (None, 8, 0)
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    assert engine.client.asked[0].skip == 2
    assert engine.side.num_new_matched_tokens(request, 8) == (12, True)


def test_a_local_hit_that_shrank_meanwhile_is_asked_for_again(engine):
    engine.manager.get_computed_blocks = lambda request: (None, 8, 0)
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 4) == (None, False)
    assert engine.client.released == [1]
    assert engine.side.num_new_matched_tokens(request, 4) == (16, True)


def test_a_request_that_is_aborted_gives_its_lease_back(engine):
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    engine.side.request_finished(request)
    assert engine.client.released == [1]
    assert saved(engine.step()) == {}


def test_a_failed_load_is_not_offered_again_and_what_is_computed_instead_is_saved(engine):
    request = make_request(22)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 0)
    engine.admit(request, ([1, 2, 3, 4, 5], [0, 0, 0, 6, 7]), 20)
    engine.step()
    engine.side.loads_failed({"r"})
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    tables = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    engine.admit(request, tables)
    engine.step(new=[(request, tables, 22)])
    assert len(saved(engine.step())) == 5 + 2


def test_a_preempted_request_asks_again(engine):
    request = make_request(22)
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    tables = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    engine.admit(request, tables)
    engine.step(new=[(request, tables, 22)])
    request.num_preemptions, request.num_computed_tokens = 1, 0
    request.status = SimpleNamespace(name="PREEMPTED")
    engine.client.hit_blocks = 5
    assert engine.side.num_new_matched_tokens(request, 0) == (None, False)
    assert engine.side.num_new_matched_tokens(request, 0) == (20, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": object()},
        {"resumable": True},
    ],
    ids=["prompt embeddings", "streaming session"],
)
def test_requests_whose_tokens_do_not_tell_their_kv_pass_by(engine, fields):
    request = make_request(22, **fields)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    tables = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    engine.admit(request, tables)
    engine.step(new=[(request, tables, 22)])
    meta = engine.step(cached=[(request, None, 1)])
    assert (engine.client.asked, saved(meta)) == ([], {})
    assert engine.side.counters.totals["bypassed_inputs"] == 1


def test_a_request_that_must_compute_its_prompt_is_saved_but_not_loaded(engine):
    request = make_request(22, skip_reading_prefix_cache=True)
    engine.client.hit_blocks = 5
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    tables = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    engine.admit(request, tables)
    engine.step(new=[(request, tables, 22)])
    assert saved(engine.step())


# ---- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loads", [True, False], ids=["loads", "saves only"])
@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 70])
def test_tokens_that_cannot_be_keyed_pass_by(loads, token):
    """Nothing that a request holds may raise in the scheduler: the engine would end."""
    engine = Engine(loads=loads)
    request = make_request(22, all_token_ids=[token] * 22)
    tables = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    assert saved(run_prompt(engine, request, tables)) == {}
    assert saved(engine.step(cached=[(request, None, 1)])) == {}
    engine.side.request_finished(request)
    assert saved(engine.step()) == {}
    assert engine.client.asked == []
    assert engine.side.counters.totals["bypassed_inputs"] == 1


def test_a_salt_may_be_any_text(engine):
    engine.side.on_new_request(make_request(22, "a", cache_salt="\ud800"))
    engine.side.on_new_request(make_request(22, "b", cache_salt="\ud801"))
    first, second = (asked.keys[0] for asked in engine.client.asked)
    assert first != second
