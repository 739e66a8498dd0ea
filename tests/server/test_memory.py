"""A daemon takes no memory that an engine needs: refused at its start, and while it grows."""

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.daemon import check_memory
from kvstore.system.memory import GIB, MIB, OOM_SCORE_FIRST, Bound, Memory
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from kvstore.tier.dram import Arena, growth

LIMIT = 512 * MIB
_CGROUPS = Path("/sys/fs/cgroup")


def refused(daemon: Daemon, *overrides: str) -> str:
    """Start a daemon that must end by itself, as wrong settings do; return what it says."""
    daemon.start(*overrides, wait=False)
    assert daemon.wait() == 2
    return daemon.output()


def test_an_arena_larger_than_the_machine_is_refused_with_what_to_type() -> None:
    with Daemon() as daemon:
        told = refused(daemon, "dram.capacity=1TiB")
    assert "dram.capacity=1TiB does not fit: this machine has" in told
    assert "--set dram.capacity=" in told
    assert "Traceback" not in told


def test_memory_beside_sealed_arenas_is_warned_of_and_refuses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asyncio.run(check_memory(MIB, 0, 0))
    assert "memory=tight" not in caplog.text
    asyncio.run(check_memory(MIB, 0, 1 << 50))
    assert "memory=tight" in caplog.text
    assert f"may fill {1 << 50} bytes beside sealed arenas" in caplog.text


def test_the_kernel_is_to_kill_the_daemon_before_an_engine() -> None:
    with Daemon() as daemon:
        pid = daemon.start().pid
        before = Path("/proc/self/oom_score_adj").read_text().strip()
        expected = OOM_SCORE_FIRST if before == "0" else int(before)
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == expected


@contextmanager
def memory_limit() -> Iterator[Path]:
    """Make a control group below our own that may have LIMIT bytes. Yields its cgroup.procs."""
    group = limited_group()
    if group is None:
        pytest.skip("no control group with a memory limit can be made here")
    try:
        yield group / "cgroup.procs"
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().strip())
        group.rmdir()


def limited_group() -> Path | None:
    own = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in own}
    for top, path, name in (
        (_CGROUPS / "memory", paths.get("memory"), "memory.limit_in_bytes"),
        (_CGROUPS, paths.get(""), "memory.max"),
    ):
        group = top / f"{path}/kvstore-test-{os.getpid()}".lstrip("/")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(LIMIT))
        except OSError:
            group.rmdir()
        else:
            return group
    return None


class LimitedDaemon(Daemon):
    """A daemon that joins a control group before it starts."""

    def __init__(self, procs: Path) -> None:
        super().__init__()
        self._procs = procs

    def command(self, *arguments: str) -> list[str]:
        join = f'echo $$ > {self._procs} && exec "$@"'
        return ["sh", "-c", join, "sh", *super().command(*arguments)]


def test_a_real_limit_of_a_control_group_counts() -> None:
    with memory_limit() as procs, LimitedDaemon(procs) as daemon:
        told = refused(daemon, f"dram.capacity={LIMIT}")
        assert "does not fit: the memory limit /sys/fs/cgroup/" in told, told
        assert "512 MiB" in told
        daemon.start("dram.capacity=64MiB")
        assert daemon.stop() == 0


def test_memory_that_others_are_about_to_give_back_is_waited_for_a_little() -> None:
    with memory_limit() as procs, LimitedDaemon(procs) as daemon, hog(procs) as taken:
        until(lambda: taken.stdout is not None and taken.stdout.readline() == b"taken\n")
        daemon.start("dram.capacity=192MiB", wait=False)
        until(lambda: "node=starting" in daemon.output())
        taken.kill()
        until(lambda: "node=serving" in daemon.output())
        assert daemon.stop() == 0


def test_memory_that_others_keep_is_not_taken() -> None:
    with memory_limit() as procs, LimitedDaemon(procs) as daemon, hog(procs) as taken:
        until(lambda: taken.stdout is not None and taken.stdout.readline() == b"taken\n")
        told = refused(daemon, "dram.capacity=192MiB")
        assert "does not fit: the memory limit" in told
        assert taken.poll() is None  # nobody was killed for it


@contextmanager
def hog(procs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that takes most of the limit, as an engine does."""
    take = f"x = b'x' * {300 * MIB}; print('taken', flush=True); input()"
    join = f'echo $$ > {procs} && exec {sys.executable} -c "{take}"'
    with subprocess.Popen(
        ["sh", "-c", join], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_arena_stops_growing_below_the_floor_and_goes_on_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growth, "LOOK_AGAIN_S", 0.01)
    free = [4 * GIB]

    free = 128 * MIB + 2 * MIB  # the floor, and two extents

    def memory() -> Memory:
        return Memory((Bound("this machine", 4 * GIB, free - tight.reserved_nbytes),))

    async def grow() -> None:
        nonlocal free
        await tight.start()
        while not tight.growth.waits_for_memory:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert tight.growth.growing
        assert tight.growth.pauses == 1
        assert tight.reserved_nbytes == 2 * MIB
        free += 2 * MIB
        while tight.growth.growing:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert tight.reserved_nbytes == tight.capacity_bytes == 4 * MIB
        assert not tight.growth.waits_for_memory
        await tight.close()

    tight = Arena(4 * MIB, MIB, memory=memory)
    asyncio.run(grow())


def test_status_and_metrics_say_what_was_taken() -> None:
    with Daemon("dram.capacity=64MiB", "dram.extent=16MiB") as daemon:
        with Client(daemon.start().target, arena=False) as client:
            until(lambda: not client.admin.stats()["dram"]["growing"])
            dram = client.admin.stats()["dram"]
        assert dram["reserved_bytes"] == 64 * MIB
        assert not dram["waits_for_memory"]
        assert dram["growth_pauses"] == 0
        url = f"http://127.0.0.1:{daemon.metrics_port}/metrics"
        told = urllib.request.urlopen(url, timeout=5).read().decode()
        assert 'kvstore_dram_bytes{state="reserved"}' in told
        assert "kvstore_arena_growth_pauses_total 0.0" in told
