"""What is told, without sockets: a router that follows it knows what is there, and no more."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.decide.changed import IN_DRAM, IN_FILES
from kvstore.events import book as book_module
from kvstore.events.book import Book, Space, events_of
from kvstore.events.book import Told as Tokens
from kvstore.events.order import in_line
from kvstore.events.streams import Stream
from kvstore.events.table import Rows, Table
from kvstore.events.wire import payload
from kvstore.model.block import NamespaceId
from kvstore_kernels import native
from tests.events.consumer import Index

ID = NamespaceId(bytes(32))
SIZE = 4


@pytest.fixture(params=["native", "plain"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is the same with the native library and without."""
    if request.param == "plain":
        monkeypatch.setattr(native, "library", lambda: None)
    assert (native.library() is None) == (request.param == "plain")


def key(number: int) -> bytes:
    """Return a key whose first 8 bytes look like those of a hash."""
    return random.Random(number).randbytes(32)


def hash_of(number: int) -> int:
    return int.from_bytes(key(number)[:8], "little")


class Told:
    """A book, and a router that is told everything. Blocks are numbers; n follows parent[n]."""

    def __init__(self) -> None:
        self.book = Book()
        space = self.book.space(ID, "m", SIZE)
        assert space is not None
        self.space: Space = space
        self.router = Index()
        self.stream = self.streaming()
        self.time = 0.0

    def streaming(self, *, clears: bool = True, batches_max: int = 100) -> Stream:
        return Stream(
            b"",
            self.book,
            model=None,
            clears=clears,
            first=1000,
            batches_max=batches_max,
            now=0.0,
        )

    def know(self, numbers: list[int], parent: int | None = None) -> int:
        """Send tokens of blocks that follow each other; returns how many were new."""
        told = Tokens(
            b"".join(map(key, numbers)),
            np.array([[n] * SIZE for n in numbers], "<u4").tobytes(),
            hash_of(parent) if parent is not None else 0,
        )
        return len(self.book.know(self.space, [told], ""))

    def see(self, places: dict[int, int], *, found: bool = False) -> None:
        hashes = np.array([hash_of(n) for n in places], np.uint64)
        self.book.changed(self.space, hashes, np.array(list(places.values()), np.uint8), found)

    def tell(self) -> None:
        """Send all there is to send."""
        while self.book.dirty or self.stream.telling_all:
            self.time += 0.1
            batch = self.stream.batch(self.book.take(), self.time)
            if batch is not None:
                self.router.apply(payload(0.0, batch[1], 1000))

    @property
    def believed(self) -> dict[int, int]:
        bits = {"CPU": IN_DRAM, "STORAGE": IN_FILES}
        return {int(h): sum(bits[m] for m in where) for h, where in self.router.where.items()}


def test_a_router_follows_whatever_happens() -> None:
    draw = random.Random(5)
    told, places, tokens = Told(), dict[int, int](), dict[int, list[int]]()
    chains = [[c * 100 + i for i in range(draw.randint(1, 40))] for c in range(12)]
    for _ in range(300):
        chain = draw.choice(chains)
        begin = draw.randrange(len(chain))
        part = chain[begin : begin + draw.randint(1, 20)]
        if draw.random() < 0.5:
            told.know(part, chain[begin - 1] if begin else None)
            tokens.update(dict.fromkeys(part, part))
            change = {n: draw.choice((IN_DRAM, IN_DRAM | IN_FILES)) for n in part}
        else:
            change = {n: draw.choice((0, 0, IN_FILES)) if places.get(n) else 0 for n in part}
        places.update(change)
        told.see(change)
        if draw.random() < 0.3:
            told.tell()
        if draw.random() < 0.05:
            told.stream.join(told.time)
    told.tell()
    assert told.router.lost == 0
    # What follows a hole is held back: it is no hit.
    held = {each for waiting in told.space.held.values() for each in waiting}
    expected = {}
    for chain in chains:
        for n in chain:
            if not places.get(n) or n not in tokens:
                break
            expected[hash_of(n)] = places[n]
    assert told.believed == expected
    assert {hash_of(n) for n, place in places.items() if place} - expected.keys() <= held
    for number, its in tokens.items():
        if hash_of(number) in told.router.where:
            assert told.router.tokens[hash_of(number)] == (number,) * SIZE
            assert number in its


