"""What GPUs depend on: how near the daemon's memory is, and how files could reach them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvstore.store.findings import Finding, note, ok
from kvstore.system.numa import Topology, pages_by_node, read_topology
from kvstore.transport.unix_sockets import peer_of

ABOUT = "NUMA"
NEAR_FRACTION_MIN = 0.9
ARENA = "memfd:kvstore-arena"


def check_gpus(target: str) -> Iterator[Finding]:
    """Yield findings about this machine and the daemon at `target`."""
    topology = read_topology()
    yield judge_numa(topology, arena_pages(target))
    if topology.gpus:
        yield _direct_storage(Path("/proc/driver/nvidia-fs/version"))


def _direct_storage(version: Path) -> Finding:
    try:
        found = version.read_text().split()[-1]
    except (OSError, IndexError):
        return ok("GPU storage", "no nvidia-fs: files reach GPUs through host memory")
    return ok("GPU storage", f"nvidia-fs {found}: kvikio can read files into GPU memory")


def judge_numa(topology: Topology, pages: Mapping[int, int]) -> Finding:
    """Judge the arena's pages per node; none if no daemon runs, or /proc does not tell."""
    gpus = ", ".join(f"{address} on node {node}" for address, node in topology.gpus.items())
    if len(topology.nodes) < 2 or not topology.gpus:
        found = "one node" if len(topology.nodes) < 2 else f"{len(topology.nodes)} nodes, no GPUs"
        return ok(ABOUT, f"{found}: memory is equally far from everything")
    total = sum(pages.values())
    shares = ", ".join(f"{count / total:.0%} on node {n}" for n, count in sorted(pages.items()))
    text = f"GPUs: {gpus}; arena: {shares or 'not seen'}"
    node = topology.gpu_node
    if node is None:
        return note(
            ABOUT,
            f"{text}; no node is near all of them",
            "for the shortest way, one daemon and socket for the engines of each node: "
            "numactl --cpunodebind=N --membind=N kvstore serve ...",
        )
    if total and pages.get(node, 0) < NEAR_FRACTION_MIN * total:
        return note(
            ABOUT,
            f"{text}: copies to the GPUs cross the link between processors",
            f"numactl --cpunodebind={node} --membind={node} kvstore serve ... (is it full?)",
        )
    return ok(ABOUT, text)


def arena_pages(target: str) -> dict[int, int]:
    """Return the pages of the arena per node, as far as the kernel tells this user."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(1.0)
            link.connect(target.removeprefix("unix:"))
            pid = peer_of(link).pid
        return pages_by_node(Path(f"/proc/{pid}/numa_maps").read_text(), ARENA)
    except OSError:
        return {}
