"""What /sys says about nodes and GPUs, and what follows for the arena and for threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvstore.cli.check_gpu import judge_numa
from kvstore.store.findings import Level
from kvstore.system.numa import (
    Topology,
    cpus_for_arena,
    cpus_near,
    on_cpus,
    pages_by_node,
    parse_cpus,
    pin_this_thread,
    read_topology,
)

H200, NIC, VGA = ("0x10de", "0x030200"), ("0x15b3", "0x020700"), ("0x1a03", "0x030000")
TWO = {0: "0-3,8-11", 1: "4-7,12-15"}


def machine(root: Path, nodes: dict[int, str], devices: dict[str, tuple[tuple[str, str], int]]):
    """Write what the kernel would show under /sys."""
    for node, cpus in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for address, ((vendor, kind), node) in devices.items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            (folder / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", {0}),
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("", set()),
        ("x,2", {2}),
        ("3-1", set()),
    ],
)
def test_lists_of_processors(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


def test_gpus_are_found_with_their_node_and_nothing_else_is(tmp_path: Path) -> None:
    devices = {"0000:1b:00.0": (H200, 0), "0000:9A:00.0": (H200, 1), "0000:01:00.0": (NIC, 0)}
    devices |= {"0000:02:00.0": (VGA, 0), "0000:03:00.0": (H200, -1)}
    topology = read_topology(machine(tmp_path, TWO, devices))
    assert topology.gpus == {"0000:1b:00.0": 0, "0000:9a:00.0": 1}
    assert topology.nodes[1] == {4, 5, 6, 7, 12, 13, 14, 15}
    assert topology.gpu_node is None
    assert cpus_for_arena(tmp_path) == set()
    assert cpus_near("0000:9A:00.0", tmp_path) == topology.nodes[1]
    assert cpus_near("0000:77:00.0", tmp_path) == cpus_near("", tmp_path) == set()


def test_the_arena_belongs_near_the_gpus_if_they_are_in_one_place(tmp_path: Path) -> None:
    machine(tmp_path, TWO, {"0000:9a:00.0": (H200, 1), "0000:9b:00.0": (H200, 1)})
    assert cpus_for_arena(tmp_path) == parse_cpus(TWO[1])


@pytest.mark.parametrize("nodes", [{}, {0: "0-1"}])
def test_where_there_is_one_node_nothing_is_chosen(tmp_path: Path, nodes: dict[int, str]) -> None:
    machine(tmp_path, nodes, {"0000:9a:00.0": (H200, 0)})
    assert cpus_for_arena(tmp_path) == cpus_near("0000:9a:00.0", tmp_path) == set()


def in_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_is_pinned_to_what_it_may_have_and_others_are_not() -> None:
    allowed = os.sched_getaffinity(0)
    one, found = min(allowed), []

    def work() -> None:
        found.append(pin_this_thread({one, 4095}))
        found.append(os.sched_getaffinity(0))
        found.append(pin_this_thread({4095}))

    in_thread(work)
    assert found == [True, {one}, False]
    with on_cpus({one}):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == allowed


NUMA_MAPS = """\
7f00 default file=/memfd:kvstore-arena\\040(deleted) dirty=5 mapmax=2 N0=3 N1=2 kernelpagesize_kB=4
7f10 default file=/memfd:kvstore-arena\\040(deleted) dirty=1 N1=1 kernelpagesize_kB=2048
7f20 default anon=9 N0=9 kernelpagesize_kB=4
"""


def test_pages_of_the_arena_are_counted_by_node() -> None:
    assert pages_by_node(NUMA_MAPS, "memfd:kvstore-arena") == {0: 3, 1: 2 + 512}


def topology(*nodes: int) -> Topology:
    near = {f"0000:{number}b:00.0": node for number, node in enumerate(nodes)}
    return Topology({0: frozenset({0}), 1: frozenset({1})}, near)


def test_the_doctor_says_where_the_memory_is_and_what_to_type() -> None:
    good = judge_numa(topology(1, 1), {1: 99, 0: 1})
    assert good.level is Level.OK
    assert "99% on node 1" in good.found
    far = judge_numa(topology(1, 1), {0: 60, 1: 40})
    assert far.level is Level.NOTE
    assert "--membind=1" in far.do
    assert judge_numa(topology(0, 1), {0: 1}).level is Level.NOTE
    assert "not seen" in judge_numa(topology(1), {}).found
    assert "no GPUs" in judge_numa(topology(), {}).found
    assert "one node" in judge_numa(Topology({0: frozenset({0})}, {}), {0: 5}).found
