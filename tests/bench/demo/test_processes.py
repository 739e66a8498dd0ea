"""Nothing a demo starts outlives it, and what does is reported."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kvstore.model.errors import Unavailable
from kvstore_bench.demo import processes
from kvstore_bench.demo.processes import Child, session_members
from kvstore_bench.demo.stage import Stage

DEADLINE_S = 20.0
# A process that starts another one, says so, and sleeps; both ignore what a polite stop sends.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""


def start(folder: Path, code: str = STUBBORN) -> Child:
    child = Child("child", [sys.executable, "-c", code], environ=os.environ, log=folder / "log")
    deadline = time.monotonic() + DEADLINE_S
    while "ready" not in child.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child


def test_kill_reaches_the_children_of_children(tmp_path: Path) -> None:
    child = start(tmp_path)
    assert len(session_members(child.session)) == 2
    child.kill()
    assert session_members(child.session) == []


def test_stop_kills_what_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.1)
    child = start(tmp_path)
    child.stop()
    assert session_members(child.session) == []


def test_stop_and_kill_may_be_repeated(tmp_path: Path) -> None:
    child = start(tmp_path, "print('ready', flush=True)")
    for _ in range(2):
        child.stop()
        child.kill()


def test_a_child_that_ended_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    child = start(tmp_path, "print('ready', flush=True); print('no such option'); exit(3)")
    child.stop()
    with pytest.raises(Unavailable, match=r"status (3|-15)"):
        child.check()


def test_processes_of_a_name_yield_to_others(tmp_path: Path) -> None:
    rename = "open('/proc/self/comm', 'w').write('poller')"
    child = start(tmp_path, f"{rename}\n{STUBBORN}")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    child.yield_to_others("poller")
    members = session_members(child.session)
    nice = sorted(os.getpriority(os.PRIO_PROCESS, pid) for pid in members)
    child.kill()
    assert nice == [own, processes.LOWEST_PRIORITY]


def test_shared_memory_survives_no_kill(tmp_path: Path) -> None:
    code = """
import time
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=4096)
print(block.name, "ready", flush=True)
time.sleep(600)
"""
    child = start(tmp_path, code)
    name = child.log.read_text().split()[0]
    assert name in processes.shared_memory_in_use()
    child.kill()
    assert name not in processes.shared_memory()


def test_leaving_a_stage_ends_its_children_whatever_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.1)
    stage = Stage(tmp_path / "results")
    child = start(tmp_path)

    def interrupted() -> None:
        with stage:
            stage.adopt(child)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert session_members(child.session) == []
    assert stage.leaks == []
    assert not stage.scratch.exists()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with Stage(tmp_path) as first:
        kept = first.logs / "log"
        kept.touch()
        with pytest.raises(Unavailable, match="another demo"):
            Stage(tmp_path).__enter__()
        assert kept.exists()
    with Stage(tmp_path):
        pass


def test_what_is_left_behind_is_named(tmp_path: Path) -> None:
    left = processes.SHARED_MEMORY / f"kvstore-test-{os.getpid()}"
    try:
        with Stage(tmp_path) as stage:
            left.write_bytes(b"")
        assert f"shared memory {left}" in stage.leaks
    finally:
        left.unlink()


def test_a_process_that_left_its_parent_is_still_found(tmp_path: Path) -> None:
    child = start(tmp_path)
    os.kill(child.session, signal.SIGKILL)
    child.kill()
    assert session_members(child.session) == []
