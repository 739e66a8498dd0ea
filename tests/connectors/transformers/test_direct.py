"""Restores straight from the daemon's files: the same tokens, whatever happens to files and disk.

Files are read into host memory here; the places, the lease, the checks and the detours are those of
a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore import Client, ConfigError  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels.file_lane import FileLane  # noqa: E402
from kvstore_kernels.storage import FileReader  # noqa: E402
from kvstore_transformers import Prefixes, loading  # noqa: E402
from kvstore_transformers.copying import DeviceCopier  # noqa: E402
from tests.connectors.transformers.test_connector import (  # noqa: E402
    make_model,
    plain,
    prompt,
    stored,
)

LAYER_BLOCK = 128  # tokens: 64 KiB of the llama's KV per layer, where a slice may end


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("dram.capacity=128MiB", "dram.extent=64MiB") as daemon:
        yield daemon.start()


@pytest.fixture(params=["llama", "gemma3"])
def model(request):
    return make_model(request.param)


@pytest.fixture
def thin_slices(monkeypatch):
    monkeypatch.setattr(loading, "SLICE_NBYTES_MIN", 1)


def save(model, daemon, ids, block_tokens=32) -> None:
    """Store the KV of a prompt; afterwards only the file tier has it."""
    with Prefixes(model, daemon.target, block_tokens=block_tokens, record="raw") as prefixes:
        stored(prefixes, ids)
        assert prefixes.flush()
    daemon.kill()
    daemon.start()


def direct(model, daemon, **options) -> Prefixes:
    return Prefixes(model, daemon.target, direct_storage="always", **options)


def promoted(daemon) -> int:
    with Client(daemon.target) as client:
        return int(client.admin.stats()["totals"]["promoted_blocks"])


class Disk:
    """Stands between readers and the files. `reads` are counted; `before` is called first."""

    def __init__(self, monkeypatch) -> None:
        self.reads = 0
        self.before = lambda number: None
        opened = FileReader.open

        def open_file(reader, path):
            file = opened(reader, path)
            fill = file._fill

            def counted(offset, target):
                self.reads += 1
                self.before(self.reads)
                return fill(offset, target)

            file._fill = counted
            return file

        monkeypatch.setattr(FileReader, "open", open_file)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def segments(daemon) -> list[Path]:
    return sorted((daemon.directory / "file").glob("*.segment"))


def test_tokens_are_equal_and_nothing_passes_through_the_arena(model, daemon):
    ids = prompt(708)
    answer = plain(model, ids)
    longer = torch.cat([answer, prompt(70, seed=1)], 1)
    save(model, daemon, ids)
    with direct(model, daemon) as prefixes:
        assert prefixes.direct_storage == "host"
        assert prefixes.load(ids).restored_blocks == 707 // 32
        assert prefixes.direct_nbytes > 0
    with direct(model, daemon) as prefixes:  # knows nothing of this model's pace
        assert torch.equal(stored(prefixes, ids), answer)
        assert prefixes.direct_nbytes > 0
        # The next turn: the rest of the answer is put now, and is in the arena.
        assert torch.equal(stored(prefixes, longer), plain(model, longer))
        assert prefixes.flush()
    with direct(model, daemon) as prefixes:
        assert prefixes.load(longer).restored_blocks == 789 // 32
        assert (prefixes.loads_failed, prefixes.direct_failures) == (0, 0)
        with Client(daemon.target) as client:
            until(lambda: client.admin.stats()["leases"] == 0, 10)
            assert client.admin.stats()["file"]["leased_bytes"] == 0
            assert client.admin.stats()["dram"]["blocks"] > 0


def test_through_a_ring_beside_the_arenas_copies(model, daemon, monkeypatch, thin_slices):
    monkeypatch.setattr("kvstore_transformers.prefixes.copier_for", DeviceCopier)
    ids = prompt(5 * LAYER_BLOCK + 5)
    save(model, daemon, ids[:, : 3 * LAYER_BLOCK + 5], LAYER_BLOCK)
    with direct(model, daemon, block_tokens=LAYER_BLOCK) as prefixes:
        assert torch.equal(stored(prefixes, ids), plain(model, ids))
        assert prefixes.flush()
        assert torch.equal(stored(prefixes, ids), plain(model, ids))
        assert prefixes.direct_nbytes > 0
        assert prefixes.loads_failed == 0


@pytest.mark.parametrize("ring", [False, True])
def test_under_inference_mode_files_are_read_as_well(daemon, monkeypatch, ring):
    """Pages are made in the thread of the model, in that mode, and written by another thread."""
    if ring:
        monkeypatch.setattr("kvstore_transformers.prefixes.copier_for", DeviceCopier)
    model, ids = make_model("llama"), prompt(300)
    answer = plain(model, ids)
    save(model, daemon, ids)
    with torch.inference_mode(), direct(model, daemon) as prefixes:
        assert torch.equal(stored(prefixes, ids), answer)
        assert prefixes.direct_nbytes > 0
        assert prefixes.flush()
        assert torch.equal(stored(prefixes, ids), answer)
        assert (prefixes.loads_failed, prefixes.direct_failures) == (0, 0)


def test_an_error_of_any_kind_costs_a_detour_and_stops_the_use_of_files(daemon, disk):
    model, ids = make_model("llama"), prompt(300)
    save(model, daemon, ids)

    def fail(number):
        raise RuntimeError("a driver that is at odds with itself")

    disk.before = fail
    with direct(model, daemon) as prefixes:
        assert torch.equal(stored(prefixes, ids), plain(model, ids))
        assert (prefixes.loads_failed, prefixes.direct_failures) == (0, 1)
        reads = disk.reads
        assert prefixes.load(ids).restored_blocks == 299 // 32
        assert disk.reads == reads, "files are left alone for a while"


def test_where_it_is_not_asked_for_nobody_reads_files(daemon, disk):
    model, ids = make_model("llama"), prompt(300)
    save(model, daemon, ids)
    for mode in ("auto", "never"):
        with Prefixes(model, daemon.target, direct_storage=mode, record="raw") as prefixes:
            assert prefixes.direct_storage == "off"
            assert prefixes.load(ids).restored_blocks == 299 // 32
            assert prefixes.direct_nbytes == 0
    assert disk.reads == 0
    with pytest.raises(ConfigError, match="direct_storage='yes'"):
        Prefixes(model, daemon.target, direct_storage="yes")


@pytest.mark.parametrize("failing_read", [1, 3])
def test_what_cannot_be_read_comes_through_the_arena(daemon, disk, thin_slices, failing_read):
    """From the layer on that is not there yet."""
    model, ids = make_model("llama"), prompt(3 * LAYER_BLOCK + 5)
    save(model, daemon, ids, LAYER_BLOCK)

    def fail(number):
        if number >= failing_read:
            raise OSError("not mounted here")

    disk.before = fail
    with direct(model, daemon, block_tokens=LAYER_BLOCK) as prefixes:
        assert torch.equal(stored(prefixes, ids), plain(model, ids))
        assert (prefixes.loads_failed, prefixes.direct_failures) == (0, 1)
        assert promoted(daemon) == 3
        reads = disk.reads
        assert prefixes.load(ids).restored_blocks == 3
        assert disk.reads == reads, "files are left alone for a while"


def test_a_flipped_bit_is_a_miss_and_the_block_is_dropped(daemon):
    model, ids = make_model("llama"), prompt(300)
    answer = plain(model, ids)
    save(model, daemon, ids)
    (segment, *_) = segments(daemon)
    with segment.open("r+b") as file:
        file.seek(3 * 4096)  # in the first record
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with direct(model, daemon) as prefixes:
        assert prefixes.load(ids).restored_blocks == 0
        assert prefixes.loads_failed == 1
        assert torch.equal(stored(prefixes, ids), answer)
        assert prefixes.flush()
    with direct(model, daemon) as prefixes:
        assert prefixes.load(ids).restored_blocks == 299 // 32, "computed and stored anew"
        with Client(daemon.target) as client:
            assert client.admin.stats()["totals"]["corrupt_blocks"]["reader"] == 1


def test_encoded_blocks_come_through_the_arena(disk):
    with Daemon("dram.capacity=128MiB", "dram.extent=64MiB", "file.codec=zstd") as daemon:
        daemon.start()
        model, ids = make_model("llama").to(torch.bfloat16), prompt(300)
        save(model, daemon, ids, LAYER_BLOCK)
        with direct(model, daemon, block_tokens=LAYER_BLOCK) as prefixes:
            assert prefixes.load(ids).restored_blocks == 2
            assert disk.reads == 0
            assert promoted(daemon) == 2


@pytest.mark.parametrize("deleted", [True, False])
def test_a_reader_that_is_stopped_past_its_deadline_uses_nothing_and_accuses_nobody(
    disk, monkeypatch, deleted
):
    """It stood still when its reads were under way; meanwhile the blocks' space was given back, or
    what it finds in its memory is something else."""
    go, end_first = threading.Event(), FileLane._end_first
    disk.before = lambda number: go.wait()
    with Daemon("dram.capacity=128MiB", "dram.extent=64MiB", "limits.lease_s=0.5") as daemon:
        daemon.start()
        model, ids = make_model("llama"), prompt(300)
        answer = plain(model, ids)
        save(model, daemon, ids)
        with direct(model, daemon) as prefixes, Client(daemon.target) as client:

            def stopped(lane, rounds, leaves, deadline):
                if not go.is_set():
                    until(lambda: client.admin.stats()["file"]["leased_bytes"] == 0, 20)
                    if deleted:
                        client.admin.clear()
                        until(lambda: client.admin.stats()["file"]["physical_bytes"] < 100_000, 20)
                    go.set()
                    wait(rounds[0].reads)
                    if not deleted:
                        rounds[0].staged.zero_()
                return end_first(lane, rounds, leaves, deadline)

            monkeypatch.setattr(FileLane, "_end_first", stopped)
            assert prefixes.load(ids).restored_blocks == 0
            assert (prefixes.loads_failed, prefixes.direct_failures) == (1, 0)
            assert "corrupt_blocks" not in client.admin.stats()["totals"]
        with direct(model, daemon) as prefixes:
            assert prefixes.load(ids).restored_blocks == (0 if deleted else 299 // 32)
            assert torch.equal(stored(prefixes, ids), answer)


def test_a_disk_that_hangs_costs_a_recompute_and_is_left_alone(daemon, disk):
    model, ids = make_model("llama"), prompt(300)
    answer = plain(model, ids)
    save(model, daemon, ids)
    answered = threading.Event()
    disk.before = lambda number: answered.wait()
    with direct(model, daemon, load_deadline_s=0.3) as prefixes:
        assert torch.equal(stored(prefixes, ids), answer)
        assert prefixes.direct_failures == 1
        reads = disk.reads
        assert torch.equal(stored(prefixes, ids), answer)
        assert disk.reads == reads
        answered.set()


def test_a_daemon_killed_while_its_files_are_read_does_no_harm(daemon, disk):
    model, ids = make_model("llama"), prompt(300)
    answer = plain(model, ids)
    save(model, daemon, ids)

    def kill(number):
        if daemon.alive:
            daemon.kill()

    disk.before = kill
    with direct(model, daemon) as prefixes:
        assert torch.equal(stored(prefixes, ids), answer)
        assert prefixes.loads_failed == 0, "the files are as they were, and so is the lease"
        daemon.start()
        until(lambda: prefixes.load(ids).restored_blocks == 299 // 32, 20)
        assert torch.equal(stored(prefixes, ids), answer)


def test_reading_that_is_slower_than_computing_is_not_asked_for(daemon, disk, monkeypatch):
    model, ids = make_model("llama"), prompt(300)
    save(model, daemon, ids)
    with direct(model, daemon) as prefixes:
        assert prefixes.load(ids).restored_blocks == 299 // 32
        reads = disk.reads
        prefixes._pace.note(1, 1e-12)
        prefixes._direct.note_pace(1, 1.0)
        prefixes.load(ids)
        assert disk.reads == reads
