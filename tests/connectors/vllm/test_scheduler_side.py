"""What the scheduler side asks, offers, orders and saves, seen through vLLM's hooks."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from kvstore import (
    Grant,
    Group,
    HintKind,
    HintReport,
    KeyChain,
    Namespace,
    Part,
    Slot,
    Span,
    Unavailable,
    root_key,
)
from kvstore_vllm.scheduler import SchedulerSide
from kvstore_vllm.settings import Settings

BLOCK = 4
NAMESPACE = Namespace(
    block_tokens=BLOCK,
    groups=(Group("full", 64), Group("window", 64, window_tokens=6)),
    identity=(("model", "test"),),
)


class FakeClient:
    """Answers lookups like a daemon that holds the first `hit_blocks` blocks of everything."""

    def __init__(self) -> None:
        self.available = True
        self.instance = "daemon-1"
        self.hit_blocks = 0
        self.leased = True
        self.deadline_s = 30.0
        self.error: Exception | None = None
        self.hold = False  # leave new questions unanswered
        self.asked: list[SimpleNamespace] = []
        self.released: list[int] = []
        self.doubts = 0
        self.hints = self  # `client.hints.expect` and the others are below
        self.hinted: list[tuple] = []
        self._held: list[tuple[Future, object]] = []

    def submit(self, make) -> Future:
        future: Future = Future()
        self._held.append((future, make))
        if not self.hold:
            self.answer()
        return future

    def answer(self) -> None:
        held, self._held = self._held, []
        for future, make in held:
            try:
                future.set_result(asyncio.run(make(self)))
            except Unavailable as error:
                future.set_exception(error)

    async def doubt(self) -> None:
        self.doubts += 1

    def namespace(self, namespace_id):
        assert namespace_id == NAMESPACE.id or len(namespace_id) == 32

    async def acquire(
        self,
        namespace_id,
        keys,
        *,
        skip_blocks,
        readers,
        wait_s,
        request_id,
        recompute_s_per_block,
        session_id,
    ):
        self.asked.append(
            SimpleNamespace(
                keys=list(keys),
                skip=skip_blocks,
                readers=readers,
                name=request_id,
                recompute_s_per_block=recompute_s_per_block,
                session_id=session_id,
            )
        )
        if self.error is not None:
            raise self.error
        hit = max(skip_blocks, min(self.hit_blocks, len(keys)))
        if not self.leased:
            return Grant(0, 0.0, (), (), hit_blocks=hit, leased=False)
        spans = []
        for index, group in enumerate(NAMESPACE.groups):
            needed = group.blocks_needed(hit, BLOCK)
            spans.append(Span(Part(index, 0), max(skip_blocks, needed.start), hit))
        count = sum(end - begin for _, begin, end in spans)
        return Grant(
            lease_id=len(self.asked),
            deadline_s=self.deadline_s,
            spans=tuple(spans),
            slots=tuple(Slot(0, 4096 * i, 64) for i in range(count)),
            checksums=tuple(range(count)),
            hit_blocks=hit,
        )

    async def end_session(self, target):
        return self._hinted("end", target)

    async def expect(self, target, in_s):
        return self._hinted("expect", target, in_s)

    async def pin(self, target, ttl_s, *, bytes_max):
        return self._hinted("pin", target, ttl_s, bytes_max)

    async def demote(self, target):
        return self._hinted("demote", target)

    def _hinted(self, kind, target, *numbers):
        if self.error is not None:
            raise self.error
        self.hinted.append((kind, target.session_id, len(target.keys), *numbers))
        return HintReport(HintKind.END)

    async def release(self, *leases):
        self.released += leases
        return [True] * len(leases)


def make_request(tokens: int, name: str = "r", **fields) -> SimpleNamespace:
    fields = {
        "request_id": name,
        "all_token_ids": list(range(tokens)),
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "status": SimpleNamespace(name="WAITING"),
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "prompt_embeds": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "kv_transfer_params": None,
        **fields,
    }
    return SimpleNamespace(**fields)


class Engine:
    """Calls the hooks in the scheduler's order for one request at a time."""

    def __init__(self, **options) -> None:
        self.client = FakeClient()
        self.side = SchedulerSide(Settings("unix:/k"), self.client, readers=1, **options)
        self.side.use_namespace(NAMESPACE)
        self.manager = SimpleNamespace(tables={}, get_computed_blocks=lambda request: (None, 0, 0))
        self.manager.get_block_ids = self.manager.tables.get
        self.side.bind_kv_cache_manager(self.manager)

    def admit(self, request, tables, external=0):
        blocks = SimpleNamespace(get_block_ids=lambda: tables)
        self.side.update_state_after_alloc(request, blocks, external)

    def step(self, *, new=(), cached=()):
        """Run one step of (request, full block tables or new blocks, tokens scheduled)."""
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id,
                    block_ids=tables,
                    num_computed_tokens=request.num_computed_tokens,
                )
                for request, tables, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request, _, _ in cached],
                new_block_ids=[blocks for _, blocks, _ in cached],
                num_computed_tokens=[request.num_computed_tokens for request, _, _ in cached],
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens={r.request_id: count for r, _, count in (*new, *cached)},
        )
        meta = self.side.build_meta(output)
        for request, _, count in (*new, *cached):
            request.num_computed_tokens += count
            request.status = SimpleNamespace(name="RUNNING")
        return meta

    def sample(self, request, *tokens: int) -> None:
        request.all_token_ids += tokens
        request.num_tokens += len(tokens)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def keys_of(request, salt: bytes = b"") -> list[bytes]:
    return KeyChain(root_key(NAMESPACE.id, salt), BLOCK).update(request.all_token_ids)


def saved(meta) -> dict[tuple[int, int], int]:
    """Return {(group, block): device block} of all saves in a step."""
    return {
        (span.group, order.first_block + span.begin + i): device_block
        for order in meta.saves
        for span in order.spans
        for i, device_block in enumerate(span.device_blocks)
    }


# ---- asking and offering -------------------------------------------------------------------------


def test_the_question_tells_what_computing_a_block_takes_once_that_is_known(engine):
    for name, told in (("a", (0, 0.0)), ("b", (1000, 2.0)), ("c", (0, 0.0))):
        engine.side.note_computed(*told)
        engine.side.on_new_request(make_request(22, name))
    paces = [asked.recompute_s_per_block for asked in engine.client.asked]
    assert paces == [0.0, BLOCK * 2.0 / 1000, BLOCK * 2.0 / 1000]


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
    assert engine.step().waiting
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


def run_prompt(engine, request, tables):
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 0)
    engine.admit(request, tables)
    return engine.step(new=[(request, tables, request.num_tokens)])


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


def test_salts_keep_prefixes_apart(engine):
    for salt in (None, "alice", "bob"):
        engine.side.on_new_request(make_request(18, f"salt {salt}", cache_salt=salt))
    first_keys = [asked.keys[0] for asked in engine.client.asked]
    assert len(set(first_keys)) == 3
    assert first_keys[1] == keys_of(make_request(18), b"alice")[0]
