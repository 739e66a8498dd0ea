"""Who may use a file with a secret: its user and root; a group, as Kubernetes mounts a Secret."""

from __future__ import annotations

import os

import pytest

from kvstore.system import private_files
from kvstore.system.private_files import is_open_to_others

USER, GROUP, FOREIGN = 10001, 10002, 10003


@pytest.mark.parametrize(
    ("mode", "owner", "group", "is_open"),
    [
        (0o600, USER, GROUP, False),
        (0o400, 0, 0, False),
        (0o440, 0, GROUP, False),  # a Secret with fsGroup
        (0o440, 0, FOREIGN, True),
        (0o460, 0, GROUP, True),
        (0o444, 0, GROUP, True),
        (0o440, USER, GROUP, True),  # its own user could have said 0400
        (0o440, FOREIGN, GROUP, True),
    ],
)
def test_modes(
    monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, group: int, is_open: bool
) -> None:
    monkeypatch.setattr(private_files.os, "geteuid", lambda: USER)
    monkeypatch.setattr(private_files.os, "getegid", lambda: USER)
    monkeypatch.setattr(private_files.os, "getgroups", lambda: [GROUP])
    status = os.stat_result((0o100000 | mode, 1, 1, 1, owner, group, 10, 0, 0, 0))
    assert is_open_to_others(status) is is_open


def test_a_group_of_root_is_others_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files.os, "geteuid", lambda: 0)
    status = os.stat_result((0o100440, 1, 1, 1, 0, os.getegid(), 10, 0, 0, 0))
    assert is_open_to_others(status)
