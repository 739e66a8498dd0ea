"""The tree says of every run what counting block by block says."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from itertools import pairwise

import pytest

from kvstore.decide import runs as module
from kvstore.decide.index import HeldSlot, StoredBlock, StoredFrame, StoredPart
from kvstore.decide.runs import Blocks, Run, Runs
from kvstore.decide.uses import NAME_NBYTES, Use
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId, Part, Slot

SPACES = [NamespaceId(bytes([number]) * 32) for number in range(3)]


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(str(number).encode()).digest())


def block_of(
    number: int, space: int, index: int, parent: BlockKey | None, *, dram: bool, file: bool
) -> StoredBlock:
    block = StoredBlock(key_of(number), SPACES[space], index, parent)
    record = StoredPart(Part(0, 0), PAGE_NBYTES, 1)
    if dram:
        record.resident = HeldSlot(Slot(0, 0, PAGE_NBYTES))
    if file:
        record.frame = StoredFrame(None, Part(0, 0), 0, (PAGE_NBYTES // 2,), 1)
    block.add(record)
    return block


def forest(draw: random.Random, count: int, *, branches: float) -> list[StoredBlock]:
    """Return blocks in any order; some have lost their parents."""
    blocks: list[StoredBlock] = []
    for number in range(count):
        place = draw.choice(("dram", "file", "both"))
        dram, file = place != "file", place != "dram"
        if not blocks or draw.random() < 0.05:
            blocks.append(block_of(number, draw.randrange(3), 0, None, dram=dram, file=file))
            continue
        above = draw.choice(blocks) if draw.random() < branches else blocks[-1]
        space = SPACES.index(above.namespace_id)
        index = above.block_index + 1
        blocks.append(block_of(number, space, index, above.key, dram=dram, file=file))
    kept = [block for block in blocks if draw.random() > 0.02]
    draw.shuffle(kept)
    return kept


def drawn(blocks: list[StoredBlock], uses: list[tuple[bytes, Use]] | None = None) -> Runs:
    columns = Blocks()
    columns.add(blocks)
    return Runs(columns, uses or [])


def everything(tree: Runs, number: int = -1) -> list[Run]:
    """Return all runs below one."""
    found: list[Run] = []
    below, _ = tree.children(number, 1 << 30)
    for run in tree.look(below):
        found += [run, *everything(tree, run.number)]
    return found


class Model:
    """Counts block by block."""

    def __init__(self, blocks: list[StoredBlock]) -> None:
        self.by_key = {block.key: block for block in blocks}
        self.below: dict[BlockKey, list[StoredBlock]] = defaultdict(list)
        for block in blocks:
            if block.parent in self.by_key:
                assert block.parent is not None
                self.below[block.parent].append(block)

    def behind(self, block: StoredBlock) -> list[StoredBlock]:
        found, left = [], [block]
        while left:
            found.append(left.pop())
            left += self.below[found[-1].key]
        return found


def dram_of(blocks: list[StoredBlock]) -> int:
    return sum(padded for b in blocks for r in b.records if r.resident for padded in (r.nbytes,))


def file_of(blocks: list[StoredBlock]) -> int:
    return sum(PAGE_NBYTES for b in blocks for r in b.records if r.frame)


@pytest.mark.parametrize(("seed", "branches"), [(1, 0.02), (2, 0.3), (3, 1.0)])
@pytest.mark.parametrize("depth_max", [512, 2])
def test_every_block_is_in_one_run_and_every_sum_is_right(
    seed: int, branches: float, depth_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEPTH_MAX", depth_max)  # 2: summed up one by one
    draw = random.Random(seed)
    blocks = forest(draw, 600, branches=branches)
    model = Model(blocks)
    used = draw.sample(blocks, 50)
    uses = [(b.key[:NAME_NBYTES], Use(n + 1, float(n), ())) for n, b in enumerate(used)]
    tree = drawn(blocks, uses)
    found = everything(tree)
    hits = {block.key: n + 1 for n, block in enumerate(used)}
    at = {block.key: float(n) for n, block in enumerate(used)}
    seen: set[BlockKey] = set()
    for run in found:
        block = first = model.by_key[BlockKey(run.first_key)]
        own = [first]
        while len(model.below[block.key]) == 1:
            (block,) = model.below[block.key]
            own.append(block)
        behind = model.behind(first)
        assert run.last_key == block.key
        assert (run.begin, run.end) == (first.block_index, block.block_index + 1)
        assert tree.namespaces[run.namespace] == first.namespace_id
        assert run.children == len(model.below[block.key])
        assert (run.dram, run.file) == (dram_of(own), file_of(own))
        assert run.blocks == len(behind)
        assert (run.all_dram, run.all_file) == (dram_of(behind), file_of(behind))
        assert run.hits == sum(hits.get(each.key, 0) for each in behind)
        assert run.at == max(at.get(each.key, -1.0) for each in behind)
        assert all(tree.find(each.key) == run.number for each in own)
        seen.update(each.key for each in own)
    assert seen == set(model.by_key)
    assert sum(len(tree.children(run.number, 9999)[0]) for run in found) == sum(
        run.parent >= 0 for run in found
    )


def test_children_come_in_pages_largest_first() -> None:
    blocks = forest(random.Random(5), 800, branches=0.3)
    tree = drawn(blocks)
    all_at_once, more = tree.children(-1, 10_000)
    assert more == b""
    sizes = [run.all_dram + run.all_file for run in tree.look(all_at_once)]
    assert sizes == sorted(sizes, reverse=True)
    pages: list[int] = []
    while True:
        page, more = tree.children(-1, 7, after=more)
        pages += page
        if not more:
            break
        assert len(page) == 7
    assert pages == all_at_once
    for space in range(len(tree.namespaces)):
        own, _ = tree.children(-1, 10_000, space=space)
        assert {run.namespace for run in tree.look(own)} == {space}


def test_a_path_leads_from_the_start_to_a_block() -> None:
    blocks = forest(random.Random(6), 300, branches=0.3)
    tree = drawn(blocks)
    for block in blocks:
        number = tree.find(block.key)
        assert number is not None
        path = tree.look(tree.path(number))
        assert path[0].parent == -1
        assert all(one.end == two.begin for one, two in pairwise(path))
        assert path[-1].begin <= block.block_index < path[-1].end
    assert tree.find(key_of(10**9)) is None


def test_a_use_of_a_block_that_left_is_of_the_nearest_one_that_is_there() -> None:
    root = block_of(0, 0, 0, None, dram=True, file=False)
    one = block_of(1, 0, 1, root.key, dram=True, file=False)
    two = block_of(2, 0, 1, root.key, dram=True, file=False)
    gone = [key_of(number)[:NAME_NBYTES] for number in (7, 8)]
    before = (gone[1], one.key[:NAME_NBYTES], root.key[:NAME_NBYTES])
    tree = drawn([root, one, two], [(gone[0], Use(3, 9.0, before)), (gone[1], Use(1, 1.0, ()))])
    hits = {run.first_key: run.hits for run in everything(tree)}
    assert hits == {root.key: 3, one.key: 3, two.key: 0}


def test_made_up_parents_make_no_cycle_and_no_tree_is_no_trouble() -> None:
    loop = [block_of(n, 0, 5, key_of((n + 1) % 3), dram=True, file=False) for n in range(3)]
    own = block_of(9, 0, 1, key_of(9), dram=True, file=False)
    other = block_of(10, 1, 6, loop[0].key, dram=True, file=False)  # of another namespace
    tree = drawn([*loop, own, other])
    assert len(tree.children(-1, 100)[0]) == 5
    empty = drawn([])
    assert empty.children(-1, 10) == ([], b"")
    assert empty.find(key_of(1)) is None
    assert drawn([own], [(b"12345678", Use(1, 1.0, ()))]).look([0])[0].hits == 0


def test_a_chain_in_which_every_block_branches_is_summed_up() -> None:
    blocks = [block_of(0, 0, 0, None, dram=True, file=False)]
    for depth in range(1, 3000):
        above = blocks[-1] if depth == 1 else blocks[-2]
        blocks += [
            block_of(2 * depth + side, 0, depth, above.key, dram=True, file=False)
            for side in (0, 1)
        ]
    tree = drawn(blocks)
    (root,) = tree.look(tree.children(-1, 10)[0])
    assert root.blocks == len(blocks)
    assert root.all_dram == len(blocks) * PAGE_NBYTES