def test_a_block_is_told_once_its_parent_is() -> None:
    told = Told()
    told.know([1, 2, 3, 4])
    told.see({3: IN_DRAM, 4: IN_DRAM, 2: IN_DRAM})
    told.tell()
    assert told.believed == {}
    told.see({1: IN_FILES})
    told.tell()
    assert told.believed == {hash_of(n): 2 if n == 1 else 1 for n in (1, 2, 3, 4)}
    assert not told.space.held


def test_blocks_that_left_hold_no_place_of_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "HELD_MAX", 8)
    told = Told()
    for number in range(0, 400, 2):  # their parents never come
        told.know([number + 1], parent=number)
        for place in (IN_DRAM, IN_DRAM | IN_FILES, 0):
            told.see({number + 1: place})
            told.tell()
    assert (told.space.held, told.space.held_count) == ({}, 0)
    assert not told.book.dropped
    told.know([1000, 1001])
    told.see({1001: IN_DRAM})
    told.tell()
    told.see({1000: IN_DRAM})
    told.tell()
    assert told.believed == {hash_of(1000): IN_DRAM, hash_of(1001): IN_DRAM}


def test_blocks_that_wait_for_their_parents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "HELD_MAX", 8)
    told = Told()
    for number in range(0, 40, 2):
        told.know([number + 1], parent=number)
        told.see({number + 1: IN_DRAM})
    told.tell()
    assert told.space.held_count == 8
    assert told.book.dropped == {"parent": 12}


def test_what_comes_is_told_before_what_leaves() -> None:
    told = Told()
    told.know([1, 2])
    told.see({1: IN_DRAM, 2: IN_DRAM})
    told.tell()
    told.see({2: IN_FILES})
    steps = told.book.take()
    assert [(step.bit, step.came) for step in steps] == [(IN_FILES, True), (IN_DRAM, False)]


def test_tokens_are_kept_for_what_is_stored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "FRESH_MAX", 8)
    told = Told()
    for number in range(0, 400, 4):  # reserved, and never committed
        assert told.know([number, number + 1, number + 2, number + 3]) == 4
    assert told.book.announced <= 12
    assert told.book.dropped["uncommitted"] >= 388
    told.see({396: IN_DRAM})
    told.tell()
    told.see({396: 0})
    told.tell()
    assert hash_of(396) not in told.believed
    # One that is reserved again while it leaves keeps its tokens.
    told.know([500])
    told.see({500: IN_DRAM})
    told.tell()
    assert told.know([500]) == 0
    told.see({500: 0})
    told.tell()
    told.see({500: IN_DRAM})
    told.tell()
    assert hash_of(500) in told.believed


def test_keys_in_circles_end() -> None:
    told = Told()
    told.know([1], parent=2)
    told.know([2], parent=1)
    told.know([3], parent=3)
    told.know([4, 5, 6], parent=2)  # below a circle
    told.know([13], parent=12)
    told.know([10, 11, 12])
    told.see(dict.fromkeys((1, 2, 3, 4, 5, 6, 13, 10, 11, 12), IN_DRAM))
    told.tell()
    good = dict.fromkeys(map(hash_of, (10, 11, 12, 13)), IN_DRAM)
    assert told.believed == good
    told.stream.join(told.time)
    told.tell()
    assert told.believed == good


