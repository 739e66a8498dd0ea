"""A namespace's file is believed only if it is what its name says, and read only if it is small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.model.block import Group, Namespace
from kvstore.tier.file import RealDisk
from kvstore.tier.file.spec_files import (
    FILE_NBYTES_MAX,
    file_nbytes,
    read_spec_files,
    remove_spec_files,
    spec_files_in,
    write_spec_file,
)

DISK = RealDisk()
SPEC = Namespace(
    16, (Group("full", 4096), Group("window", 4096, 512)), (("model", "é"),), name="vendor/modèle"
)
OTHER = replace(SPEC, block_tokens=32, name="")


def file_of(path: Path, namespace: Namespace) -> Path:
    return path / f"{namespace.id.hex()}.namespace"


def test_what_was_written_is_read_with_its_name(tmp_path: Path) -> None:
    for each in (SPEC, OTHER, SPEC):
        write_spec_file(DISK, tmp_path, each)
    assert set(spec_files_in(DISK, tmp_path)) == {SPEC.id, OTHER.id}
    found = read_spec_files(DISK, tmp_path, [SPEC.id, OTHER.id, replace(SPEC, fidelity="fp8").id])
    assert found == [SPEC, OTHER]
    assert [each.name for each in found] == ["vendor/modèle", ""]
    assert file_nbytes(SPEC) == 4096
    remove_spec_files(DISK, tmp_path, [SPEC.id, SPEC.id])
    assert spec_files_in(DISK, tmp_path) == [OTHER.id]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        SPEC.to_json().encode()[:-1],
        SPEC.to_json().encode() + b" \n",
        OTHER.to_json().encode() + b"\nname",
        SPEC.to_json().encode() + b"\n" + b"x" * FILE_NBYTES_MAX,
        b"\xff" * 100,
        bytes(4096),
    ],
)
def test_anything_else_was_never_there(tmp_path: Path, content: bytes) -> None:
    file_of(tmp_path, SPEC).write_bytes(content)
    assert read_spec_files(DISK, tmp_path, [SPEC.id]) == []
    write_spec_file(DISK, tmp_path, SPEC)
    assert read_spec_files(DISK, tmp_path, [SPEC.id]) == [SPEC]


def test_a_name_with_other_bytes_in_it_is_shown_without_them(tmp_path: Path) -> None:
    file_of(tmp_path, SPEC).write_bytes(SPEC.to_json().encode() + b"\nold\x1b[31m\xff\nname")
    (found,) = read_spec_files(DISK, tmp_path, [SPEC.id])
    assert found.name == "old[31m\ufffdname"


def test_names_that_are_no_ids_are_left_alone(tmp_path: Path) -> None:
    for name in ("x.namespace", "A" * 64 + ".namespace", "0" * 64, "0" * 63 + "g.namespace"):
        (tmp_path / name).touch()
    assert spec_files_in(DISK, tmp_path) == []
