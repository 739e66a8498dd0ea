"""What may still be taken of memory, read from made-up /proc and /sys."""

from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.system.memory import GIB, MIB, Bound, Fit, Memory, check_capacity, read_memory

MEMINFO = """MemTotal:       {total} kB
MemFree:         1000000 kB
MemAvailable:   {free} kB
CommitLimit:    {commit} kB
Committed_AS:    1048576 kB
"""
V2 = "30 23 0:26 {root} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 23 0:27 {root} {at} rw - cgroup cgroup rw,memory\n"
CPU = "32 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
DISK = "33 23 8:1 / / rw - ext4 /dev/root rw\n"


class Host:
    """A made-up root directory: 24 GiB, of which 20 are free, and no limits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", MEMINFO.format(total=24 << 20, free=20 << 20, commit=12 << 20))
        self.write("proc/sys/vm/overcommit_memory", "0\n")
        self.write("proc/self/cgroup", "4:memory:/\n0::/\n")
        self.write("proc/self/mountinfo", DISK)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    def group(self, path: str, **files: object) -> None:
        for name, text in files.items():
            self.write(f"{path}/{name.replace('__', '.')}", f"{text}\n")

    def read(self) -> Memory:
        return read_memory(self.root)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_machine_without_limits_is_bound_by_what_is_available(host: Host) -> None:
    memory = host.read()
    assert memory.bounds == (Bound("this machine", 24 * GIB, 20 * GIB),)
    assert memory.spare_nbytes == 20 * GIB - 768 * MIB  # a 32nd of the machine stays free


def test_strict_overcommit_is_a_bound_of_its_own(host: Host) -> None:
    host.write("proc/sys/vm/overcommit_memory", "2\n")
    assert host.read().tightest == Bound("vm.overcommit_memory=2", 12 * GIB, 11 * GIB)


def test_v2_every_ancestor_counts_and_page_cache_does_not(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/a.slice/b.service\n")
    host.write("proc/self/mountinfo", DISK + V2.format(root="/", at="/sys/fs/cgroup"))
    at = "sys/fs/cgroup"
    host.group(f"{at}/a.slice", memory__max=3 * GIB, memory__high="max", memory__current=2 * GIB)
    host.group(f"{at}/a.slice", memory__stat=f"inactive_file {GIB // 2}\nactive_file {GIB // 2}")
    host.group(f"{at}/a.slice/b.service", memory__max=4 * GIB, memory__high="max")
    host.group(f"{at}/a.slice/b.service", memory__current=GIB)
    memory = host.read()
    names = [bound.name.removeprefix("the memory limit ") for bound in memory.bounds]
    assert names == [
        "this machine",
        "/sys/fs/cgroup/a.slice/b.service/memory.max",
        "/sys/fs/cgroup/a.slice/memory.max",
    ]
    assert memory.tightest.free_nbytes == 2 * GIB


def test_v2_the_lower_of_max_and_high_counts(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/a\n")
    host.write("proc/self/mountinfo", V2.format(root="/", at="/sys/fs/cgroup/unified"))
    host.group("sys/fs/cgroup/unified/a", memory__max=4 * GIB, memory__high=GIB, memory__current=0)
    assert host.read().tightest.name.endswith("/unified/a/memory.high")


def test_v2_in_a_container_that_sees_its_own_group_as_the_root(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/\n")
    host.write("proc/self/mountinfo", V2.format(root="/", at="/sys/fs/cgroup"))
    host.group("sys/fs/cgroup", memory__max=2 * GIB, memory__high="max", memory__current=GIB)
    assert host.read().tightest == Bound("the memory limit /sys/fs/cgroup/memory.max", 2 * GIB, GIB)


@pytest.mark.parametrize("path", ["/docker/1234", "/../other"])
def test_v1_in_a_container(host: Host, path: str) -> None:
    """The mount shows the container's own group, under a path that does not exist in here."""
    host.write("proc/self/cgroup", f"5:cpu:/\n4:memory:{path}\n0::/\n")
    mount = V1.format(root="/docker/1234", at="/sys/fs/cgroup/memory")
    host.write("proc/self/mountinfo", DISK + CPU + mount)
    at = "sys/fs/cgroup/memory"
    host.group(at, memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=2 * GIB)
    host.group(at, memory__stat=f"cache 5\ntotal_inactive_file {GIB}\ntotal_active_file {MIB}")
    assert host.read().tightest.free_nbytes == GIB + MIB


