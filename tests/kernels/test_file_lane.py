"""Records from files give the right bytes and sums, however late device and disk are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvstore import checksum  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels import file_lane  # noqa: E402
from kvstore_kernels.device import open_device  # noqa: E402
from kvstore_kernels.file_lane import FileLane, FilePart, FileTransfer  # noqa: E402
from kvstore_kernels.packing import PagedKV, checksum_of_leaves, open_paged  # noqa: E402
from kvstore_kernels.reference import gather_reference  # noqa: E402
from kvstore_kernels.storage import FileReader  # noqa: E402
from tests.kernels.late_device import LateDevice  # noqa: E402
from tests.kernels.test_lane import BATCH, SIZES, groups  # noqa: E402
from tests.kernels.test_paged import same_bytes  # noqa: E402

FAR_S = 60.0
PAGE = 4096


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Where the records of BATCH are: in two files, from whole pages on."""
    directory = tmp_path_factory.mktemp("segments")
    kv, contents, parts = groups(), {"a": b"frame".ljust(PAGE), "b": b""}, {}
    for number, (group, block) in enumerate(BATCH):
        name = "ab"[number % 3 == 2]
        record = bytes(gather_reference(kv[group], [block])[0].numpy())
        parts[group, block] = FilePart(str(directory / name), len(contents[name]), len(record))
        contents[name] += record.ljust(-(-len(record) // PAGE) * PAGE, b"x")
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return parts


def empty():
    return [[torch.zeros_like(layer) for layer in group] for group in groups()]


def lane(device=None, reader=None, **ring) -> FileLane:
    cpu = torch.device("cpu")
    opened = device or open_device(cpu)
    return FileLane(opened, reader or FileReader(cpu), max(SIZES), **ring)


def transfer(paged, batch, written) -> FileTransfer:
    return FileTransfer(paged, batch, [written[each] for each in batch])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    batches=st.lists(
        st.lists(st.sampled_from(BATCH), min_size=1, max_size=7, unique=True),
        min_size=1,
        max_size=3,
    ),
    pieces=st.integers(1, 4),
    piece_nbytes=st.sampled_from([1, 3 * 8192, 1 << 20]),
    read_nbytes=st.sampled_from([1, 12288, 1 << 20]),
    sums=st.booleans(),
)
def test_records_come_from_files(
    *, written, seed, batches, pieces, piece_nbytes, read_nbytes, sums
):
    device = LateDevice(seed)
    opened = lane(device, pieces=pieces, piece_nbytes=piece_nbytes, threads=2)
    before, file_lane.READ_NBYTES_MAX = file_lane.READ_NBYTES_MAX, read_nbytes
    targets = [empty() for _ in batches]
    try:
        found = list(
            opened.write(
                [
                    transfer(PagedKV(target, kernels=sums), batch, written)
                    for target, batch in zip(targets, batches, strict=True)
                ],
                device.mark(),
                time.monotonic() + FAR_S,
            )
        )
    finally:
        file_lane.READ_NBYTES_MAX = before
        opened.close()
    assert device.idle
    assert opened.read_nbytes == sum(SIZES[group] for batch in batches for group, _ in batch)
    kv = groups()
    for target, batch, leaves in zip(targets, batches, found, strict=True):
        records = [gather_reference(kv[group], [block])[0] for group, block in batch]
        assert [*map(checksum_of_leaves, leaves)] == [checksum(r.numpy()) for r in records]
        for (group, block), record in zip(batch, records, strict=True):
            assert same_bytes(gather_reference(target[group], [block])[0], record)


def test_what_lies_side_by_side_is_read_at_once(tmp_path):
    kv, calls = groups(), []

    class Counting(FileReader):
        def open(self, path):
            file = super().open(path)
            fill = file._fill
            file._fill = lambda offset, target: calls.append(len(target)) or fill(offset, target)
            return file

    records = [bytes(gather_reference(kv[0], [block])[0].numpy()) for block in range(4)]
    (tmp_path / "a").write_bytes(b"".join(records))
    parts = [FilePart(str(tmp_path / "a"), 8192 * block, 8192) for block in (0, 1, 3)]
    opened = lane(reader=Counting(torch.device("cpu")))
    batch = [(0, 0), (0, 1), (0, 3)]
    list(opened.write([FileTransfer(open_paged(empty()), batch, parts)], None, far()))
    opened.close()
    assert sorted(calls) == [8192, 16384]


def far() -> float:
    return time.monotonic() + FAR_S


def test_files_that_cannot_be_read_are_errors_and_the_lane_works_on(written, tmp_path):
    opened, paged = lane(pieces=2), open_paged(empty())
    (tmp_path / "short").write_bytes(bytes(100))
    good = transfer(paged, BATCH, written)
    for part, error in (
        (FilePart(str(tmp_path / "absent"), 0, 8192), OSError),
        (FilePart(str(tmp_path / "short"), 0, 8192), EOFError),
        (FilePart(str(tmp_path), 0, 8192), OSError),
    ):
        bad = FileTransfer(paged, [(0, 7)], [part])
        with pytest.raises(error):
            list(opened.write([good, bad, good], None, far()))
        assert len(list(opened.write([good], None, far()))) == 1
    for part in (
        FilePart("/x", 0, 8191),
        FilePart("/x", 512, 8192),
        FilePart("/x", -4096, 8192),
    ):
        with pytest.raises(ValueError, match="are wanted"):
            opened.write([FileTransfer(paged, [(0, 7)], [part])], None, far())
    with pytest.raises(ValueError, match="for 2 blocks"):
        opened.write([FileTransfer(paged, BATCH[:2], [])], None, far())
    opened.close()


def test_a_read_that_hangs_is_given_up_and_touches_nothing_later(written):
    """The disk answers after the deadline: what it brings is in no page, and no later load's."""
    gate, asked = threading.Event(), threading.Event()

    class Hanging(FileReader):
        def open(self, path):
            asked.set()
            gate.wait()
            return super().open(path)

    opened, target = lane(reader=Hanging(torch.device("cpu")), pieces=2), empty()
    wanted = transfer(open_paged(target), BATCH, written)
    with pytest.raises(TimeoutError):
        list(opened.write([wanted], None, time.monotonic() + 0.05))
    assert asked.is_set()
    assert opened.stuck
    with pytest.raises(TimeoutError, match="not come back"):
        opened.write([wanted], None, far())
    gate.set()
    until(lambda: not opened.stuck, 10)
    assert not any(layer.any() for group in target for layer in group)
    assert len(list(opened.write([wanted], None, far()))) == 1
    opened.close()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pages_made_under_inference_mode_are_written_by_any_thread(written, where, kernels):
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device(where)
    with torch.inference_mode():
        opened = FileLane(open_device(device), FileReader(device), max(SIZES))
        target = [[torch.zeros_like(layer) for layer in group] for group in groups(where)]
    paged = open_paged(target) if kernels else PagedKV(target, kernels=False)
    mark = open_device(device).mark()
    list(opened.write([transfer(paged, BATCH, written)], mark, far()))
    opened.close()
    kv = groups()
    for group, block in BATCH:
        for old, new in zip(kv[group], target[group], strict=True):
            assert same_bytes(old[block], new[block].cpu())


HANGING = """
import sys, time, torch
from kvstore_kernels.device import open_device
from kvstore_kernels.file_lane import FileLane, FilePart, FileTransfer
from kvstore_kernels.packing import open_paged
from kvstore_kernels.storage import FileReader

cpu = torch.device("cpu")
for closes in (True, False):
    lane = FileLane(open_device(cpu), FileReader(cpu), 8192)
    pages = open_paged([[torch.zeros(1, 1, 8192, dtype=torch.uint8)]])
    hanging = FileTransfer(pages, [(0, 0)], [FilePart(sys.argv[1], 0, 8192)])
    try:
        list(lane.write([hanging], None, time.monotonic() + 0.1))
    except TimeoutError:
        assert lane.stuck
        if closes:
            lane.close()
        print("given up", flush=True)
"""


def test_a_program_ends_while_a_read_hangs(tmp_path):
    fifo = tmp_path / "fifo"  # to open it for reading waits for somebody who writes
    os.mkfifo(fifo)
    command = [sys.executable, "-c", HANGING, fifo]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert [program.stdout.readline() for _ in range(2)] == ["given up\n"] * 2
            assert program.wait(timeout=20) == 0
        finally:
            program.kill()


def test_without_threads_reads_are_refused_and_nothing_is_read_later(written, monkeypatch):
    opened, target = lane(threads=2), empty()
    wanted = transfer(open_paged(target), BATCH, written)
    start = threading.Thread.start

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        list(opened.write([wanted], None, far()))
    monkeypatch.setattr(threading.Thread, "start", start)
    assert not opened.stuck
    assert not any(layer.any() for group in target for layer in group)
    assert len(list(opened.write([wanted], None, far()))) == 1
    opened.close()
    with pytest.raises(RuntimeError, match="after close"):
        list(opened.write([wanted], None, far()))


def test_threads_end_when_the_lane_is_closed_and_bring_an_error_of_their_own(written):
    def enter():
        raise OSError("no such CPU")

    opened = lane(on_thread=enter, threads=3)
    wanted = transfer(open_paged(empty()), BATCH, written)
    with pytest.raises(OSError, match="no such CPU"):
        list(opened.write([wanted], None, far()))
    threads = opened._threads._threads
    assert 1 <= len(threads) <= 3
    opened.close()
    until(lambda: not any(thread.is_alive() for thread in threads), 10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_records_come_to_a_gpu(written):
    device = torch.device("cuda")
    opened = lane(open_device(device), FileReader(device))
    target = [[layer.to(device) for layer in group] for group in empty()]
    wanted = FileTransfer(open_paged(target), BATCH, [written[each] for each in BATCH])
    (leaves,) = opened.write([wanted], open_device(device).mark(), far())
    kv = groups()
    for (group, block), found in zip(BATCH, leaves, strict=True):
        record = gather_reference(kv[group], [block])[0]
        assert checksum_of_leaves(found) == checksum(record.numpy())
        back = [layer.cpu() for layer in target[group]]
        assert same_bytes(gather_reference(back, [block])[0], record)
    opened.close()
