"""Every case of `make hostile`, with fewer rounds."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.hostile.probing import auc
from tests.hostile.run import CASES, main, run_case
from tests.hostile.scene import ANSWER_S, Scene, may_be_several_users


@pytest.mark.skipif(not may_be_several_users(), reason="only root can be several users")
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_written_or_broken(name: str) -> None:
    result = run_case(name, quick=True)
    assert result["ok"], result


def test_the_command_lists_its_cases() -> None:
    listed = CliRunner().invoke(main, ["--list"])
    assert [line.partition(":")[0] for line in listed.output.splitlines()] == list(CASES)


@pytest.mark.parametrize(
    ("ranges", "enough"),
    [("0 0 4294967295\n", True), ("0 1000 1\n", False), ("0 1000 1\n1 100000 65536\n", True)],
)
def test_a_user_namespace_of_one_user_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: str, enough: bool
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    path = tmp_path / "uid_map"
    path.write_text(ranges)
    assert may_be_several_users(path) is enough


def test_without_several_users_it_is_skipped_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    file = tmp_path / "build" / "hostile.json"
    done = CliRunner().invoke(main, ["--json", str(file)])
    assert done.exit_code == 0
    assert json.loads(file.read_text())["skipped"].startswith("skipped: needs root or a user names")


@pytest.mark.skipif(not may_be_several_users(), reason="only root can be several users")
def test_a_daemon_that_stands_still_for_longer_than_a_call_may_take_is_counted() -> None:
    scene = Scene(quick=True)
    with scene.daemon() as daemon:
        os.kill(daemon.pid, signal.SIGSTOP)
        threading.Timer(1.5 * ANSWER_S, os.kill, (daemon.pid, signal.SIGCONT)).start()
        time.sleep(2 * ANSWER_S)  # the calls meanwhile are what is counted
    assert scene.counts["hung"] >= 1
    assert not scene.ok


def test_an_area_under_the_curve() -> None:
    assert auc([3.0, 4.0], [1.0, 2.0]) == 1.0
    assert auc([1.0, 2.0], [3.0, 4.0]) == 0.0
    assert auc([1.0, 1.0], [1.0, 1.0]) == 0.5
    assert auc([1.0, 3.0], [2.0, 2.0]) == 0.5
    assert auc([2.0, 3.0], [1.0, 2.5]) == 0.75
