"""How much memory this process may still take: of the machine, and of every limit above it.

An arena that does not fit gets somebody killed, and the kernel may choose an engine. So it is asked
here before memory is taken: MemAvailable, and the limits of the control groups (version 1 and 2) of
this process and of all above them. What is only page cache counts as free.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvstore.model.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
FLOOR_NBYTES_MIN = 128 * MIB
FLOOR_NBYTES_MAX = GIB
FLOOR_SHARE = 32  # of a bound, one part stays free
TIGHT_SHARE = 8  # of a bound, one part should be left to engines and the page cache
ADVISED_SHARE = 4  # of a bound, one part is left by the arena that is advised
OOM_SCORE_FIRST = 1000

_NO_LIMIT = 1 << 62  # version 1 says "none" by a number near 2**63


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that limits memory. free_nbytes: of total_nbytes, what is not taken."""

    name: str
    total_nbytes: int
    free_nbytes: int

    @property
    def floor_nbytes(self) -> int:
        """What stays free for others."""
        share = self.total_nbytes // FLOOR_SHARE
        return max(FLOOR_NBYTES_MIN, min(FLOOR_NBYTES_MAX, share))

    @property
    def spare_nbytes(self) -> int:
        """What may be taken now; less than nothing when others have taken of the floor."""
        return self.free_nbytes - self.floor_nbytes

    def text(self) -> str:
        return f"{self.name} has {_size(self.total_nbytes)}, {_size(self.free_nbytes)} of it free"


class Fit(StrEnum):
    FITS = "fits"
    TIGHT = "tight"
    NOT_NOW = "not_now"
    NEVER = "never"


