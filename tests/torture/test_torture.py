"""A few lives of `make torture`, and that broken promises are found at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.model.block import Committed, Part
from kvstore.testing.samples import sample_keys
from tests.torture import several
from tests.torture.check import check
from tests.torture.control import CALLS
from tests.torture.journal import Journal
from tests.torture.parts import coarse_and_mixed
from tests.torture.plan import DEATHS, plan
from tests.torture.process import NONCES, nonces
from tests.torture.run import (
    good,
    torture,
    torture_encrypted,
    torture_several,
    torture_shared,
    torture_tenants,
)
from tests.torture.spaces import FIXED, LOSSY, Item, record_bytes, size_of
from tests.torture.world import SteeredDaemon, World

NAMESPACE = FIXED
NBYTES = NAMESPACE.groups[0].record_nbytes
KEYS = sample_keys("torture", 4)
ITEMS = [Item(NAMESPACE.id, key, Part(0, 0)) for key in KEYS]
DURABLE = Committed(4, 0, 0, True)


@pytest.mark.fault
def test_promises_are_kept_whatever_kills_the_daemon() -> None:
    result = torture(plan(3, seed=5, deaths=("gc", "punch", "start"), lives_per_cap=1), World())
    assert good(result), result
    assert result["kills"] >= 3
    assert result["durable_records"] > 0


@pytest.mark.fault
def test_promises_are_kept_with_a_bucket_that_answers_wrongly() -> None:
    result = torture_shared(plan(2, seed=3, deaths=("drain", "timer"), troubles=("anything",)))
    assert good(result), result
    assert result["fetched_blocks"] > 0  # by the second life, on an empty disk
    assert result["bucket_faults"]


@pytest.mark.fault
def test_promises_are_kept_on_several_directories_of_which_some_are_missing() -> None:
    troubles = tuple(several.TROUBLES)
    result = torture_several(plan(3, seed=28, deaths=("timer", "write"), troubles=troubles))
    assert good(result), result
    assert result["away"] >= result["back"] > 0
    assert result["durable_records"] > 0


@pytest.mark.fault
def test_promises_are_kept_encrypted_and_no_nonce_is_used_twice() -> None:
    result = torture_encrypted(plan(3, seed=6, deaths=("gc", "seal", "timer"), lives_per_cap=2))
    assert good(result), result
    assert result["durable_records"] > 0
    assert result["nonces"] > result["nonce_reused"] == 0


@pytest.mark.fault
def test_promises_are_kept_of_two_tenants_and_neither_sees_the_other() -> None:
    result = torture_tenants(plan(3, seed=9, deaths=("gc", "write", "timer"), lives_per_cap=2))
    assert good(result), result
    assert result["durable_records"] > 0
    assert result["nonces"] > result["nonce_reused"] == 0


def test_a_seed_draws_the_same_lives_again_and_every_death() -> None:
    lives = plan(len(DEATHS), seed=7)
    assert lives == plan(len(DEATHS), seed=7) != plan(len(DEATHS), seed=8)
    assert {life.death for life in lives} == set(DEATHS)
    assert {call for life in lives if life.rule for call in life.rule.calls} == set(CALLS)


class Store:
    """A daemon with four durable records, and the journal of them."""

    def __init__(self, daemon: SteeredDaemon) -> None:
        self.daemon = daemon
        self.files = daemon.directory / "file"
        self.journal = Journal()
        daemon.start()
        with Client(daemon.target) as client:
            client.register(NAMESPACE)
            call = self.journal.put(ITEMS)
            records = [record_bytes(item, call.number, NBYTES) for item in ITEMS]
            done = client.put(NAMESPACE.id, KEYS, records, durable=True)
            self.journal.put_done(call, ITEMS, NBYTES, done)

    def delete(self) -> None:
        with Client(self.daemon.target) as client:
            call = self.journal.delete(*KEYS)
            client.admin.delete(NAMESPACE.id, KEYS)
            self.journal.delete_done(call)

    def die(self) -> None:
        self.daemon.kill()
        self.journal.life_over()

    def check(self) -> set[str]:
        """Return the kinds of promises that were broken."""
        self.daemon.start()
        with Client(self.daemon.target) as client:
            broken = check(client, self.journal, lambda: None)
        return {text.partition(":")[0] for text in broken}


@pytest.fixture
def store() -> Iterator[Store]:
    with SteeredDaemon() as daemon:
        yield Store(daemon)


@pytest.mark.fault
def test_a_durable_block_that_is_gone_is_found(store: Store) -> None:
    store.die()
    for segment in store.files.glob("*.segment"):
        segment.unlink()
    assert store.check() == {"lost"}


@pytest.mark.fault
def test_a_deleted_block_that_comes_back_is_found(store: Store, tmp_path: Path) -> None:
    kept = shutil.copytree(store.files, tmp_path / "kept")
    store.delete()
    store.die()
    shutil.rmtree(store.files)
    shutil.copytree(kept, store.files)
    assert store.check() == {"resurrected"}


def test_the_journal_knows_what_may_be_served() -> None:
    journal = Journal()
    first = journal.put(ITEMS)
    journal.put_done(first, ITEMS, NBYTES, DURABLE)
    old, item = record_bytes(ITEMS[0], first.number, NBYTES), ITEMS[0]
    assert set(journal.owed()) == set(ITEMS)
    assert journal.judge(item, old, first.end) == ""
    assert journal.judge(item, old[:-1] + b"?", first.end) == "wrong"
    assert journal.judge(ITEMS[1], old, first.end) == "wrong"

    failed = journal.delete(KEYS[0])  # it may have happened, or happen yet
    assert journal.judge(item, old, failed.begin) == ""
    assert item not in set(journal.owed())
    journal.life_over()

    deleted = journal.delete(NAMESPACE.id)
    journal.delete_done(deleted)
    assert not set(journal.owed())
    assert journal.judge(item, old, deleted.begin) == ""  # asked before it was answered
    assert journal.judge(item, old, deleted.end + 1) == "resurrected"
    assert not journal.may_exist(item)


def test_what_only_another_tenant_has_put_is_foreign() -> None:
    mine, theirs = Journal(0), Journal(1)
    mine.others = [theirs]
    item, put = ITEMS[0], theirs.put(ITEMS)
    data = record_bytes(item, put.number, NBYTES)
    assert mine.judge(item, data, put.begin) == "foreign"
    assert mine.was_put_by_others(item)
    own = mine.put(ITEMS)
    assert own.number != put.number
    assert mine.judge(item, data, put.begin) == "foreign"
    assert mine.judge(item, record_bytes(item, own.number, NBYTES), own.begin) == ""
    assert not mine.was_put_by_others(item)


def test_a_nonce_that_a_key_uses_twice_is_counted(tmp_path: Path) -> None:
    entries = [bytes([key]) * 32 + bytes([nonce]) * 12 for key, nonce in ((1, 1), (1, 2), (2, 1))]
    (tmp_path / NONCES).write_bytes(b"".join([*entries, entries[1]]))
    assert nonces(tmp_path) == (4, 1)


def test_parts_of_two_puts_and_coarse_blocks_are_found() -> None:
    def copy(part: Part, number: int, block: int) -> tuple[Item, int, bytes]:
        item = Item(LOSSY.id, KEYS[block], part)
        return item, block, record_bytes(item, number, size_of(item, block, number))

    base, fine = Part(0, 0), Part(2, 0)
    whole = [copy(base, 1, 0), copy(base, 1, 1), copy(fine, 1, 1)]
    assert coarse_and_mixed(whole, refined=True) == []
    assert coarse_and_mixed(whole[:2], refined=False) == []
    (coarse,) = coarse_and_mixed(whole[:2], refined=True)
    assert coarse.startswith("wrong: a block without its fine part")
    (mixed,) = coarse_and_mixed([*whole[:2], copy(fine, 2, 1)], refined=False)
    assert mixed.startswith("wrong: a fine part beside the base of another put")
    lossy_first = [(copy(base, 1, 1)[0], 0, copy(base, 1, 1)[2])]
    (first,) = coarse_and_mixed(lossy_first, refined=False)
    assert first.startswith("wrong: the first block is not exact")


def test_an_answer_that_is_read_after_the_daemon_died_counts_for_what_it_said() -> None:
    journal = Journal()
    durable, loose = journal.put(ITEMS[:1]), journal.put(ITEMS[1:])
    journal.life_over()
    journal.put_done(durable, ITEMS[:1], NBYTES, Committed(1, 0, 0, True))
    journal.put_done(loose, ITEMS[1:], NBYTES, Committed(3, 0, 0, False))
    journal.flushed(loose.end + 1)  # in the next life, which knows nothing of it
    assert set(journal.owed()) == {ITEMS[0]}


def test_the_journal_excuses_what_was_evicted_or_damaged_until_it_is_put_anew() -> None:
    journal = Journal()
    first = journal.put(ITEMS)
    journal.put_done(first, ITEMS, NBYTES, DURABLE)
    journal.evicted(ITEMS[0], first.end)
    journal.damaged(ITEMS[1])
    assert set(journal.owed()) == set(ITEMS[2:])
    again = journal.put(ITEMS)
    journal.put_done(again, ITEMS, NBYTES, Committed(3, 1, 0, True))  # which one was there?
    assert set(journal.owed()) == {ITEMS[0], *ITEMS[2:]}
    anew = journal.put(ITEMS)
    journal.put_done(anew, ITEMS, NBYTES, DURABLE)
    assert set(journal.owed()) == set(ITEMS)
