"""Models with more than one pool: what a prefix needs of each, and whose its pages are.

SGLang's own file back end says what the answers are.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

from kvstore.testing.daemon import Daemon
from tests.connectors.sglang.inside.engine import (
    Rank,
    config_of,
    fill,
    hashes,
    indices_of,
    mamba,
    mha,
    mla,
    page_of,
)

KV, SWA, MAMBA, INDEXER, DRAFT = (
    PoolName.KV,
    PoolName.SWA,
    PoolName.MAMBA,
    PoolName.INDEXER,
    PoolName.DRAFT,
)
ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES


def transfer(name: Any, keys: list[str], pool: Any = None, pages: Any = ()) -> PoolTransfer:
    indices = None if pool is None else indices_of(pool, pages)
    return PoolTransfer(name=name, keys=keys, host_indices=indices)


def asked(name: Any, keys: list[str], policy: PoolHitPolicy) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, hit_policy=policy)


@pytest.mark.parametrize("seed", range(12))
def test_hits_are_what_sglangs_own_back_end_says(daemon: Daemon, tmp_path: Path, seed: int) -> None:
    """Of pages stored here and there, with windows of all sizes, up to one beyond the prefix."""
    draw = random.Random(seed)
    pages = draw.randint(1, 9)
    keys = hashes(f"hits {seed}", pages)
    file = HiCacheFile(config_of("", model="hits"), file_path=str(tmp_path))
    with Rank(daemon.target).fill(seed) as rank:
        for name in (SWA, MAMBA, INDEXER):
            rank.add(mha(), name)
        for name in (KV, SWA, MAMBA, INDEXER):
            there = [at for at in range(pages) if draw.random() < (0.95 if name == KV else 0.7)]
            some = [keys[at] for at in there]
            if not some:
                continue
            done = rank.storage.batch_set_v2([transfer(name, some, rank.pool, there)])
            assert done == {name: [True] * len(some)}
            for key in some:
                assert file.set(file._log_key(name, key), torch.zeros(1))
        for _ in range(6):
            names = draw.sample([SWA, MAMBA, INDEXER], draw.randint(0, 3))
            wanted = [
                asked(name, keys[: draw.randint(0, pages)], draw.choice([ALL, TRAILING]))
                for name in names
            ]
            ours = rank.storage.batch_exists_v2(keys, wanted)
            theirs = file.batch_exists_v2(keys, wanted)
            assert ours.kv_hit_pages == theirs.kv_hit_pages
            assert ours.restorable_prefix_pages == theirs.restorable_prefix_pages
            if theirs.kv_hit_pages:  # where nothing is left, SGLang's stops looking
                assert ours.extra_pool_hit_pages == theirs.extra_pool_hit_pages


def test_groups_of_blocks_are_no_verdict_and_gate_nothing(daemon: Daemon) -> None:
    keys = hashes("groups", 2)
    with Rank(daemon.target).fill(1) as rank:
        assert all(rank.save(keys, [0, 1]))
        rank.add(mha(), DRAFT)
        groups = asked(DRAFT, keys, PoolHitPolicy.BLOCK_GROUPS)
        found = rank.storage.batch_exists_v2(keys, [groups])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (2, {KV: 2})


SIDE_POOLS = {
    "mamba page_first": mamba,
    "mamba page_first_direct": lambda: mamba("page_first_direct"),
    "mamba with side states": lambda: mamba(side_states=True),
    "swa": lambda: mha(heads=1),
    "swa layer_first": lambda: mha("layer_first", heads=1),
}


@pytest.mark.parametrize("kind", SIDE_POOLS)
def test_pages_of_further_pools_come_back_byte_for_byte(daemon: Daemon, kind: str) -> None:
    name = MAMBA if kind.startswith("mamba") else SWA
    keys = hashes(kind, 4)
    with (
        Rank(daemon.target).fill(2) as one,
        Rank(daemon.target).fill(3) as other,
    ):
        first, second = fill(SIDE_POOLS[kind](), 4), fill(SIDE_POOLS[kind](), 5)
        one.add(first, name)
        other.add(second, name)
        assert one.storage.batch_set_v2(
            [transfer(KV, keys, one.pool, range(4)), transfer(name, keys[2:], first, [3, 1])]
        ) == {KV: [True] * 4, name: [True] * 2}
        found = other.storage.batch_exists_v2(keys, [asked(name, keys[:1], TRAILING)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [3, 4])
        untouched = page_of(second, 6)
        assert other.storage.batch_get_v2(
            [
                transfer(KV, keys, other.pool, [7, 6, 5, 4]),
                transfer(name, keys[1:], second, [7, 8, 9]),
            ]
        ) == {KV: [True] * 4, name: [False, True, True]}
        assert [other.page(at) for at in (7, 6, 5, 4)] == [one.page(at) for at in range(4)]
        assert [page_of(second, at) for at in (8, 9)] == [page_of(first, at) for at in (3, 1)]
        assert page_of(second, 6) == untouched
        assert one.storage._pools[name].in_place == ("side states" not in kind)


def test_with_latent_attention_what_ranks_share_is_shared_and_nothing_else(
    daemon: Daemon,
) -> None:
    """States of Mamba layers, and a draft with ordinary attention, are cut by ranks."""
    keys = hashes("ranks", 2)
    ranks = [
        Rank(daemon.target, mla(), tp_rank=number, tp_size=2, is_mla_model=True).fill(number)
        for number in range(2)
    ]
    with ranks[0], ranks[1]:
        sides = [(fill(mamba(), 10 + at), fill(mha(), 20 + at)) for at in range(2)]
        for rank, (states, draft) in zip(ranks, sides, strict=True):
            rank.add(states, MAMBA).add(draft, DRAFT)
        assert all(ranks[0].save(keys, [0, 1]))
        states, draft = sides[0]
        assert ranks[0].storage.batch_set_v2(
            [transfer(MAMBA, keys, states, [0, 1]), transfer(DRAFT, keys, draft, [0, 1])]
        ) == {MAMBA: [True] * 2, DRAFT: [True] * 2}
        assert all(ranks[1].load(keys, [0, 1]))
        assert ranks[1].page(1) == ranks[0].page(1)
        states, draft = sides[1]
        assert ranks[1].storage.batch_get_v2(
            [transfer(MAMBA, keys, states, [0, 1]), transfer(DRAFT, keys, draft, [0, 1])]
        ) == {MAMBA: [False] * 2, DRAFT: [False] * 2}
        wanted = [asked(MAMBA, keys[:1], TRAILING)]
        assert ranks[0].storage.batch_exists_v2(keys, wanted).kv_hit_pages == 2
        assert ranks[1].storage.batch_exists_v2(keys, wanted).kv_hit_pages == 0


def test_a_first_pool_without_bytes_leaves_it_to_the_others(daemon: Daemon) -> None:
    """As DeepSeek V4 has it: all KV is in compressed pools beside it."""
    keys = hashes("logical", 3)
    with Rank(daemon.target, LogicalHostPool(64, 4), is_mla_model=True) as rank:
        side = fill(mla(), 6)
        rank.add(side, INDEXER)
        assert rank.save(keys, [0, 1, 2]) == [True] * 3
        done = rank.storage.batch_set_v2([transfer(INDEXER, keys[:2], side, [0, 1])])
        assert done == {INDEXER: [True, True]}
        assert rank.storage.batch_exists_v2(keys, [asked(INDEXER, keys, ALL)]).kv_hit_pages == 2
        assert rank.load(keys[:2], [0, 1]) == [True, True]


def test_a_pool_nobody_registered_is_a_miss(daemon: Daemon) -> None:
    keys = hashes("unregistered", 2)
    with Rank(daemon.target).fill(7) as rank:
        assert all(rank.save(keys, [0, 1]))
        odd = transfer(SWA, keys, rank.pool, [0, 1])
        assert rank.storage.batch_set_v2([odd]) == {SWA: [False, False]}
        assert rank.storage.batch_get_v2([odd]) == {SWA: [False, False]}
        assert rank.storage.batch_exists_v2(keys, [asked(SWA, keys, ALL)]).kv_hit_pages == 0
        assert rank.storage.batch_get_v2([transfer(KV, keys)]) == {KV: [False, False]}


def test_two_transfers_of_one_pool_are_told_one_after_the_other(daemon: Daemon) -> None:
    keys = hashes("halves", 4)
    with Rank(daemon.target).fill(8) as rank:
        side = fill(mha(), 9)
        rank.add(side, DRAFT)
        halves = [transfer(DRAFT, keys[:2], side, [0, 1]), transfer(DRAFT, keys[2:], side, [2, 3])]
        assert rank.storage.batch_set_v2(halves) == {DRAFT: [True] * 4}
        assert rank.storage.batch_exists_v2(keys, []).kv_hit_pages == 0
        assert rank.storage.batch_get_v2(halves) == {DRAFT: [True] * 4}
