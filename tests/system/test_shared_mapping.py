"""Shared memory is mapped where huge pages may begin, and lives as long as somebody has a part."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.system.shared_mapping import HUGE_NBYTES, SharedMapping

PAGE = mmap.PAGESIZE
NBYTES = 3 * PAGE


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, NBYTES)
    os.pwrite(descriptor, b"begin", 0)
    os.pwrite(descriptor, b"end", NBYTES - 3)
    yield descriptor
    os.close(descriptor)


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def mappings() -> list[tuple[int, int]]:
    """Return where each mapping of this process begins and ends."""
    with open("/proc/self/maps", encoding="ascii") as file:
        pairs = [line.split(maxsplit=1)[0].split("-") for line in file]
    return [(int(begin, 16), int(end, 16)) for begin, end in pairs]


def mapped_nbytes() -> int:
    return sum(end - begin for begin, end in mappings())


def is_mapped(address: int) -> bool:
    return any(begin <= address < end for begin, end in mappings())


def test_it_begins_where_a_huge_page_may(fd: int) -> None:
    several = [SharedMapping(fd, NBYTES) for _ in range(5)]
    for each in several:
        view = each.view()
        assert address_of(view) % HUGE_NBYTES == 0
        assert len(view) == NBYTES == each.nbytes
        assert (bytes(view[:5]), bytes(view[-3:])) == (b"begin", b"end")


def test_it_is_the_files_own_memory(fd: int) -> None:
    one, other = SharedMapping(fd, NBYTES), SharedMapping(fd, NBYTES)
    one.view()[PAGE : PAGE + 5] = b"hello"
    assert bytes(other.view()[PAGE : PAGE + 5]) == b"hello"
    assert os.pread(fd, 5, PAGE) == b"hello"


def test_one_to_be_read_cannot_be_written_to(fd: int) -> None:
    view = SharedMapping(fd, NBYTES, writable=False).view()
    assert view.readonly
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    code = (
        "import ctypes, os, sys; from kvstore.system.shared_mapping import SharedMapping;"
        "import numpy as np; fd = os.memfd_create('test'); os.ftruncate(fd, 4096);"
        "view = SharedMapping(fd, 4096, writable=False).view();"
        "ctypes.memset(np.frombuffer(view, np.uint8).ctypes.data, 1, 1)"
    )
    killed = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert killed.returncode == -11, "the kernel has to refuse it as well"


def test_it_is_unmapped_when_nobody_has_a_part(fd: int) -> None:
    mapped = SharedMapping(fd, NBYTES)
    view = mapped.view()
    address, part = address_of(view), view[:5]
    assert not mapped.close()
    view.release()
    assert not mapped.close()
    assert bytes(part) == b"begin"
    part.release()
    assert mapped.close()
    assert mapped.close()
    assert not is_mapped(address)
    with pytest.raises(ValueError, match="closed"):
        mapped.view()


def test_it_ends_with_the_last_part_without_a_close(fd: int) -> None:
    view = SharedMapping(fd, NBYTES).view()
    address = address_of(view)
    assert bytes(view[:5]) == b"begin"
    assert is_mapped(address)
    del view
    assert not is_mapped(address)


def test_none_of_the_room_around_it_stays(fd: int) -> None:
    before = mapped_nbytes()
    mapped = SharedMapping(fd, NBYTES)
    assert mapped_nbytes() >= before + HUGE_NBYTES
    assert mapped.close()
    assert mapped_nbytes() < before + HUGE_NBYTES, "less may be anybody's"


def test_core_dumps_leave_a_hidden_one_out(fd: int) -> None:
    mapped = SharedMapping(fd, NBYTES)
    mapped.hide()
    address = address_of(mapped.view())
    with open("/proc/self/smaps", encoding="ascii") as file:
        ours = file.read().split(f"{address:x}-", 1)[1]
    flags = next(line for line in ours.splitlines() if line.startswith("VmFlags:"))
    assert "dd" in flags.split()


def test_without_room_to_align_it_lies_where_the_kernel_likes() -> None:
    code = """
import os, resource
from kvstore.system.shared_mapping import HUGE_NBYTES, SharedMapping
NBYTES = 256 << 20
fd = os.memfd_create("test")
os.ftruncate(fd, NBYTES)
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * 4096 + NBYTES + HUGE_NBYTES // 2
resource.setrlimit(resource.RLIMIT_AS, (most, most))
view = SharedMapping(fd, NBYTES).view()
view[-3:] = b"end"
assert len(view) == NBYTES and os.pread(fd, 3, NBYTES - 3) == b"end"
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing(fd: int) -> None:
    before = mapped_nbytes()
    with pytest.raises(OSError, match="Bad file descriptor"):
        SharedMapping(1 << 20, NBYTES)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            SharedMapping(read_only, NBYTES)
    finally:
        os.close(read_only)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="bytes"):
            SharedMapping(fd, nbytes)
    assert mapped_nbytes() < before + HUGE_NBYTES