def test_who_joins_is_told_everything_parents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "BATCH_BLOCKS", 7)
    told = Told()
    told.know(list(range(50)))
    told.know([100, 101, 102], parent=19)
    told.see(dict.fromkeys((*range(50), 100, 101, 102), IN_DRAM))
    told.tell()
    before = told.believed
    told.stream.join(told.time)  # the first one: it may have believed an earlier life
    assert told.router.clears == 0
    told.tell()
    assert told.router.clears == 1
    assert told.believed == before
    # A second one, much later: the first goes on without a clear, and both are told what left.
    told.time += 1000
    late = Index()
    told.see({102: 0})
    told.tell()
    late.where[hash_of(102)] = {"CPU"}  # it was away when that was told
    told.stream.join(told.time)
    first, told.router = told.router, late
    told.tell()
    assert late.clears == 0
    assert told.believed.keys() == {hash_of(n) for n in (*range(50), 100, 101)}
    assert late.lost == 0
    assert first.where.keys() == late.where.keys()


def test_replay_fills_a_gap_or_tells_everything() -> None:
    told = Told()
    told.stream = told.streaming(batches_max=5)
    for number in range(20):
        told.know([number], number - 1 if number else None)
        told.see({number: IN_DRAM})
        told.tell()
    how, batches = told.stream.replay(1017)
    numbers = [number for number, _ in batches]
    assert (how, numbers) == ("kept", [1017, 1018, 1019])
    how, batches = told.stream.replay(1003)
    router = Index()
    got = list(batches)
    for _, events in got:
        router.apply(payload(0.0, events, 1000))
    assert how == "whole"
    assert got[-1][0] == 1019
    assert router.clears == 1
    assert router.where == told.router.where
    how, batches = told.stream.replay(1020)
    assert (how, list(batches)) == ("future", [])


def test_a_replay_tells_nothing_that_is_not_so_any_more() -> None:
    told = Told()
    told.know([1, 2])
    told.see({1: IN_DRAM, 2: IN_DRAM})
    told.tell()
    told.see({2: 0})
    told.tell()
    router = Index()
    for _, events in told.stream.replay(1000)[1]:
        router.apply(payload(0.0, events, None))
    assert router.where == {hash_of(1): {"CPU"}}


def test_in_an_engines_topic_blocks_are_taken_back_by_name() -> None:
    told = Told()
    told.stream = told.streaming(clears=False)
    told.see({7: IN_FILES, 8: IN_FILES}, found=True)
    told.router.where = {hash_of(7): {"CPU", "STORAGE"}, 12345: {"GPU"}}
    told.stream.join(0.0)
    told.tell()
    assert told.router.clears == 0
    assert told.router.where == {12345: {"GPU"}}


def test_the_table_finds_what_is_there() -> None:
    draw = np.random.default_rng(3)
    table, there = Table(SIZE), dict[int, int]()
    for _ in range(60):
        new = draw.integers(1, 1 << 63, 500, dtype=np.uint64)
        new = np.unique(new[table.find(new) < 0])
        tokens = np.repeat(new.astype(np.uint32), SIZE).reshape(-1, SIZE)
        rows = table.add(new, new, tokens, 0)
        there.update(zip(new.tolist(), rows.tolist(), strict=True))
        old = np.array(draw.permutation(list(there))[:300], np.uint64)
        table.remove(table.find(old))
        for each in old.tolist():
            del there[each]
        assert len(table) == len(there)
    hashes = np.array(list(there), np.uint64)
    rows = table.find(hashes)
    assert rows.tolist() == list(there.values())
    assert (table.tokens[rows][:, 0] == hashes.astype(np.uint32)).all()
    assert sorted(table.rows().tolist()) == sorted(there.values())
    assert (table.find(hashes ^ np.uint64(1 << 40)) < 0).all()


