"""What a daemon keeps beside its files: its node id, the last known members, and how far it has
applied deletes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvstore.membership import LastMembers, encode_member, own_node_id, state_directory
from kvstore.membership.state_files import (
    DELETES_FILE,
    DELETES_NBYTES_MAX,
    MEMBERS_FILE,
    MEMBERS_NBYTES_MAX,
    NODE_ID_FILE,
    OTHERS_MAX,
    AppliedDeletes,
    AppliedNote,
)
from kvstore.model.member import check_node_id
from kvstore.settings import load_settings
from kvstore.testing.membership import new_member


def test_the_directory_is_the_one_of_the_setting_or_of_the_files() -> None:
    files = 'file.path=["/nvme0/kv", "/nvme1/kv"]'
    assert state_directory(load_settings(None, ["file.path="])) is None
    assert state_directory(load_settings(None, [files])) == Path("/nvme0/kv")
    assert state_directory(load_settings(None, [files, "cluster.state=/s"])) == Path("/s")


def test_a_node_id_outlives_restarts(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    first = own_node_id(directory)
    assert check_node_id(first) == own_node_id(directory) == first
    assert own_node_id(tmp_path / "another") != first
    assert (directory / NODE_ID_FILE).stat().st_mode & 0o777 == 0o600


def test_without_a_directory_each_start_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    assert own_node_id(None) != own_node_id(None)
    assert "cluster.state" in caplog.text


@pytest.mark.parametrize("rubbish", [b"", b"\xff\xfe", b"0" * 31, b"0" * 1000, b"../x"])
def test_rubbish_is_no_node_id(
    rubbish: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NODE_ID_FILE).write_bytes(rubbish)
    fresh = own_node_id(tmp_path)
    assert "ignored" in caplog.text
    assert own_node_id(tmp_path) == fresh


def test_a_directory_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert check_node_id(own_node_id(tmp_path / "file" / "below"))
    LastMembers(tmp_path / "file" / "below", "default").write([])
    assert caplog.text.count("not_written") == 2


def test_members_are_read_as_they_were_written(tmp_path: Path) -> None:
    members = [new_member(f"10.0.0.{host}:7702") for host in range(1, 100)]
    last = LastMembers(tmp_path, "default")
    assert last.read() == []
    last.write(members)
    assert last.read() == members
    last.write(members[:1])
    assert last.read() == members[:1]
    assert os.listdir(tmp_path) == [MEMBERS_FILE]


def test_the_members_of_another_fleet_are_not_met(tmp_path: Path) -> None:
    LastMembers(tmp_path, "blue").write([new_member("10.0.0.1:7702")])
    assert LastMembers(tmp_path, "green").read() == []


@pytest.mark.parametrize(
    "rubbish",
    [b"", b"{", b"[]", b"\xff", b"[" * 100000, b" " * (MEMBERS_NBYTES_MAX + 1), b'{"members":[]}'],
)
def test_rubbish_is_no_members(
    rubbish: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / MEMBERS_FILE).write_bytes(rubbish)
    assert LastMembers(tmp_path, "default").read() == []
    assert "ignored" in caplog.text


def test_one_bad_entry_costs_no_other(tmp_path: Path) -> None:
    members = [new_member(f"10.0.0.{host}:7702") for host in (1, 2)]
    good = [json.loads(encode_member(each)) for each in members]
    file = {"fleet": "default", "members": [good[0], {"node": 1}, 7, None, good[1]], "more": 1}
    (tmp_path / MEMBERS_FILE).write_text(json.dumps(file))
    assert LastMembers(tmp_path, "default").read() == members


def test_how_far_deletes_are_applied_is_read_as_it_was_written(tmp_path: Path) -> None:
    note = AppliedDeletes(tmp_path, "blue")
    assert note.read() is None
    note.write(7, ["a", "b"])
    assert note.read() == AppliedNote("blue", 7, ["a", "b"])
    assert AppliedDeletes(tmp_path, "green").read() is None


def test_the_notes_of_the_fleets_before_stay(tmp_path: Path) -> None:
    """Who comes back has in its files what was deleted meanwhile."""
    fleets = [f"fleet-{number}" for number in range(OTHERS_MAX + 1)]
    for number, fleet in enumerate(fleets):
        for _ in range(3):  # each start of a daemon, and of each some
            note = AppliedDeletes(tmp_path, fleet)
            note.write(number, ["first"])
            note.write(number, ["token" * 20] * 17)
    for number, fleet in enumerate(fleets):
        found = AppliedDeletes(tmp_path, fleet).read()
        assert found == AppliedNote(fleet, number, ["token" * 20] * 17)
    AppliedDeletes(tmp_path, "blue").write(1, [])
    assert AppliedDeletes(tmp_path, fleets[0]).read() is None
    assert AppliedDeletes(tmp_path, fleets[1]).read() is not None


@pytest.mark.parametrize(
    "rubbish", [None, b"", b"{", b"[]", b"\xff", b"{}", b" " * (DELETES_NBYTES_MAX + 1)]
)
def test_rubbish_is_the_note_of_a_daemon_that_was_away_for_too_long(
    rubbish: bytes | None, tmp_path: Path
) -> None:
    """No note at all is that of one that starts for the first time, and drops nothing."""
    path = tmp_path / DELETES_FILE
    if rubbish is None:
        path.mkdir()  # as good as a file on a disk that gives errors
    else:
        path.write_bytes(rubbish)
    assert AppliedDeletes(tmp_path, "blue").read() == AppliedNote("blue", 0, [])
