"""What `kvstore doctor` says of root keys."""

from __future__ import annotations

from pathlib import Path

from kvstore.cli.check_keys import check_keys
from kvstore.settings import load_settings
from kvstore.testing.root_key import root_key_in_memory
from tests.cli.run import kvstore


def said(*overrides: str, swaps: str = "Filename Type Size\n", tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "swaps"
    file.write_text(swaps)
    settings = load_settings(None, overrides)
    return {each.about: f"{each.level}: {each.found}" for each in check_keys(settings, swaps=file)}


def test_a_root_key_is_judged_by_its_mode_and_place(tmp_path: Path) -> None:
    assert said(tmp_path=tmp_path) == {}
    path = tmp_path / "root.key"
    kvstore("key", "create", str(path))
    data = f"file.path={tmp_path / 'data'}"
    found = said(f"security.root_key_file={path}", data, tmp_path=tmp_path)
    assert "wrong" in found["root key"]
    assert "is on the disk of" in found["root key"]
    with root_key_in_memory() as good:
        found = said(f"security.root_key_file={good}", data, tmp_path=tmp_path)
        assert found["root key"].startswith("ok")
    path.chmod(0o644)
    found = said(f"security.root_key_file={path}", data, tmp_path=tmp_path)
    assert "chmod 0400" in found["root key"]


def test_a_command_has_to_be_there(tmp_path: Path) -> None:
    assert said("security.root_command=/bin/sh", tmp_path=tmp_path)["root key"].startswith("ok")
    found = said("security.root_command=/nowhere/kms", tmp_path=tmp_path)
    assert "cannot be run" in found["root key"]


def test_swap_and_blocks_in_clear_are_told(tmp_path: Path) -> None:
    found = said(
        "security.root_command=/bin/sh",
        "security.accept_plain=true",
        swaps="Filename Type Size\n/dev/sda2 partition 1\n",
        tmp_path=tmp_path,
    )
    assert found["swap"].startswith("wrong: /dev/sda2")
    assert "forge" in found["blocks in clear"]
