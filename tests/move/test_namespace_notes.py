"""What a namespace stands for is known after a restart, in each directory that has any of it."""

from __future__ import annotations

import asyncio
import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.decide.namespaces import UNKNOWN_MODEL
from kvstore.model.block import Namespace
from kvstore.move import namespace_notes
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.tier.file import Devices, DeviceState
from kvstore.tier.file.devices import admission
from tests.store.node import SPEC, Node, chain

A = chain(1)
NAMED = replace(SPEC, name="vendor/model")


def files(path: Path) -> list[str]:
    return sorted(each.stem for each in path.glob("*.namespace"))


def filled(*paths: Path) -> None:
    with Node(paths) as node:
        node.put(A, durable=True)


def started(*paths: Path) -> Node:
    """Start a node to which nobody has told anything."""
    node = Node(paths)
    node.run(node.store.start())
    node.recall()
    return node


def spec_in(node: Node) -> list[Namespace | None]:
    return [use.namespace for use in node.store.namespaces.all()]


def test_a_start_knows_what_it_finds_and_completes_its_groups(tmp_path: Path) -> None:
    filled(tmp_path)
    assert files(tmp_path) == [SPEC.id.hex()]
    node = started(tmp_path)
    assert spec_in(node) == [SPEC]
    assert node.store.gets.match(SPEC.id, A).hit_blocks == 24, "before anybody has registered it"
    node.__exit__()


def test_a_kill_leaves_it_behind(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(node.store.start())
    node.store.namespaces.register(NAMED)
    node.put(A, durable=True)
    assert files(tmp_path) == [SPEC.id.hex()], "when a durable put is answered"
    copy = tmp_path.with_name("killed")
    shutil.copytree(tmp_path, copy)
    node.__exit__()
    again = started(copy)
    (use,) = again.store.namespaces.all()
    assert (use.model, use.blocks, use.file_bytes > 0) == ("vendor/model", 24, True)
    again.__exit__()


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * (1 << 20)])
def test_a_wrong_file_is_nobodys_and_is_written_anew(tmp_path: Path, content: bytes) -> None:
    filled(tmp_path)
    file = tmp_path / f"{SPEC.id.hex()}.namespace"
    file.write_bytes(content)
    node = started(tmp_path)
    assert spec_in(node) == [None]
    assert [use.model for use in node.store.namespaces.all()] == [UNKNOWN_MODEL]
    node.store.namespaces.register(SPEC)
    assert node.store.gets.match(SPEC.id, A).hit_blocks == 24
    node.put(chain(2), durable=True)
    node.__exit__()
    node = started(tmp_path)
    assert spec_in(node) == [SPEC]
    node.__exit__()


def test_each_directory_says_what_it_holds_and_one_is_enough(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    with Node(paths) as node:
        for name in range(4):
            node.put(chain(name), durable=True)
    assert [files(path) for path in paths] == [[SPEC.id.hex()]] * 2
    (paths[1] / f"{SPEC.id.hex()}.namespace").unlink()
    node = started(*paths)
    assert spec_in(node) == [SPEC]
    node.__exit__()
    shutil.move(paths[0], tmp_path / "away")
    node = started(*paths)
    assert spec_in(node) == [None], "it was only in the one that is not mounted"
    node.__exit__()


def test_it_leaves_when_nothing_of_the_namespace_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace_notes, "TIDY_EVERY_S", 0.0)
    filled(tmp_path)
    (tmp_path / f"{'ab' * 32}.namespace").write_bytes(b"of a namespace that has nothing here")
    with Node(tmp_path) as node:
        node.recall()
        assert files(tmp_path) == [SPEC.id.hex()]
        notes = node.write_behind.namespace_notes
        for _ in range(3):
            node.run(notes.tidy_now_and_then())
        assert files(tmp_path) == [SPEC.id.hex()], "it has frames"
        node.run(node.store.deletes.clear(SPEC.id))
        for _ in range(2):
            node.run(notes.tidy_now_and_then())
        assert files(tmp_path) == []
        node.put(A, durable=True)
        assert files(tmp_path) == [SPEC.id.hex()], "and comes back with its next frame"


def test_nothing_is_remembered_of_a_directory_that_went_and_came_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace_notes, "TIDY_EVERY_S", 0.0)
    monkeypatch.setattr(admission, "RETRY_S", 0.01)
    with Node(tmp_path) as node:
        notes, file = node.write_behind.namespace_notes, node.file
        assert file is not None
        node.put(A, durable=True)
        for _ in range(3):
            node.run(notes.tidy_now_and_then())
            node.run(withdraw(file))
            node.until(lambda: len(file.mounts) == 1)
            node.run(notes.load())
            assert set(notes._idle) <= set(notes._noted) == set(file.mounts)


async def withdraw(file: Devices) -> None:
    (mount,) = file.mounts
    file.admission._take_out(mount, DeviceState.FAILED, "it hung")


def test_frames_of_an_older_release_get_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace_notes, "TIDY_EVERY_S", 0.0)
    filled(tmp_path)
    (tmp_path / f"{SPEC.id.hex()}.namespace").unlink()
    with Node(tmp_path) as node:
        node.recall()
        node.run(node.write_behind.namespace_notes.tidy_now_and_then())
        assert files(tmp_path) == [SPEC.id.hex()]


def test_their_number_and_size_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_notes, "DIRECTORY_NBYTES_MAX", 3 * 4096)
    with Node(tmp_path) as node:
        specs = [replace(SPEC, identity=(("number", str(number)),)) for number in range(5)]
        (mount,) = node.write_behind._file.mounts  # type: ignore[union-attr]
        for each in specs:
            node.store.namespaces.register(each)
            node.run(node.write_behind.namespace_notes.written([(mount, each.id)]))
        assert files(tmp_path) == sorted(each.id.hex() for each in specs[2:])
        huge = replace(SPEC, identity=(("text", "x" * 66_000),))
        node.store.namespaces.register(huge)
        node.run(node.write_behind.namespace_notes.written([(mount, huge.id)]))
        assert huge.id.hex() not in files(tmp_path)


def test_one_that_does_not_fit_any_more_is_not_taken(tmp_path: Path) -> None:
    filled(tmp_path)
    node = Node(tmp_path, arena_bytes=8192)
    node.run(node.store.start())
    assert spec_in(node) == [None]
    node.__exit__()


def test_a_directory_that_comes_while_others_are_indexed_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RETRY_S", 0.01)
    paths = [tmp_path / "a", tmp_path / "b"]
    filled(*paths)
    disks = (FaultyDisk(syncs=False), FaultyDisk(syncs=False))
    disks[1].fault = failing("names", errno.EIO)
    node = Node(paths, disks=disks)

    async def start_late() -> None:
        async with node.write_behind.recall.turn:  # the first directory is still indexed
            await node.store.start()
            disks[1].fault = None
            assert node.file is not None
            while len(node.file.mounts) < len(paths):  # noqa: ASYNC110 - tasks of the tier change it
                await asyncio.sleep(0.01)

    node.run(start_late())
    node.recall()
    assert len(node.write_behind.namespace_notes._noted) == len(paths)
    assert all(node.write_behind.namespace_notes._noted.values())
    node.__exit__()
