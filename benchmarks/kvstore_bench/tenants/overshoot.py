"""What tenants take beyond their caps, as the kernel counts it, while something else goes on.

A process beside the daemon looks again and again: at the pages of each tenant's extents
(`st_blocks` of the daemon's memfds, which it tells apart as a client of each tenant), and at the
blocks of the files in each tenant's directories. The daemon is asked nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore_bench.tenants.noise import running

LOOK_S = 0.1
BLOCK_NBYTES = 512


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one tenant may take at most. target: its socket. directories: of its files."""

    name: str
    target: str
    directories: Sequence[Path]
    dram_nbytes: int
    file_nbytes: int


@dataclass(frozen=True, slots=True)
class Site:
    """A daemon by its process, its tenants, and what all of them together may take."""

    pid: int
    tenants: Sequence[Bounds]
    dram_nbytes: int
    file_nbytes: int


@dataclass(slots=True)
class Overshoot:
    """The worst that was seen. nbytes: over a cap, 0 if nobody was over one. seen_nbytes: the most
    that a tenant took of a tier: who saw nothing could not see too much."""

    nbytes: int = 0
    seen_nbytes: int = 0
    looks: int = 0


@contextlib.contextmanager
def watched(site: Site) -> Iterator[Overshoot]:
    """Look from another process inside of the context; what it found is there afterwards. Raises
    Unavailable if it saw nothing."""
    found: SynchronizedArray[int] = get_context("spawn").Array("Q", 3)
    told = Overshoot()
    with running(_watch, [(site, found)]):
        yield told
    told.nbytes, told.seen_nbytes, told.looks = found[:]
    if not told.looks or not told.seen_nbytes:
        raise Unavailable(f"{told.looks} looks at the caps saw {told.seen_nbytes} bytes taken")


def _watch(site: Site, found: SynchronizedArray[int], started: Event, stop: Event) -> None:
    with contextlib.ExitStack() as stack:
        eyes = [_Eye(each, stack) for each in site.tenants]
        while not stop.is_set():
            present = memfds_of(site.pid)
            taken = [(each.bounds, each.dram_nbytes(present), each.file_nbytes()) for each in eyes]
            over = [dram - bounds.dram_nbytes for bounds, dram, _ in taken]
            over += [file - bounds.file_nbytes for bounds, _, file in taken]
            over.append(sum(present.values()) - site.dram_nbytes)
            over.append(sum(file for _, _, file in taken) - site.file_nbytes)
            with found.get_lock():
                found[0] = max([found[0], *over])
                found[1] = max([found[1], *(max(dram, file) for _, dram, file in taken)])
                found[2] += 1
            started.set()
            stop.wait(LOOK_S)


@dataclass(slots=True)
class _Eye:
    """Looks at one tenant. inodes: of its extents, as far as it was told of them."""

    bounds: Bounds
    stack: contextlib.ExitStack
    inodes: dict[int, int] = field(default_factory=dict)
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.stack.enter_context(Client(self.bounds.target, name="watcher"))
        self.client.connect()

    def dram_nbytes(self, present: Mapping[int, int]) -> int:
        """Return what its extents take. An extent that it was not told of yet is nobody's, and
        counts with all together."""
        views = self.client.extents()
        if views.keys() - self.inodes.keys():
            self.inodes |= {number: _inode_of(view) for number, view in views.items()}
        return sum(present.get(inode, 0) for inode in set(self.inodes.values()))

    def file_nbytes(self) -> int:
        return sum(nbytes_under(each) for each in self.bounds.directories)


def memfds_of(pid: int) -> dict[int, int]:
    """Return the bytes in memory of each extent of a daemon, by its inode."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink().name.startswith("memfd:kvstore-arena"):
                stat = link.stat()
                found[stat.st_ino] = stat.st_blocks * BLOCK_NBYTES
    return found


def nbytes_under(directory: Path) -> int:
    """Return what the files under a directory take of the disk. One that is deleted meanwhile
    takes nothing."""
    nbytes = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                nbytes += os.lstat(os.path.join(place, name)).st_blocks * BLOCK_NBYTES
    return nbytes


def _inode_of(view: memoryview) -> int:
    """Return the inode of the file that is mapped where a view is; 0: none is any more."""
    address = np.frombuffer(view, np.uint8).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= address < end:
            return int(inode)
    return 0
