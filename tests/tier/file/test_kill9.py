"""A process that puts and says what is durable, killed without warning, again and again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.tier.file import FileTier
from tests.tier.file.frames import MIB, key, live, put, recover, verify

KILLS = 5
FRAMES_BEFORE_KILL = 12


async def put_forever(path: Path) -> None:
    """Put frames in groups, sync, print the last sequence of each group."""
    tier = FileTier(path, capacity_bytes=256 * MIB, segment_nbytes=MIB)
    sequence = (await tier.open()).next_sequence
    while True:
        group = range(sequence, sequence + 4)
        await asyncio.gather(*(put(tier, n, [n, f"last {n % 7}"], nbytes=30_000) for n in group))
        await tier.durability.sync()
        sequence += 4
        print(sequence - 1, flush=True)


def put_until_killed(path: Path) -> set[int]:
    """Return the sequences the process said were durable. Those of its last group may be on disk in
    part, and the next process goes on behind them."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.tier.file.test_kill9", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(FRAMES_BEFORE_KILL // 4)]
        writer.send_signal(signal.SIGKILL)
        said += [int(line) for line in writer.stdout if line.endswith("\n")]
        return {last - n for last in said for n in range(4)}
    finally:
        writer.kill()
        writer.wait(10)
        if writer.stdout is not None:
            writer.stdout.close()


@pytest.mark.fault
def test_what_was_said_to_be_durable_survives_kill_9(tmp_path: Path) -> None:
    durable = set[int]()

    async def check() -> None:
        tier = FileTier(tmp_path, capacity_bytes=256 * MIB, segment_nbytes=MIB)
        recovered = await recover(tier)
        found = live(recovered)
        for sequence in durable:
            assert found[key(sequence)] == sequence
        for rest in range(7):
            assert found[key(f"last {rest}")] >= max(durable) - 6
        for record in recovered.frames:
            await verify(tier, record)
        await tier.close()

    for _ in range(KILLS):
        durable |= put_until_killed(tmp_path)
        asyncio.run(check())


if __name__ == "__main__":
    asyncio.run(put_forever(Path(sys.argv[1])))
