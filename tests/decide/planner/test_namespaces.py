"""Which namespace is forgotten when there are too many, and what becomes of its blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.decide.index import Index, StoredBlock
from kvstore.decide.namespaces import (
    LABEL_CHARS,
    LABELS_MAX,
    MODELS_MAX,
    OTHER_MODELS,
    OTHER_NAMESPACES,
    SPECS_CHARS_MAX,
    UNKNOWN_MODEL,
    Namespaces,
)
from kvstore.decide.planner import Departures, Explainer, Leases, explain
from kvstore.decide.rows import Rows
from kvstore.model.block import Group, Namespace, NamespaceId
from kvstore.model.errors import Unavailable, UnknownNamespace
from kvstore.testing.samples import sample_keys

MAX = 16  # of which at least 2 are for namespaces without blocks


def spec(number: int) -> Namespace:
    return Namespace(16, (Group("full", 4096),), (("model", str(number)),))


def nobody(_: NamespaceId) -> bool:
    return False


def filled(count: int) -> Namespaces:
    known = Namespaces(MAX)
    for number in range(count):
        known.make_room(spec(number), nobody)
        known.register(spec(number))
    return known


def known_of(known: Namespaces) -> set[int]:
    return {number for number in range(100) if known.spec(spec(number).id) is not None}


def test_the_one_used_least_recently_leaves() -> None:
    known = filled(MAX)
    known.use(spec(0).id)
    known.register(spec(1))
    known.make_room(spec(50), nobody)
    known.register(spec(50))
    assert known_of(known) == {*range(MAX), 50} - {2}
    with pytest.raises(UnknownNamespace, match="register it first"):
        known.use(spec(2).id)


def test_what_is_in_use_or_held_or_has_blocks_stays() -> None:
    known = filled(MAX)
    known.block_added(spec(0).id)
    with known.in_use(spec(1).id):
        known.make_room(spec(50), lambda each: each == spec(2).id)
        known.register(spec(50))
        assert known_of(known) == {*range(MAX), 50} - {3}
    known.block_removed(spec(0).id)  # and it is the newest of those without
    for number in range(51, 54):
        known.make_room(spec(number), nobody)
        known.register(spec(number))
    assert known_of(known) >= {0, 1, 50, 51, 52, 53}
    assert not known_of(known) & {2, 4, 5}


def test_those_with_blocks_leave_room_for_those_without() -> None:
    known = filled(MAX)
    for number in range(MAX - 2):
        known.block_added(spec(number).id)
    known.use(spec(0).id)
    known.make_room(spec(50), nobody)
    assert known.spec(spec(1).id) is None
    assert known.spec(spec(MAX - 1).id) is not None
    forgotten = known.find(spec(1).id)
    assert forgotten is not None
    assert forgotten.blocks == 1, "its blocks stay"
    known.register(spec(1))
    assert known.spec(spec(1).id) == spec(1)


def test_where_all_are_in_use_it_says_so() -> None:
    known = filled(MAX)
    with pytest.raises(Unavailable, match="in use at this moment"):
        known.make_room(spec(50), lambda _: True)


def test_nothing_is_kept_of_a_namespace_that_nobody_knows_and_that_has_no_blocks() -> None:
    known = Namespaces(MAX)
    for number in range(1000):
        known.block_added(spec(number).id)
        known.block_removed(spec(number).id)
    assert not list(known)


def test_long_specifications_are_fewer() -> None:
    known = Namespaces()
    for number in range(1200):
        long = replace(spec(number), identity=(("number", str(number)), ("text", "x" * 60_000)))
        known.make_room(long, nobody)
        known.register(long)
    kept = [each.spec for each in known if each.spec is not None]
    assert SPECS_CHARS_MAX * 0.9 < sum(len(each.to_json()) for each in kept) <= SPECS_CHARS_MAX
    assert kept[-1] == long


def test_registering_looks_at_no_block_and_completes_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, keys = Index(), sample_keys("found", 8)
    one, two = spec(1), spec(2)
    for at, key in enumerate(keys):
        index.add(StoredBlock(key, (one, two)[at % 2].id, at, None))
        block = index.by_key(key)
        assert block is not None
        index.refresh(block)
    monkeypatch.setattr(Rows, "kept", None)  # nobody may walk over all blocks
    index.register(one)
    found = index.find(one.id, keys)
    assert [block.complete if block else None for block in found] == [0, None] * 4
    block = index.get(one.id, keys[0])
    assert block is not None
    assert block.complete == 0


def test_blocks_that_changed_while_their_namespace_was_forgotten_are_judged_anew() -> None:
    index, (key,) = Index(), sample_keys("changed", 1)
    index.register(spec(1))
    block = StoredBlock(key, spec(1).id, 0, None)
    index.add(block)
    block.complete = 1
    index.namespaces._forget(index.namespaces._all[spec(1).id])
    index.refresh(block)  # a record of it has left
    index.register(spec(1))
    (found,) = index.find(spec(1).id, [key])
    assert found is block
    assert block.complete == 0


def named(name: str, number: int = 0) -> Namespace:
    return replace(spec(number), identity=(("name", f"{name} {number}"),), name=name)


def test_models_are_told_apart_by_name_up_to_a_bound() -> None:
    known = Namespaces()
    for number in range(MODELS_MAX + 3):
        each = named(f"model {number}")
        known.register(each)
        known.block_added(each.id)
        known.in_dram(each.id, 4096, 0)
    models = {model.name: model for model in known.models}
    assert len(models) == MODELS_MAX + 1
    assert models[OTHER_MODELS].dram_nbytes == 3 * 4096
    assert known.asked(named("model 65").id, 5, {"dram": 3}) == (OTHER_MODELS, OTHER_NAMESPACES)
    assert len(known.labelled) == LABELS_MAX
    gone = named("model 7")
    known.in_dram(gone.id, -4096, 0)
    known.block_removed(gone.id)
    known._forget(known._all[gone.id])
    fresh = named("a fresh model")
    known.register(fresh)
    known.block_added(fresh.id)
    assert "a fresh model" in {model.name for model in known.models}, "it took the free place"
    assert fresh.id in {each.id for each in known.labelled}, "and its label"
    label = fresh.id.hex()[:LABEL_CHARS]
    assert known.asked(fresh.id, 9, {"dram": 2, "file": 1, "peer": 0}) == ("a fresh model", label)
    use = known._all[fresh.id].use
    assert (use.asked_blocks, use.hit_blocks) == (9, 3)
    assert use.tier_hit_blocks == {"dram": 2, "file": 1}


def test_a_name_alone_takes_no_place_among_the_models() -> None:
    known = Namespaces()
    for number in range(MODELS_MAX):
        known.register(named(f"nothing of {number}"))
    assert known.models == []


def test_what_was_found_counts_for_its_model_once_it_is_known() -> None:
    known = Namespaces()
    each = named("found")
    known.block_added(each.id)
    known.in_files(each.id, 8192, 0)
    assert [(model.name, model.file_nbytes) for model in known.models] == [(UNKNOWN_MODEL, 8192)]
    known.register(each)
    by_name = {model.name: model for model in known.models}
    assert (by_name["found"].blocks, by_name["found"].file_nbytes) == (1, 8192)
    assert (by_name[UNKNOWN_MODEL].blocks, by_name[UNKNOWN_MODEL].file_nbytes) == (0, 0)
    known._forget(known._all[each.id])
    assert by_name["found"].file_nbytes == 8192, "still its"
    assert [use.use.model for use in known] == ["found"]


def test_a_namespace_without_blocks_is_compared_with_few_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = Index()
    model = ("model", "m")
    specs = [
        Namespace(16, (Group("full", 4096),), (("build", str(number)), model))
        for number in range(explain.OTHERS_MAX + 20)
    ]
    keys = sample_keys("others", len(specs))
    for spec_of, key in zip(specs[1:], keys[1:], strict=True):
        index.register(spec_of)
        index.add(StoredBlock(key, spec_of.id, 0, None))
    index.register(specs[0])
    compared: list[Namespace] = []

    def differences(own: Namespace, other: Namespace) -> tuple[str, ...]:
        compared.append(other)
        return explain_differences(own, other)

    explain_differences = explain.differences
    monkeypatch.setattr(explain, "differences", differences)
    leases = Leases(
        lease_s=1.0,
        limbo_bytes_max=0,
        sessions_max=1,
        now=lambda: 0.0,
        new_id=lambda: 1,
        unpin=lambda held: None,
        unpin_frame=lambda frame: None,
    )
    explainer = Explainer(index, Departures(16, lambda: 0.0), leases)
    ending = explainer.ending(specs[0].id, [keys[0]], 0)
    assert ending is not None
    assert ending.differs
    assert compared == specs[: -explain.OTHERS_MAX - 1 : -1]
