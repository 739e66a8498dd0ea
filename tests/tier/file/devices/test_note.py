"""A note outlives crashes: the newest whole one is read, whatever became of the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.tier.file.devices.note import read_note, write_note
from kvstore.tier.file.disk import RealDisk
from kvstore.tier.file.twin_files import Value


def test_the_newest_note_is_read(tmp_path: Path) -> None:
    disk = RealDisk()
    assert read_note(disk, tmp_path) == Value(0, b"")
    for number in range(1, 6):
        write_note(disk, tmp_path, bytes([number]) * number)
        assert read_note(disk, tmp_path) == Value(number, bytes([number]) * number)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_note_leaves_the_one_before_it(tmp_path: Path, damage: str) -> None:
    disk = RealDisk()
    write_note(disk, tmp_path, b"first")
    (first,) = tmp_path.iterdir()
    write_note(disk, tmp_path, b"second")
    (second,) = set(tmp_path.iterdir()) - {first}
    data = second.read_bytes()
    end = data.index(b"second") + len(b"second")  # zeros fill the page
    if damage == "gone":
        second.unlink()
    elif damage == "flip":
        second.write_bytes(data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:])
    else:
        second.write_bytes(data[: end - 1] if damage == "cut" else b"")
    assert read_note(disk, tmp_path).data == b"first"
    write_note(disk, tmp_path, b"third")
    assert read_note(disk, tmp_path).data == b"third"


def test_what_is_too_long_is_not_written(tmp_path: Path) -> None:
    write_note(RealDisk(), tmp_path, b"kept")
    write_note(RealDisk(), tmp_path, bytes((16 << 20) + 1))
    assert read_note(RealDisk(), tmp_path).data == b"kept"