def test_the_table_tells_apart_hashes_that_look_alike() -> None:
    """They share a bucket, and a tag: their low 8 bits, and those from the 16th on."""
    table = Table(SIZE)
    alike = (np.arange(1, 41, dtype=np.uint64) << np.uint64(48)) + np.uint64(0x1234_5678)
    tags = (np.arange(256, dtype=np.uint64)) + (np.uint64(7) << np.uint64(48))  # 0 and 1 too
    hashes = np.concatenate([alike, tags])
    tokens = np.zeros((len(hashes), SIZE), np.uint32)
    rows = table.add(hashes, hashes, tokens, 0)
    assert sorted(rows.tolist()) == list(range(len(hashes)))
    assert (table.find(hashes) == rows).all()
    assert (table.find(alike + np.uint64(1 << 57)) < 0).all()
    table.remove(rows[:20])
    assert (table.find(hashes) == np.where(np.arange(len(hashes)) < 20, -1, rows)).all()
    again = table.add(hashes[:20], hashes[:20], tokens[:20], 0)
    assert sorted(again.tolist()) == sorted(rows[:20].tolist())
    assert (table.find(hashes[:20]) == again).all()


def test_no_block_has_the_hash_that_means_none() -> None:
    told = Told()
    zero = Tokens(bytes(8) + key(1)[8:], bytes(4 * SIZE), 0)
    assert len(told.book.know(told.space, [zero], "")) == 0
    told.know([1, 2])
    told.see({1: IN_DRAM, 2: IN_DRAM})
    told.tell()
    told.see({2: 0})
    told.tell()
    hashes = np.zeros(1, np.uint64)
    told.book.changed(told.space, hashes, np.ones(1, np.uint8), False)
    told.tell()
    assert told.believed == {hash_of(1): IN_DRAM}


def test_a_hole_in_a_long_prefix_takes_back_what_follows_at_one_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, followers = list[int](), Table.followers

    def counted(table: Table, gone: Rows) -> Rows:
        looks.append(len(gone))
        return followers(table, gone)

    monkeypatch.setattr(Table, "followers", counted)
    told, long = Told(), 5000
    told.know(list(range(long)))
    told.know([10_000, 10_001], parent=10)  # beside the hole
    told.know([20_000, 20_001], parent=12)  # behind it
    told.know([30_000, 30_001])
    others = (10_000, 10_001, 20_000, 20_001, 30_000, 30_001)
    told.see(dict.fromkeys((*range(long), *others), IN_DRAM))
    told.tell()
    assert len(told.believed) == long + len(others)
    told.see({11: 0})
    told.tell()
    stay = (*range(11), 10_000, 10_001, 30_000, 30_001)
    assert told.believed == {hash_of(n): IN_DRAM for n in stay}
    assert looks == [1]
    told.know([11], parent=10)
    told.see({11: IN_DRAM})
    before = told.stream.next
    told.tell()
    assert told.stream.next - before <= 3  # not one batch after another, a block each
    assert told.believed == dict.fromkeys(map(hash_of, (*range(long), *others)), IN_DRAM)
    assert told.router.lost == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_in_which_they_came_parents_are_first(seed: int) -> None:
    draw = random.Random(seed)
    parents = {1: 0} | {n: draw.randrange(max(0, n - 1 - seed), n) for n in range(2, 200)}
    numbers = list(parents)
    if seed % 3:
        draw.shuffle(numbers)
    table = Table(SIZE)
    for n in numbers:
        table.add(
            np.array([hash_of(n)], np.uint64),
            np.array([hash_of(parents[n]) if parents[n] else 0], np.uint64),
            np.zeros((1, SIZE), np.uint32),
            0,
        )
    some = np.array(sorted(draw.sample(range(len(numbers)), 150)))
    line = in_line(table, some)
    assert sorted(line.rows.tolist()) == some.tolist()
    by_hash = {hash_of(n): n for n in numbers}
    told = [by_hash[h] for h in table.hashes[line.rows].tolist()]
    above = np.where(line.above < 0, 0, table.hashes[line.above]).tolist()
    assert [by_hash.get(h, 0) for h in above] == [parents[n] for n in told]
    place = {n: i for i, n in enumerate(told)}
    assert line.at.tolist() == [place.get(parents[n], -1) for n in told]
    assert (line.at < np.arange(len(told))).all()


def test_events_of_nothing_are_none() -> None:
    assert events_of([]) == []
