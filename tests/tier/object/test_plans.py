"""The pure parts: what is asked for, believed, read and collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import InvalidRequest
from kvstore.sealing import Keyring
from kvstore.tier.object.catalog import Catalog, Entry
from kvstore.tier.object.collection import Survey
from kvstore.tier.object.layout import ObjectExtent, lay_out
from kvstore.tier.object.names import CLOCK, Listed, RunName, TombstoneName
from kvstore.tier.object.ranges import (
    GAP_NBYTES_MAX,
    ObjectRead,
    plan_requests,
)
from kvstore.tier.object.tombstones import SKEW_S, Tombstone, Tombstones
from kvstore.tier.object.walk import AHEAD_MAX, Found, Walk, Wanted
from tests.tier.file.frames import ROOT, SEALING
from tests.tier.object.opened import Clock
from tests.tier.object.runs import NAMESPACE, alike, frames, prefix_of, records_found

PREFIX = prefix_of("plan", 200)


class World:
    """A bucket as a dictionary, asked by walks; `asked` is one set of requests for each step."""

    def __init__(self) -> None:
        self.catalog = Catalog(Clock(), 60.0)
        self.tombstones = Tombstones()
        self.entries: list[Entry] = []
        self.asked: list[Wanted] = []

    def store(self, keys: Sequence[BlockKey], first: int, end: int) -> None:
        run, _, _ = lay_out([header for header, _ in frames(keys, first, end, nbytes=64)])
        self.entries.append(Entry(run.name, run.nbytes, float(len(self.entries))))
        self.catalog.read(self.entries[-1], run)

    def find(self, keys: Sequence[BlockKey], run_blocks: int = 16) -> Found:
        walk = Walk(NAMESPACE, keys, run_blocks, self.catalog, self.tombstones)
        while not walk.ended:
            wanted = walk.step()
            if wanted != Wanted():
                self.asked.append(wanted)
            for directory in (*wanted.now, *wanted.ahead):
                if isinstance(directory, Entry):
                    continue  # its footer is known
                there = [entry for entry in self.entries if entry.directory == directory]
                self.catalog.listed(directory, there)
        return walk.found(complete=True)


def test_a_walk_asks_ahead_ever_more_but_only_once_something_was_found() -> None:
    world = World()
    for first in range(0, 192, 16):
        world.store(PREFIX, first, first + 16)
    assert world.find(PREFIX).blocks == 192
    widths = [len(wanted.now) + len(wanted.ahead) for wanted in world.asked]
    assert widths[:2] == [1, 5]
    assert max(widths) <= 1 + AHEAD_MAX
    assert sum(widths) <= 14
    world.asked.clear()
    world.find(prefix_of("absent", 200))
    assert [len(wanted.now) + len(wanted.ahead) for wanted in world.asked] == [1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 16)), max_size=12), st.data())
def test_a_walk_finds_what_objects_chain_up_to(
    pieces: list[tuple[int, int]], data: st.DataObject
) -> None:
    other = prefix_of("branch", 40, like=PREFIX[: data.draw(st.integers(0, 40))])
    world = World()
    spans = []
    for begin, count in pieces:
        keys = data.draw(st.sampled_from([PREFIX, other]))
        end = min(40, begin + count)
        world.store(keys, begin, end)
        spans.append((begin, end, keys))
    reached = 0
    while True:  # what any reader could do by hand
        shared = [
            min(end, alike(keys, PREFIX[:40])) for begin, end, keys in spans if begin == reached
        ]
        if max(shared, default=0) <= reached:
            break
        reached = max(shared)
    found = world.find(PREFIX[:40])
    # Only so many objects that begin with one block are looked into.
    crowded = max((sum(b == begin for b, _, _ in spans) for begin, _, _ in spans), default=0)
    assert found.blocks == reached or crowded > 4
    assert {key for _, key in records_found(found)} == set(PREFIX[: found.blocks])


def test_each_record_is_found_once_and_dead_ones_never() -> None:
    world = World()
    world.store(PREFIX, 0, 8)
    world.store(PREFIX, 0, 16)
    world.tombstones.add(Tombstone(TombstoneName(NAMESPACE, 1), 0.5, frozenset(PREFIX[3:4])))
    found = world.find(PREFIX[:16])
    live = [(h.part, h.blocks[at].key) for _, h, positions in found.frames for at in positions]
    assert len(live) == len(set(live)) == 2 * 15
    assert found.blocks == 16


def test_the_catalog_is_bounded_and_forgets_in_time() -> None:
    clock = Clock()
    catalog = Catalog(clock, 60.0, directories_max=3, records_max=40)
    runs = [
        lay_out([header for header, _ in frames(PREFIX, first, first + 8, nbytes=64)])[0]
        for first in range(0, 80, 8)
    ]
    for run in runs:
        catalog.written(run, 1.0)
    known = [run for run in runs if catalog.run(run.name)]
    assert known == runs[-2:]
    assert [catalog.entry(run.name) for run in runs].count(None) == len(runs) - 3
    clock.ahead_s = 61.0
    assert not any(catalog.entry(run.name) for run in runs)
    assert catalog.run(runs[-1].name) == runs[-1]


@pytest.mark.parametrize("what", ["in clear", "encrypted", "corrupt"])
def test_a_footer_is_forgotten_with_another_time_of_its_object_unless_it_is_in_clear(
    what: str,
) -> None:
    catalog = Catalog(Clock(), 60.0)
    run, _, _ = lay_out([header for header, _ in frames(PREFIX, 0, 8, nbytes=64)])
    if what == "encrypted":
        run = replace(run, key=Keyring.create(ROOT, SEALING.tenant).new_key())
    entry = Entry(run.name, run.nbytes, 1.0)
    catalog.listed(entry.directory, [entry])
    catalog.read(entry, None if what == "corrupt" else run)
    catalog.listed(entry.directory, [entry])
    assert catalog.has_read(run.name)
    catalog.listed(entry.directory, [entry._replace(modified=2.0)])
    assert catalog.has_read(run.name) == (what == "in clear")


# ---- tombstones --------------------------------------------------------------------------------


def test_a_tombstone_kills_what_is_older_or_as_good_as() -> None:
    tombstones = Tombstones()
    name = TombstoneName(NAMESPACE, 1)
    tombstones.add(Tombstone(name, 100.0, frozenset(PREFIX[:1])))
    assert tombstones.kills(NAMESPACE, PREFIX[0], 99.0)
    assert tombstones.kills(NAMESPACE, PREFIX[0], 100.0 + SKEW_S)
    assert not tombstones.kills(NAMESPACE, PREFIX[0], 100.1 + SKEW_S)
    assert not tombstones.kills(NAMESPACE, PREFIX[1], 99.0)
    tombstones.keep([])
    assert not tombstones.kills(NAMESPACE, PREFIX[0], 99.0)


def test_more_keys_than_fit_cost_a_namespace_and_no_delete() -> None:
    tombstones = Tombstones(keys_max=10)
    for number, start in enumerate(range(0, 40, 8)):
        keys = frozenset(PREFIX[start : start + 8])
        tombstones.add(Tombstone(TombstoneName(NAMESPACE, number), float(number), keys))
    assert all(tombstones.kills(NAMESPACE, key, 0.0) for key in PREFIX[:40])
    assert not tombstones.kills(NamespaceId(b"o" * 32), PREFIX[50], 0.0)


# ---- ranges ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_every_target_is_filled_whatever_is_joined_or_cut(data: st.DataObject) -> None:
    content = bytes(range(256)) * 3000
    part_nbytes = data.draw(st.integers(1000, 900_000))
    reads = []
    for _ in range(data.draw(st.integers(1, 8))):
        offset = data.draw(st.integers(0, 700_000))
        sizes = data.draw(st.lists(st.integers(1, 60_000), min_size=1, max_size=4))
        sizes[-1] = min(sizes[-1], max(1, len(content) - offset - sum(sizes[:-1])))
        if offset + sum(sizes) > len(content):
            continue
        extent = ObjectExtent(data.draw(st.sampled_from("ab")), offset, sum(sizes))
        reads.append(ObjectRead(extent, 0, [memoryview(bytearray(size)) for size in sizes]))
    for request in plan_requests(reads, part_nbytes):
        assert request.nbytes <= part_nbytes
        position = request.start
        for buffer in request.buffers:
            buffer[:] = content[position : position + len(buffer)]
            position += len(buffer)
    for read in reads:
        begin = read.extent.offset
        assert b"".join(read.targets) == content[begin : begin + read.nbytes]


def test_neighbours_become_one_request_and_strangers_do_not() -> None:
    def read(offset: int, name: str = "a") -> ObjectRead:
        return ObjectRead(ObjectExtent(name, offset, 4096), 0, [memoryview(bytearray(4096))])

    near = [read(8192), read(0), read(8192 + 4096 + GAP_NBYTES_MAX)]
    assert len(plan_requests(near)) == 1
    assert len(plan_requests([*near, read(1 << 20), read(0, "b")])) == 3
    with pytest.raises(InvalidRequest):
        plan_requests([ObjectRead(ObjectExtent("a", 0, 10), 5, [memoryview(bytearray(6))])])


# ---- collection --------------------------------------------------------------------------------


def listed(number: int, nbytes: int, modified: float) -> Listed:
    name = RunName(NAMESPACE, PREFIX[number], PREFIX[number], number)
    return Listed(str(name), nbytes, modified)


def survey_of(*pages: Sequence[Listed]) -> Survey:
    survey = Survey()
    for page in pages:
        survey.add(page)
    return survey


def doomed(survey: Survey, **caps: float) -> list[tuple[int, str]]:
    given = {"capacity_bytes": 1 << 40, "max_age_s": 0.0, "grace_s": 10.0, **caps}
    victims = survey.victims(1000.0, **given)  # type: ignore[arg-type]
    return [(victim.entry.name.nonce, victim.reason) for victim in victims]


def test_the_oldest_leave_until_there_is_room_and_the_young_stay() -> None:
    survey = survey_of(
        [listed(0, 100, 500.0), listed(1, 100, 300.0)],
        [listed(2, 100, 995.0), listed(3, 100, 400.0), Listed("a stranger's", 999, 1.0)],
        [Listed(CLOCK, 8, 1000.0)],
    )
    assert (survey.nbytes, survey.objects) == (408, 4)
    assert doomed(survey) == []
    assert doomed(survey, capacity_bytes=300) == [(1, "capacity"), (3, "capacity")]
    assert doomed(survey, capacity_bytes=450, room_nbytes=100) == [(1, "capacity")]
    assert doomed(survey, capacity_bytes=1) == [(n, "capacity") for n in (1, 3, 0)]
    assert doomed(survey, max_age_s=550) == [(1, "age"), (3, "age")]
    assert doomed(survey, max_age_s=650, capacity_bytes=350) == [(1, "age")]


def test_all_who_count_choose_the_same() -> None:
    page = [listed(number, 10, float(number // 3)) for number in range(60)]
    one, other = survey_of(page[:30], page[30:]), survey_of(page[::-1])
    assert doomed(one, capacity_bytes=300) == doomed(other, capacity_bytes=300) != []
