"""fio: what the device does at best. O_DIRECT, its own clock, buffers of huge pages as the arena's,
the fastest of many ways to ask."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kvstore.model.errors import Unavailable
from kvstore_bench.huge_pages import huge_buffers

TIMEOUT_S = 600.0
INSTALL = "fio is not installed: apt-get install fio (Debian, Ubuntu), dnf install fio (Fedora)"
ENGINES = ("io_uring", "libaio")
BLOCKS_NBYTES = (256 << 10, 1 << 20, 2 << 20, 4 << 20)
JOBS_DEPTH = ((1, 16), (1, 64), (4, 4), (4, 16))
TRIED_NBYTES = 256 << 20  # by each way, at the most
FINALISTS = 4  # ways that move whole files in turns: one short try is mostly noise
FINAL_ROUNDS = 3


class Way(NamedTuple):
    """A way to ask: several jobs, each in a part of the file of its own, each so many requests
    deep."""

    engine: str
    block_nbytes: int
    jobs: int
    depth: int


def has_fio() -> bool:
    """Return whether fio is there; `INSTALL` says how to get it."""
    return shutil.which("fio") is not None


def bandwidth(path: Path, kind: str, way: Way, nbytes: int) -> float:
    """Return bytes/s of sequential I/O over the whole of `path`, a file of `nbytes`.

    kind: "write" makes the file and ends with an fsync; "read" reads what was so written.
    Raises Unavailable.
    """
    share = nbytes // way.jobs
    command = [
        "fio",
        "--name=kvstore",
        f"--filename={path}",
        f"--rw={kind}",
        f"--ioengine={way.engine}",
        "--direct=1",
        f"--bs={way.block_nbytes}",
        f"--iodepth={way.depth}",
        f"--numjobs={way.jobs}",
        f"--size={share}",
        f"--offset_increment={share}",
        "--group_reporting",
        "--end_fsync=1",
        "--fallocate=none",
        "--output-format=json",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=huge_buffers(),
    )
    if done.returncode:
        raise Unavailable(f"fio failed: {(done.stderr or done.stdout).strip()[-300:]}")
    (job,) = json.loads(done.stdout)["jobs"]
    side = job[kind]
    if side["io_bytes"] != nbytes:
        raise Unavailable(f"fio moved {side['io_bytes']} of {nbytes} bytes")
    return float(side["bw_bytes"])


def best_ways(folder: Path, nbytes: int, say: Callable[[str], None]) -> dict[str, Way]:
    """Return the fastest way to write and to read files of `nbytes` in a folder. Each way is tried
    once on a shorter file, and the best of those in turns. Raises Unavailable if none works."""
    tried_nbytes = min(nbytes, TRIED_NBYTES)
    ways = list(_ways(tried_nbytes, nbytes))
    if not ways:
        raise Unavailable(f"{nbytes} bytes are no multiple of any block that fio is tried with")
    speeds: dict[str, dict[Way, float]] = {"write": {}, "read": {}}
    for number, way in enumerate(ways):
        say(f"looking for fio's best, {number + 1} of {len(ways)}")
        file = folder / f"fio-tried-{number}"
        try:
            for kind, found in speeds.items():
                found[way] = bandwidth(file, kind, way, tried_nbytes)
        except Unavailable as error:  # an engine that this build or kernel lacks
            say(f"{way.engine}: {error}")
        finally:
            file.unlink(missing_ok=True)
    if not all(speeds.values()):
        raise Unavailable("fio worked in no way that was tried")
    file = folder / "fio-tried"
    try:
        writing = _fastest_of(_fastest(speeds["write"]), "write", file, nbytes, say)
        reading = _fastest_of(_fastest(speeds["read"]), "read", file, nbytes, say)
    finally:
        file.unlink(missing_ok=True)
    return {"write": writing, "read": reading}


def _fastest(speeds: Mapping[Way, float]) -> list[Way]:
    return sorted(speeds, key=speeds.__getitem__, reverse=True)[:FINALISTS]


def _fastest_of(
    ways: Sequence[Way], kind: str, file: Path, nbytes: int, say: Callable[[str], None]
) -> Way:
    """Return the way of the best median, each on all of `file`, in turns."""
    speeds: dict[Way, list[float]] = {way: [] for way in ways}
    for number in range(FINAL_ROUNDS):
        say(f"looking for fio's best of {len(ways)} to {kind}, {number + 1} of {FINAL_ROUNDS}")
        for way in ways:
            if kind == "write":
                file.unlink(missing_ok=True)  # each write is measured on a new file, too
            speeds[way].append(bandwidth(file, kind, way, nbytes))
    return max(ways, key=lambda way: median(speeds[way]))


def _ways(*nbytes: int) -> Iterator[Way]:
    """Yield the ways to move files of all these sizes."""
    for engine, block_nbytes, (jobs, depth) in product(ENGINES, BLOCKS_NBYTES, JOBS_DEPTH):
        if not any(each % (jobs * block_nbytes) for each in nbytes):
            yield Way(engine, block_nbytes, jobs, depth)