class Judgement(NamedTuple):
    """Whether an arena fits, why, and what to type if not."""

    fit: Fit
    text: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """Every bound on this process, the machine first."""

    bounds: tuple[Bound, ...]

    @property
    def tightest(self) -> Bound:
        return min(self.bounds, key=lambda bound: bound.spare_nbytes)

    @property
    def spare_nbytes(self) -> int:
        """What may be taken now."""
        return self.tightest.spare_nbytes

    def judge(self, capacity_bytes: int, held_bytes: int = 0, *, pool_bytes: int = 0) -> Judgement:
        """Say whether an arena fits, of which `held_bytes` are taken already. pool_bytes: what a
        pool takes of this host beside it."""
        wanted = f"dram.capacity={_exact_size(capacity_bytes)}"
        if pool_bytes:
            wanted += f" with {_exact_size(pool_bytes)} of pool.segment and pool.buffer"
        capacity_bytes += pool_bytes
        smallest = min(self.bounds, key=lambda bound: bound.total_nbytes)
        for bound, fit, room in (
            (smallest, Fit.NEVER, smallest.total_nbytes - smallest.floor_nbytes),
            (self.tightest, Fit.NOT_NOW, self.spare_nbytes + held_bytes),
        ):
            if capacity_bytes > room:
                text = (
                    f"{wanted} does not fit: {bound.text()}, and "
                    f"{_size(bound.floor_nbytes)} must stay free"
                )
                return Judgement(fit, text, self._advice(held_bytes - pool_bytes))
        bound = self.tightest
        left = bound.free_nbytes + held_bytes - capacity_bytes
        if left < bound.total_nbytes // TIGHT_SHARE:
            text = f"{wanted} leaves {_size(left)} for engines and the page cache: {bound.text()}"
            return Judgement(Fit.TIGHT, text, self._advice(held_bytes - pool_bytes))
        return Judgement(Fit.FITS, f"{wanted} fits: {bound.text()}")

    def _advice(self, held_bytes: int) -> str:
        """Return what to type: an arena that leaves something for everybody else. held_bytes: what
        it has already, less what is taken beside it."""
        bound = self.tightest
        free = bound.free_nbytes + held_bytes
        room = max(free - bound.total_nbytes // ADVISED_SHARE, (free - bound.floor_nbytes) // 2)
        if room < MIB:
            return "free some memory, or raise the limit: there is no room for an arena"
        unit, name = (GIB, "GiB") if room >= GIB else (MIB, "MiB")
        return f"--set dram.capacity={room // unit}{name}"


def read_memory(root: Path = Path("/")) -> Memory:
    """Return what limits this process. root: where /proc and /sys are.

    What cannot be read limits nothing. Raises ConfigError without /proc/meminfo.
    """
    try:
        machine = tuple(_machine(root))
    except (OSError, KeyError) as error:
        raise ConfigError(f"{root}/proc/meminfo cannot be read: {error}") from error
    return Memory((*machine, *_groups(root)))


def check_capacity(
    capacity_bytes: int, memory: Memory, held_bytes: int = 0, *, pool_bytes: int = 0
) -> Judgement:
    """Return how an arena fits. Raises ConfigError, with what to type, if it does not."""
    judged = memory.judge(capacity_bytes, held_bytes, pool_bytes=pool_bytes)
    if judged.fit in (Fit.NEVER, Fit.NOT_NOW):
        raise ConfigError(f"{judged.text}. Type: {judged.do}")
    return judged


def prefer_killing_this() -> bool:
    """Ask the kernel to kill this process before any engine when memory runs out.

    A cache is worth less than what computes. Needs no privilege. False: an operator, or a
    container, has already said something else, or the kernel refused.
    """
    path = Path("/proc/self/oom_score_adj")
    try:
        if path.read_text().strip() != "0":
            return False
        path.write_text(str(OOM_SCORE_FIRST))
    except OSError:
        return False
    return True


def _machine(root: Path) -> Iterator[Bound]:
    info = _numbers((root / "proc/meminfo").read_text().replace(":", " "))
    total, free = info["MemTotal"] * 1024, info.get("MemAvailable", info.get("MemFree", 0)) * 1024
    yield Bound("this machine", total, free)
    with contextlib.suppress(OSError):
        strict = (root / "proc/sys/vm/overcommit_memory").read_text().strip() == "2"
        if strict and "CommitLimit" in info and "Committed_AS" in info:
            limit = info["CommitLimit"] * 1024
            left = max(0, limit - info["Committed_AS"] * 1024)
            yield Bound("vm.overcommit_memory=2", limit, left)


def _groups(root: Path) -> Iterator[Bound]:
    """Yield the limits of the control groups this process is in, from its own upwards."""
    with contextlib.suppress(OSError, ValueError):
        own = (root / "proc/self/cgroup").read_text()
        mounts = (root / "proc/self/mountinfo").read_text()
        for version, directory, top in _directories(own, mounts):
            limited = _limit_v2 if version == 2 else _limit_v1
            for each in (directory, *directory.parents):
                bound = limited(root / each.relative_to("/"), str(each))
                if bound is not None:
                    yield bound
                if each == top:
                    break


def _directories(own: str, mounts: str) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """Yield (version, directory of this process, directory of the mount) of each hierarchy."""
    paths: dict[int, str] = {}
    for line in own.splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            paths[2] = group
        elif "memory" in controllers.split(","):
            paths[1] = group
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        version = {"cgroup2": 2, "cgroup": 1}.get(kind)
        if version not in paths or (version == 1 and "memory" not in options.split(",")):
            continue
        fields = mount.split(" ")
        shown, top = PurePosixPath(_unescaped(fields[3])), PurePosixPath(_unescaped(fields[4]))
        own_group = PurePosixPath(paths[version])
        # A container that sees its own group as the root has another path than the mount.
        seen = own_group.is_relative_to(shown)
        inside = own_group.relative_to(shown) if seen else PurePosixPath()
        yield version, (top if ".." in inside.parts else top / inside), top


def _limit_v2(directory: Path, name: str) -> Bound | None:
    limits = {each: _number(directory / each) for each in ("memory.max", "memory.high")}
    known = {each: limit for each, limit in limits.items() if limit is not None}
    if not known:
        return None
    tightest = min(known, key=lambda each: known[each])
    return _bound(
        f"the memory limit {name}/{tightest}",
        known[tightest],
        _number(directory / "memory.current"),
        directory / "memory.stat",
        ("inactive_file", "active_file", "slab_reclaimable"),
    )


def _limit_v1(directory: Path, name: str) -> Bound | None:
    limit = _number(directory / "memory.limit_in_bytes")
    if limit is None or limit >= _NO_LIMIT:
        return None
    return _bound(
        f"the memory limit {name}/memory.limit_in_bytes",
        limit,
        _number(directory / "memory.usage_in_bytes"),
        directory / "memory.stat",
        ("total_inactive_file", "total_active_file"),
    )


def _bound(
    name: str, limit: int, used: int | None, stat: Path, reclaimable: tuple[str, ...]
) -> Bound:
    """used: what is taken, page cache included, which the kernel gives back when it is needed."""
    counts: dict[str, int] = {}
    with contextlib.suppress(OSError):
        counts = _numbers(stat.read_text())
    taken = max(0, (used or 0) - sum(counts.get(each, 0) for each in reclaimable))
    return Bound(name, limit, max(0, limit - taken))


def _number(path: Path) -> int | None:
    """Return the number in a file; None: there is none, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(text: str) -> dict[str, int]:
    """Return the first number of each line, by the word before it."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _size(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} bytes"


def _exact_size(nbytes: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)
