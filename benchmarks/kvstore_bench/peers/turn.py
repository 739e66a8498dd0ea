"""One turn of one system: put, get hot, get cold, kill, start again, get."""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_bench.peers.device import Device
from kvstore_bench.peers.process import Process
from kvstore_bench.peers.roster import Peer

REMOTE_BLOCKS_MAX = 64
DEVICE_GETS = ("cold_get", "restart_get")
LOWER_PUT = "lower_put"  # until what is below has taken it
LOWER_GET = "lower_get"  # from what is below, which may have it in memory
LOWER_GETS = 5  # of a turn: they take no time, and differ by more than the systems do


@dataclass(frozen=True, slots=True)
class PeersPlan:
    """What to move in each system and round. threads: of each system, for I/O."""

    block_nbytes: int = 2 << 20
    blocks: int = 256
    rounds: int = 7
    threads: int = 4
    seed: int = 0
    remote_gets: int = 5

    @property
    def remote_blocks(self) -> int:
        """In a get from another process."""
        return min(self.blocks, REMOTE_BLOCKS_MAX)

    @property
    def round_nbytes(self) -> int:
        return self.blocks * self.block_nbytes


@dataclass(slots=True)
class Record:
    """What one system did, over its turns.

    bytes_per_s: by measure; gets only of turns that found every block. of_device: those of gets
    from the device, over what plain reads got there just before and just after. ready_s: from the
    start after the kill until it answers, imports not counted. kept: share of the blocks found
    then. missed: blocks not found before the kill. wrong: blocks that came back with other bytes.
    """

    bytes_per_s: dict[str, list[float]] = field(default_factory=dict)
    of_device: dict[str, list[float]] = field(default_factory=dict)
    ready_s: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    missed: int = 0
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """directory: on the device to measure. runtime: short, for sockets. Both are the caller's, as
    is `device`."""

    peer: Peer
    python: str
    plan: PeersPlan
    number: int
    record: Record
    directory: Path
    runtime: Path
    device: Device

    def run(self) -> None:
        """Raises Unavailable if the system fails. None of its processes is left."""
        with ExitStack() as processes:
            process = processes.enter_context(self._start())
            self._put(process)
            self._settle(process)
            self._get(process)  # hot is what was got before
            self._get(process, "hot_get")
            for _ in range(LOWER_GETS if self.peer.below else 0):
                process.ask("forget")
                self._get(process, LOWER_GET)
            if self.peer.cold:
                if not process.ask("chill")["cold"]:
                    process.end()
                    process = processes.enter_context(self._start())
                drop_cached(self.directory)
                self._get(process, "cold_get")
            process.kill()
            process = processes.enter_context(self._start(again=True))
            self._get(process, "restart_get")
            if self.peer.closed:
                process.end()

    def _start(self, *, again: bool = False) -> Process:
        drop_cached(self.directory)
        process = Process(self.peer, self.python, self.runtime)
        try:
            opened = process.ask(
                "open",
                module=f"{__package__}.{self.peer.module}",
                place={
                    "directory": str(self.directory),
                    "runtime": str(self.runtime),
                    "threads": self.plan.threads,
                },
                blocks={
                    "count": self.plan.blocks,
                    "nbytes": self.plan.block_nbytes,
                    "seed": self.plan.seed,
                },
            )
        except BaseException:
            process.kill()
            raise
        if again:
            self.record.ready_s.append(opened["seconds"])
        return process

    def _put(self, process: Process) -> None:
        done = process.ask("put", number=self.number)
        self._note("put_accepted", done["seconds"])
        if self.peer.durable:
            self._note("put_durable", done["flushed_s"])
        if self.peer.below:
            self._note(LOWER_PUT, done["flushed_s"])

    def _settle(self, process: Process) -> None:
        """Have everything written, so that no timed get runs beside writes of the put: of those who
        write behind, and of those who leave it to the page cache."""
        if self.peer.below:
            process.ask("settle")
        for path in files_below(self.directory):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _get(self, process: Process, measure: str = "") -> None:
        is_read = measure in DEVICE_GETS
        before = self.device.bytes_per_s() if is_read else 0.0
        got = process.ask("get", number=self.number)
        self.record.wrong += got["wrong"]
        if measure == "restart_get":
            self.record.kept.append(got["found"] / self.plan.blocks)
        else:
            self.record.missed += self.plan.blocks - got["found"]
        if not measure or got["found"] < self.plan.blocks:
            return
        speed = self._note(measure, got["seconds"])
        if is_read:
            device = statistics.harmonic_mean((before, self.device.bytes_per_s()))
            self.record.of_device.setdefault(measure, []).append(speed / device)

    def _note(self, measure: str, seconds: float) -> float:
        speed = self.plan.round_nbytes / seconds
        self.record.bytes_per_s.setdefault(measure, []).append(speed)
        return speed


def drop_cached(directory: Path) -> None:
    """Have the kernel forget what it caches of all files below `directory`."""
    for path in files_below(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only clean pages can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_below(directory: Path) -> list[Path]:
    """Return the regular files: no sockets, for one."""
    return [path for path in directory.rglob("*") if path.is_file()]