def test_v1_without_a_limit(host: Host) -> None:
    host.write("proc/self/cgroup", "4:memory:/x\n")
    host.write("proc/self/mountinfo", V1.format(root="/", at="/sys/fs/cgroup/memory"))
    host.group("sys/fs/cgroup/memory/x", memory__limit_in_bytes=9223372036854771712)
    host.group("sys/fs/cgroup/memory/x", memory__usage_in_bytes=5)
    assert len(host.read().bounds) == 1


def test_a_mount_point_with_a_space(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/a\n")
    host.write("proc/self/mountinfo", V2.format(root="/", at="/sys/c\\040g"))
    host.group("sys/c g/a", memory__max=GIB, memory__high="max", memory__current=0)
    assert host.read().tightest.total_nbytes == GIB


@pytest.mark.parametrize("text", ["", "nonsense", "0::relative\n4:memory\n", "::::\n0:"])
def test_what_cannot_be_read_limits_nothing(host: Host, text: str) -> None:
    host.write("proc/self/cgroup", text)
    host.write("proc/self/mountinfo", f"{text}\n{V2.format(root='/', at='/sys/fs/cgroup')}")
    assert len(host.read().bounds) == 1


def test_no_meminfo_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="meminfo"):
        read_memory(tmp_path)


def memory(total: int, free: int) -> Memory:
    return Memory((Bound("this machine", total, free),))


def test_what_can_never_fit_is_refused_with_the_numbers_and_what_to_type() -> None:
    with pytest.raises(ConfigError) as refused:
        check_capacity(1 << 40, memory(24 * GIB, 22 * GIB))
    for word in ("dram.capacity=1TiB", "24 GiB", "22 GiB", "--set dram.capacity=16GiB"):
        assert word in str(refused.value)


def test_what_is_typed_as_told_is_not_even_tight() -> None:
    for total, free in ((24, 22), (24, 9), (64, 64), (1, 1)):
        room = memory(total * GIB, free * GIB)
        advice = room.judge(1 << 50).do
        number, unit = advice.removeprefix("--set dram.capacity=")[:-3], advice[-3:]
        capacity = int(number) * {"GiB": GIB, "MiB": MIB}[unit]
        assert room.judge(capacity).fit is Fit.FITS, advice


def test_what_others_have_taken_is_another_refusal_than_what_can_never_be() -> None:
    assert memory(24 * GIB, 4 * GIB).judge(8 * GIB).fit is Fit.NOT_NOW
    assert memory(24 * GIB, 4 * GIB).judge(8 * GIB, held_bytes=6 * GIB).fit is Fit.TIGHT
    assert memory(24 * GIB, 20 * GIB).judge(8 * GIB).fit is Fit.FITS


def test_no_arena_is_advised_where_there_is_room_for_none() -> None:
    assert "--set" not in memory(GIB, 64 * MIB).judge(GIB).do


def test_what_a_pool_takes_counts_beside_the_arena(host: Host) -> None:
    memory = host.read()
    assert memory.judge(10 * GIB).fit is Fit.FITS
    with pytest.raises(ConfigError, match=r"dram\.capacity=10GiB with 12GiB of pool\.segment and"):
        check_capacity(10 * GIB, memory, pool_bytes=12 * GIB)
    advised = memory.judge(10 * GIB, pool_bytes=12 * GIB).do
    assert advised == "--set dram.capacity=3GiB"
    assert memory.judge(3 * GIB, pool_bytes=12 * GIB).fit is Fit.FITS
