"""Which memory is near which GPU, as Linux tells it under /sys; no GPU is touched for it.

Copies between a GPU and memory of another node cross the processors' link, which is slower than
PCIe on most machines. So the arena's extents are first touched, and copied from and to, on
processors of the GPUs' node, wherever that is one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"  # VGA and 3D controllers


@dataclass(frozen=True, slots=True)
class Topology:
    """NUMA nodes with their processors, and the GPUs by PCI address with their node."""

    nodes: Mapping[int, frozenset[int]]
    gpus: Mapping[str, int]

    @property
    def gpu_node(self) -> int | None:
        """The node of all GPUs; None without GPUs, with one node only, or if they have several."""
        near = set(self.gpus.values())
        return near.pop() if len(near) == 1 and len(self.nodes) > 1 else None


def read_topology(sys: Path = SYS) -> Topology:
    """Read what the machine has. What cannot be read is not there."""
    nodes = {
        int(path.name[4:]): parse_cpus(_text(path / "cpulist"))
        for path in sorted((sys / "devices/system/node").glob("node[0-9]*"))
    }
    return Topology(nodes, dict(_gpus(sys, nodes)))


def parse_cpus(text: str) -> frozenset[int]:
    """Return the processors of a list such as "0-3,8,10-11"; malformed parts are left out."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match:
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def cpus_near(pci_address: str, sys: Path = SYS) -> frozenset[int]:
    """Return the processors of a GPU's node; none if there is nothing to choose."""
    topology = read_topology(sys)
    node = topology.gpus.get(pci_address.lower())
    return frozenset() if node is None or len(topology.nodes) < 2 else topology.nodes[node]


def cpus_for_arena(sys: Path = SYS) -> frozenset[int]:
    """Return the processors the arena is best first touched on; none if there is no best."""
    topology = read_topology(sys)
    return frozenset() if topology.gpu_node is None else topology.nodes[topology.gpu_node]


def pin_this_thread(cpus: Set[int]) -> bool:
    """Keep the calling thread on `cpus`, as far as it may run there. False: left as it was."""
    allowed = os.sched_getaffinity(0)
    if not allowed & cpus:
        return False
    os.sched_setaffinity(0, allowed & cpus)
    return True


@contextlib.contextmanager
def on_cpus(cpus: Set[int]) -> Iterator[None]:
    """Pin the calling thread for a while."""
    before = os.sched_getaffinity(0)
    pinned = pin_this_thread(cpus)
    try:
        yield
    finally:
        if pinned:
            os.sched_setaffinity(0, before)


def pages_by_node(numa_maps: str, name: str) -> dict[int, int]:
    """Return how many pages the mappings of files called `name` have on each node.

    numa_maps: the text of /proc/PID/numa_maps.
    """
    found: dict[int, int] = {}
    for line in numa_maps.splitlines():
        if name in line:
            size = re.search(r"kernelpagesize_kB=(\d+)", line)
            unit = int(size[1]) // 4 if size else 1
            for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
                found[int(node)] = found.get(int(node), 0) + int(count) * unit
    return found


def _gpus(sys: Path, nodes: Mapping[int, frozenset[int]]) -> Iterator[tuple[str, int]]:
    for path in sorted((sys / "bus/pci/devices").glob("*")):
        if _text(path / "vendor") == _NVIDIA and _text(path / "class").startswith(_DISPLAY_CLASS):
            node = _text(path / "numa_node")
            if node.isdigit() and int(node) in nodes:  # -1: the firmware does not say
                yield path.name.lower(), int(node)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
