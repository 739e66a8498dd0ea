"""The worker side: copies, fences, leases, whatever goes wrong."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from kvstore import (
    BlockKey,
    Slot,
    Unavailable,
    checksum,
)
from kvstore.model.tokens import BlockTokens
from kvstore.testing.wait import until
from kvstore_vllm import worker
from kvstore_vllm.metadata import (
    FinePart,
    LoadOrder,
    LoadSpan,
    SaveOrder,
    SaveSpan,
    StepMetadata,
    in_epoch,
)
from kvstore_vllm.prefill import STEP_TOKENS_MIN, Step
from kvstore_vllm.settings import Settings
from kvstore_vllm.shards import Shards
from kvstore_vllm.worker import WorkerSide
from tests.connectors.vllm.worker_fakes import (
    NAMESPACE,
    RECORD,
    CodedPages,
    FakeClient,
    FakePages,
    LossyPages,
)


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
    pages.gate.set()
    side.close()


def make_side(client, pages, **settings) -> WorkerSide:
    values = Settings("unix:/k", reuse_wait_s=0.05, **settings)
    return WorkerSide(values, client, pages, NAMESPACE, shards=Shards(1), writes=True)


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 32)


def save_order(*device_blocks: int) -> SaveOrder:
    return SaveOrder(
        keys=tuple(map(key, range(len(device_blocks)))),
        first_block=3,
        parent=key(99),
        spans=(SaveSpan(0, 0, device_blocks), SaveSpan(1, 1, device_blocks[1:])),
    )


def load_order(client: FakeClient, **changes) -> LoadOrder:
    """Order a load of two records of group 0 into device blocks 7 and 8, shard 1."""
    for index in range(4):
        client.arena[index * RECORD : (index + 1) * RECORD] = bytes([50 + index]) * RECORD
    slots = [Slot(0, index * RECORD, RECORD) for index in range(4)]
    sums = [checksum(client.view(slot)) for slot in slots]
    span = LoadSpan(0, 1, (key(0), key(1)), tuple(slots[:2]), tuple(sums[:2]), (7, 8))
    other = LoadSpan(0, 0, (key(0),), tuple(slots[2:3]), tuple(sums[2:3]), (9,))
    order = LoadOrder(
        request_id="r",
        namespace_id=NAMESPACE.id,
        lease_id=5,
        instance="daemon-1",
        deadline=float("inf"),
        spans=(span, other),
        first_block=7,
        complete=True,
    )
    return replace(order, **changes)


def load(side: WorkerSide, order: LoadOrder) -> tuple[set[str], set[str]]:
    side.start_loads(StepMetadata(loads=[order]))
    until(lambda: not side.loader.pending)
    return side.results(computed=True)


# ---- saves ---------------------------------------------------------------------------------------


def test_large_steps_that_computed_are_timed(side):
    for tokens, computed in ((STEP_TOKENS_MIN, True), (STEP_TOKENS_MIN - 1, True), (9999, False)):
        meta = StepMetadata(step=Step(tokens, 7 * tokens))
        side.begin_step(meta)
        side.start_loads(meta)
        side.results(computed=computed)
    tokens, depth_tokens, seconds = side.clock.take()
    assert tokens == STEP_TOKENS_MIN
    assert depth_tokens == 7 * STEP_TOKENS_MIN
    assert seconds > 0
    assert side.clock.take() == (0, 0, 0.0)


def test_a_save_is_reserved_copied_and_committed_with_its_checksums(side, client, pages):
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert side.saver.drain(5)
    ((namespace_id, keys, first_block, parent, spans),) = client.reserved
    assert (namespace_id, keys, first_block, parent) == (
        NAMESPACE.id,
        (key(0), key(1)),
        3,
        key(99),
    )
    assert spans == (((0, 1), 0, 2), ((1, 1), 1, 2))
    expected = [pages.blocks[0, 4], pages.blocks[0, 5], pages.blocks[1, 5]]
    assert bytes(client.arena[: 3 * RECORD]) == b"".join(expected)
    assert client.committed == {1: [checksum(record) for record in expected]}
    assert side.counters.totals["saved_blocks"] == 3
    assert side.counters.totals["saved_bytes"] == 3 * RECORD


def test_only_what_is_not_stored_yet_is_copied(side, client, pages):
    client.existing = 2
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert side.saver.drain(5)
    assert client.committed == {1: [0, 0, checksum(pages.blocks[1, 5])]}
    client.existing = 3
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert side.saver.drain(5)
    assert 2 not in client.committed
    assert client.released == [2]


def coded_side(client, **changes) -> tuple[WorkerSide, CodedPages, SaveOrder]:
    pages = CodedPages()
    order = replace(save_order(4, 5, 6), reused=True, **changes)
    return make_side(client, pages), pages, order


def test_of_reused_blocks_only_what_is_not_stored_is_encoded(client):
    side, pages, order = coded_side(client)
    client.stored = [True, False, True, True, False]  # blocks 4, 5, 6 of one group, 5, 6 of another
    side.begin_step(StepMetadata(saves=[order]))
    assert side.saver.drain(5)
    assert pages.encoded == [(0, 5), (1, 6)]
    ((_, keys, first_block, _, spans),) = client.reserved
    assert (keys, first_block) == (order.keys, 3)
    assert spans == (((0, 1), 1, 2), ((1, 1), 2, 3))
    assert side.counters.totals["known_blocks"] == 3
    client.stored = [True] * 5
    side.begin_step(StepMetadata(saves=[order]))
    assert side.saver.drain(5)
    assert len(pages.encoded) == 2
    assert len(client.reserved) == 1
    side.close()


def test_blocks_that_are_new_are_not_asked_for(client):
    side, pages, order = coded_side(client)
    side.begin_step(StepMetadata(saves=[replace(order, reused=False)]))
    assert side.saver.drain(5)
    assert pages.encoded == [(0, 4), (0, 5), (0, 6), (1, 5), (1, 6)]
    side.close()


def test_a_daemon_that_announces_is_told_the_tokens_of_what_it_has(client):
    tokens = BlockTokens.of(range(12))
    side, pages, order = coded_side(client, tokens=tokens)
    client.stored = [True] * 5
    side.begin_step(StepMetadata(saves=[order]))
    assert side.saver.drain(5)
    ((_, keys, _, _, spans),) = client.reserved
    assert (pages.encoded, keys, spans, client.told) == ([], order.keys, (), [tokens])
    assert client.released == [1]
    side.close()


def test_a_save_that_is_given_up_while_the_daemon_is_asked_encodes_nothing(client):
    side, pages, order = coded_side(client)
    client.stored = [False] * 5
    asked = client.submit

    def overwritten_meanwhile(make):
        found = asked(make)
        if not client.reserved:
            threading.Thread(target=side.saver.fence, args=[[4]]).start()
            until(lambda: side.counters.totals["saves_dropped_reuse"] == 1)
        return found

    client.submit = overwritten_meanwhile
    side.begin_step(StepMetadata(saves=[order]))
    assert side.saver.drain(5)
    assert (pages.encoded, client.reserved) == ([], [])
    side.close()


def test_the_fence_waits_for_a_copy_out_of_blocks_about_to_be_reused(client, pages):
    side = make_side(client, pages)
    side.saver.reuse_wait_s = 10.0
    pages.gate.clear()
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert pages.copying.wait(5)
    threading.Timer(0.05, pages.gate.set).start()
    side.begin_step(StepMetadata(handed_out=[5]))
    pages.blocks[0, 5] = b"overwritten"
    assert side.saver.drain(5)
    assert len(client.committed) == 1
    assert side.counters.totals["saves_dropped_reuse"] == 0
    assert side.counters.totals["reuse_wait_seconds"] > 0
    side.close()


def test_a_copy_that_takes_too_long_is_given_up_and_never_committed(side, client, pages):
    pages.gate.clear()
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert pages.copying.wait(5)
    side.begin_step(StepMetadata(handed_out=[5]))
    assert side.counters.totals["saves_dropped_reuse"] == 1
    pages.gate.set()
    assert side.saver.drain(5)
    assert client.committed == {}
    assert client.released == [1]


def test_a_queued_save_is_given_up_without_being_reserved(side, client, pages):
    pages.gate.clear()
    side.begin_step(StepMetadata(saves=[save_order(4, 5), save_order(6, 7)]))
    assert pages.copying.wait(5)
    side.begin_step(StepMetadata(handed_out=[6]))
    pages.gate.set()
    assert side.saver.drain(5)
    assert len(client.reserved) == 1


def test_before_the_blocks_are_unmapped_no_save_reads_them_any_more(side, client, pages):
    pages.gate.clear()
    side.begin_step(StepMetadata(saves=[save_order(4, 5), save_order(6, 7)]))
    assert pages.copying.wait(5)
    threading.Timer(0.05, pages.gate.set).start()
    side.stop_reading()
    assert pages.gate.is_set(), "it has not waited for the copy that was under way"
    assert side.saver.drain(0)
    assert client.committed == {}
    assert len(client.reserved) == 1
    assert side.counters.totals["saves_dropped_reuse"] == 2
    side.stop_reading()  # vLLM may call it again
    side.begin_step(StepMetadata(saves=[save_order(8, 9)]))
    assert side.saver.drain(5)
    assert len(client.committed) == 1


def test_a_copy_that_does_not_end_is_reported_before_sleep(side, pages, monkeypatch, caplog):
    monkeypatch.setattr(worker, "SLEEP_WAIT_S", 0.05)
    pages.gate.clear()
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert pages.copying.wait(5)
    side.stop_reading()
    assert "sleep=unsafe" in caplog.text


def test_other_blocks_may_be_reused_while_a_copy_hangs(side, pages):
    pages.gate.clear()
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert pages.copying.wait(5)
    side.begin_step(StepMetadata(handed_out=[6, 7]))
    assert side.counters.totals["reuse_wait_seconds"] == 0
    assert side.counters.totals["saves_dropped_reuse"] == 0


def test_a_daemon_that_hangs_costs_one_wait_not_one_per_step(side, pages):
    pages.gate.clear()
    side.begin_step(StepMetadata(saves=[save_order(block, 20) for block in range(8)]))
    assert pages.copying.wait(5)
    for block in range(8):
        side.begin_step(StepMetadata(handed_out=[block]))
    assert side.counters.totals["saves_dropped_reuse"] == 8
    assert side.counters.totals["reuse_wait_seconds"] < 0.1


def test_saves_are_dropped_and_counted_when_the_queue_is_full_or_the_daemon_away(client, pages):
    side = make_side(client, pages, save_queue_jobs=2)
    pages.gate.clear()
    side.begin_step(StepMetadata(saves=[save_order(block, 20) for block in range(5)]))
    assert side.counters.totals["saves_dropped_queue"] == 3
    client.available = False
    side.begin_step(StepMetadata(saves=[save_order(9, 20)]))
    assert side.counters.totals["saves_dropped_down"] == 1
    pages.gate.set()
    side.close()


@pytest.mark.parametrize("error", [Unavailable("gone"), RuntimeError("a bug")])
def test_the_save_thread_survives_errors(side, client, error):
    client.error = error
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert side.saver.drain(5)
    assert side.counters.totals["saves_dropped_down"] == 1
    client.error = None
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert side.saver.drain(5)
    assert len(client.committed) == 1


@pytest.mark.parametrize("error", [Unavailable("not mapped"), RuntimeError("a bug")])
@pytest.mark.parametrize("fails", ["view", "copy", "checksum", "commit"])
def test_a_save_that_fails_gives_its_slots_back(side, client, pages, fails, error):
    """Else they wait for the lease to end, in limbo for as long as the engine lives."""

    def fail(*_):
        raise error

    view, read, commit = client.view, pages.read, client.commit
    if fails == "view":
        client.view = fail
    elif fails == "commit":
        client.commit = fail
    elif fails == "copy":
        pages.read = fail
    else:
        pages.read = lambda *arguments: (fail() for _ in read(*arguments))
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert side.saver.drain(5)
    assert client.committed == {}
    assert client.released == [1]
    assert side.counters.totals["saves_dropped_down"] == 1
    client.view, pages.read, client.commit = view, read, commit
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert side.saver.drain(5)
    assert list(client.committed) == [2]
    assert client.released == [1]


def test_a_worker_that_holds_a_replica_saves_nothing(client, pages):
    side = WorkerSide(Settings("unix:/k"), client, pages, NAMESPACE, shards=Shards(0), writes=False)
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert side.saver.drain(5)
    assert client.reserved == []
    side.close()


def test_saves_follow_the_epoch(side, client):
    side.begin_step(StepMetadata(saves=[save_order(4, 5)], epoch="e1"))
    assert side.saver.drain(5)
    side.begin_step(StepMetadata(saves=[save_order(4, 5)], epoch="e2"))
    assert side.saver.drain(5)
    expected = [in_epoch(NAMESPACE, epoch).id for epoch in ("e1", "e2")]
    assert [namespace_id for namespace_id, *_ in client.reserved] == expected


# ---- loads ---------------------------------------------------------------------------------------


def test_a_load_copies_this_workers_shard_and_releases_once(side, client, pages):
    untouched = pages.blocks[0, 9]
    assert load(side, load_order(client)) == ({"r"}, set())
    assert pages.blocks[0, 7] == bytes([50]) * RECORD
    assert pages.blocks[0, 8] == bytes([51]) * RECORD
    assert pages.blocks[0, 9] == untouched
    assert client.released == [5]
    assert side.results(computed=True) == (set(), set()), "reported once"
    assert side.counters.totals["loaded_blocks"] == 2


def test_a_flipped_bit_fails_the_load_and_drops_the_block(side, client):
    order = load_order(client)
    client.arena[RECORD + 3] ^= 1
    assert load(side, order) == (set(), {"r"})
    assert client.corrupt == [key(1)]
    assert client.released == [5]
    assert side.counters.totals["corrupt_blocks"] == 1
    assert side.counters.totals["loaded_blocks"] == 0


def test_a_lease_lost_during_the_load_accuses_nobody(side, client):
    order = load_order(client)
    client.arena[3] ^= 1
    client.held = False
    assert load(side, order) == (set(), {"r"})
    assert client.corrupt == [], "the slot may have been somebody else's by then"


@pytest.fixture
def lossy_side(client):
    side = make_side(client, LossyPages())
    yield side
    side.close()


def lossy_order(client: FakeClient, **changes) -> LoadOrder:
    """The same load with a fine part for each record, of which the second is wrong."""
    order = load_order(client, **changes)
    fines = [FinePart(Slot(0, at * RECORD, RECORD), 0) for at in (20, 21)]
    fines[0] = fines[0]._replace(checksum=checksum(client.view(fines[0].slot)))
    return replace(order, spans=(replace(order.spans[0], fines=tuple(fines)), order.spans[1]))


def test_a_wrong_fine_part_is_reported_and_not_used(lossy_side, client):
    assert load(lossy_side, lossy_order(client)) == ({"r"}, set())
    assert client.corrupt == [key(1)]
    totals = lossy_side.counters.totals
    assert totals["corrupt_fine_blocks"] == 1
    assert totals["loaded_blocks"] == totals["loaded_lossy_blocks"] == 2
    assert totals["loaded_base_blocks"] == 1


def test_a_wrong_fine_part_fails_who_insists(lossy_side, client):
    assert load(lossy_side, lossy_order(client, refined=True)) == (set(), {"r"})
    assert client.corrupt == [key(1)]
    assert lossy_side.counters.totals["loaded_blocks"] == 0


@pytest.mark.parametrize("gone", [True, False])
def test_a_wrong_fine_part_of_a_lost_lease_accuses_nobody(lossy_side, client, gone):
    """The base part matched in time, so it was what its writer committed."""
    client.held = False
    if gone:
        client.release = lambda *_: (_ for _ in ()).throw(Unavailable("gone"))
    assert load(lossy_side, lossy_order(client)) == ({"r"}, set())
    assert client.corrupt == []
    assert lossy_side.counters.totals["corrupt_fine_blocks"] == 1


def test_a_wrong_base_part_fails_the_load_and_both_are_reported(lossy_side, client):
    order = lossy_order(client)
    client.arena[3] ^= 1
    assert load(lossy_side, order) == (set(), {"r"})
    assert client.corrupt == [key(0), key(1)]


@pytest.mark.parametrize("held", [True, False])
def test_a_load_that_outlives_its_deadline_counts_only_if_release_answers_held(
    side, client, pages, held
):
    client.held = held
    order = load_order(client, deadline=time.monotonic() + 0.2)
    pages.gate.clear()
    side.loader.put(order)
    until(lambda: time.monotonic() > order.deadline)
    pages.gate.set()
    until(lambda: not side.loader.pending)
    assert side.loader.take() == (({"r"}, set()) if held else (set(), {"r"}))
    assert client.released == [5]


def test_a_load_that_ended_in_time_waits_for_no_daemon(side, client):
    client.submit = lambda make: Future()
    assert load(side, load_order(client)) == ({"r"}, set())


@pytest.mark.parametrize(
    "changes", [{"complete": False}, {"instance": "daemon-2"}, {"deadline": 0.0}], ids=str
)
def test_slots_that_cannot_be_trusted_are_not_read(side, client, pages, changes):
    before = dict(pages.blocks)
    assert load(side, load_order(client, **changes)) == (set(), {"r"})
    assert pages.blocks == before
    assert client.released == [5]


def test_what_took_the_slower_path_is_counted_once(side, pages):
    for bounced in (0, 500, 500, 700):
        pages.bounced_nbytes = bounced
        side.results(computed=True)
        assert side.counters.totals["bounced_bytes"] == bounced


@pytest.mark.parametrize("slow_block", [7, 8])
def test_a_load_that_fails_in_one_thread_is_reported_when_no_other_writes_any_more(
    side, client, pages, slow_block
):
    """Once it is reported, the engine may give the device blocks to another request."""
    write, writing, gate = pages.write, threading.Event(), threading.Event()

    def one_fails_one_hangs(group, blocks, records, after):
        if slow_block not in blocks:
            raise Unavailable("gone")
        writing.set()
        assert gate.wait(10)
        write(group, blocks, records, after)

    pages.write = one_fails_one_hangs
    side.loader.put(load_order(client))
    assert writing.wait(10)
    side.loader.wait(0.1)
    assert side.loader.take() == (set(), set())
    assert client.released == []
    gate.set()
    until(lambda: not side.loader.pending)
    assert side.loader.take() == (set(), {"r"})
    assert pages.blocks[0, slow_block] == bytes([50 + slow_block - 7]) * RECORD


def test_threads_that_cannot_be_bound_to_the_device_still_work(client, pages):
    """A load that nobody reports is waited for without end."""

    def fail():
        raise OSError("no such processor")

    pages.enter_thread = fail
    side = make_side(client, pages)
    assert load(side, load_order(client)) == ({"r"}, set())
    side.begin_step(StepMetadata(saves=[save_order(4, 5)]))
    assert side.saver.drain(5)
    assert len(client.committed) == 1
    side.close()


@pytest.mark.parametrize("error", [Unavailable("gone"), RuntimeError("a bug")])
def test_every_load_is_reported_whatever_goes_wrong(side, client, pages, error):
    pages.error = error
    assert load(side, load_order(client)) == (set(), {"r"})
    pages.error, client.error = None, error
    assert load(side, load_order(client)) == (set(), {"r"})
    assert client.released == [5, 5], "the lease of both"
    client.error = None
    assert load(side, load_order(client)) == ({"r"}, set())
