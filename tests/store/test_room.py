"""Many runs that look for room at the cap at once all find it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.sim.loop import SimLoop
from tests.store.node import Node, chain


@pytest.mark.parametrize("seed", range(4))
def test_runs_written_together_at_the_cap_all_find_room(tmp_path: Path, seed: int) -> None:
    loop = SimLoop(Random(seed))
    with Node(tmp_path / "kv", loop=loop, file_bytes=2 << 20, segment_nbytes=1 << 18) as node:
        loop.threads.io_s = 0.01
        for batch in range(6):
            for number in range(24):
                node.put(chain(1 + 24 * batch + number, 1 + number % 3))
            assert node.run(node.store.flush(15.0))
        assert not node.mover.stats()["failed_writes"]
        assert node.file is not None
        assert node.file.physical_nbytes <= 2 << 20
