"""Who finds room, in the file tier and in the arena, when everything is full."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.sim.loop import SimLoop
from tests.store.node import SPEC, Node, chain


@pytest.mark.parametrize("seed", range(4))
def test_runs_written_together_at_the_cap_all_find_room(tmp_path: Path, seed: int) -> None:
    loop = SimLoop(Random(seed))
    with Node(tmp_path / "kv", loop=loop, file_bytes=2 << 20, segment_nbytes=1 << 18) as node:
        loop.threads.io_s = 0.01
        for batch in range(6):
            for number in range(24):
                node.put(chain(1 + 24 * batch + number, 1 + number % 3))
            assert node.run(node.store.puts.flush(15.0))
        assert not node.write_behind.stats()["failed_writes"]
        assert node.file is not None
        assert node.file.frames.physical_nbytes <= 2 << 20


@pytest.mark.parametrize("step", [1, 7, 40])
def test_a_prefix_larger_than_the_arena_passes_through_it(tmp_path: Path, step: int) -> None:
    """The block that is put next pins its parent, and so everything before that would stay."""
    loop = SimLoop(Random(step))
    with Node(tmp_path / "kv", loop=loop, arena_bytes=1 << 20) as node:
        keys = chain(1, 200)
        for start in range(0, len(keys), step):
            assert node.put(keys, start, start + step, wait_s=5.0).refused == 0
        assert node.flush()
        assert node.store.gets.match(SPEC.id, keys).hit_blocks == len(keys)
        assert node.get(keys[:20]) == 20


def test_without_a_file_tier_the_start_of_a_prefix_stays(tmp_path: Path) -> None:
    with Node(None, loop=SimLoop(Random(1)), arena_bytes=1 << 20) as node:
        keys = chain(1, 200)
        assert node.put(keys, 0, 100).refused
        stored = node.store.gets.match(SPEC.id, keys).hit_blocks
        assert 0 < stored < 100
        assert node.put(keys, stored, stored + 1).committed == 0
        assert node.store.gets.match(SPEC.id, keys).hit_blocks == stored
