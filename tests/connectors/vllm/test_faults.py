"""Whatever happens to the daemon, the engine says the right tokens and runs on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client
from kvstore.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.fault, pytest.mark.timeout(300)]

BACK_WITHIN_S = 10.0
HELD_S = 0.3


def flip_bits(path: Path) -> None:
    """Flip one bit in every page of a file that holds anything."""
    _flip(np.memmap(path, dtype=np.uint8, mode="r+"))


def flip_bits_of_arena(target: str) -> None:
    """The same for the daemon's arena, as a process of its user can: through the mapping."""
    with Client(target) as client:
        client.submit(lambda remote: remote.connect()).result()
        for extent in client.extents().values():
            _flip(np.frombuffer(extent, np.uint8))


def _flip(content: np.ndarray) -> None:
    pages = content[: len(content) // 4096 * 4096].reshape(-1, 4096)
    pages[pages.any(axis=1), 100] ^= 0x10


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def loads_again(engine, turn: list[int], answer: list[int]) -> None:
    """Check that the cache works, or does so soon: what is generated is loaded the next time."""
    loads = engine.counter("loads")

    def loaded() -> bool:
        assert engine.generate(turn) == answer
        return engine.counter("loads") > loads or not engine("reset_prefix_cache")

    until(loaded, BACK_WITHIN_S)


def test_the_engine_survives_all_that_happens_to_the_daemon(start_engine, daemon, prompt, tmp_path):
    """One engine, one life; the steps share its start, which is what takes time."""
    turn = prompt(705)
    engine = start_engine("gemma3", daemon, dtype="float32", extra={"load_deadline_s": 1.0})
    answer = engine.generate(turn)
    engine("reset_prefix_cache")
    loads_again(engine, turn, answer)
    memory_that_lies(engine, daemon, turn, answer)
    killed_during_a_load(engine, daemon, turn, answer, tmp_path / "gate")
    killed_before_a_load(engine, daemon, turn, answer)
    hung_while_bytes_are_awaited(engine, daemon, turn, answer)
    stopped_for_a_while(engine, daemon, turn, answer, other=prompt(320))
    loaded_while_it_comes(engine, daemon, turn, answer, tmp_path / "reads")
    restarted_on_files_that(flip_bits, engine, daemon, turn, answer)
    restarted_on_files_that(cut_off, engine, daemon, turn, answer)


def memory_that_lies(engine, daemon, turn, answer):
    """The load fails; the blocks are dropped, computed, and stored again."""
    flip_bits_of_arena(daemon.target)
    engine("reset_prefix_cache")
    assert engine.generate(turn) == answer
    counters = engine("counters")
    assert counters["loads_failed"] == 1
    assert counters["corrupt_blocks"] > 0
    engine("reset_prefix_cache")
    loads_again(engine, turn, answer)
    assert engine.counter("loads_failed") == 1


def killed_during_a_load(engine, daemon, turn, answer, gate):
    """What is mapped stays: the load ends within its lease, so it counts."""
    engine("reset_prefix_cache")
    loads, failed = engine.counter("loads"), engine.counter("loads_failed")
    engine("hold_loads", gate=str(gate))
    engine.send("generate", prompts=[turn])
    until(Path(f"{gate}.0").exists)
    daemon.kill()
    gate.touch()
    assert engine.receive() == [answer]
    assert engine.counter("loads") == loads + 1
    assert engine.counter("loads_failed") == failed


def killed_before_a_load(engine, daemon, turn, answer):
    """The daemon is still dead here: lookups and saves are refused at once."""
    engine("reset_prefix_cache")
    assert engine.generate(turn) == answer
    daemon.start()
    engine("reset_prefix_cache")
    loads_again(engine, turn, answer)


def hung_while_bytes_are_awaited(engine, daemon, turn, answer):
    """The wait has a deadline; what was a hang then turns out to be a death."""
    engine("reset_prefix_cache")
    os.kill(daemon.pid, signal.SIGSTOP)
    late = engine.counter("lookups_late")
    assert engine.generate(turn) == answer
    assert engine.counter("lookups_late") == late + 1
    daemon.kill()
    assert engine.generate(turn) == answer
    daemon.start()
    engine("reset_prefix_cache")
    loads_again(engine, turn, answer)


def stopped_for_a_while(engine, daemon, turn, answer, other):
    """One request waits until its deadline, the next one not at all; then all is as before."""
    engine("reset_prefix_cache")
    late = engine.counter("lookups_late")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        assert engine.generate(turn) == answer
        assert engine.counter("lookups_late") == late + 1
        engine.generate(other)
        assert engine.counter("lookups_late") == late + 1
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    engine("reset_prefix_cache")
    loads_again(engine, turn, answer)


def loaded_while_it_comes(engine, daemon, turn, answer, gate):
    """The load begins before the disk has read all of it. Then the rest does not come, or wrong, or
    the daemon dies, or stands still."""
    gated = [sys.executable, str(Path(__file__).with_name("gated_daemon.py")), str(gate)]
    daemon.command = lambda *arguments: [*gated, *arguments]
    held = gate.with_suffix(".held")

    def from_files() -> None:
        gate.unlink(missing_ok=True)
        if daemon.alive:
            daemon.stop()
        daemon.start()
        until(lambda: engine("connected"), BACK_WITHIN_S)
        engine("reset_prefix_cache")

    def asked_until_held(way: str = "") -> None:
        from_files()
        gate.write_text(way)
        engine.send("generate", prompts=[turn])
        until(held.exists)
        held.unlink()
        time.sleep(HELD_S)  # the engine has its answer, and begins to load

    def not_loaded() -> float:
        names = ("loads_failed", "lookups_failed", "lookups_late")
        return sum(engine.counter(name) for name in names)

    early = engine.counter("loads_early")
    from_files()
    assert engine.generate(turn) == answer
    assert engine.counter("loads_early") == early + 1
    failed, missed = engine.counter("loads_failed"), not_loaded()
    asked_until_held()
    daemon.kill()
    assert engine.receive() == [answer]
    assert not_loaded() > missed
    asked_until_held()
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        assert engine.receive() == [answer]
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    asked_until_held("damage")
    assert engine.receive() == [answer]
    assert engine.counter("loads_failed") > failed
    del daemon.command
    from_files()
    loads_again(engine, turn, answer)


def restarted_on_files_that(lie, engine, daemon, turn, answer):
    """A daemon that finds its files rotten offers less, never something wrong."""
    failed = engine.counter("loads_failed")
    assert daemon.stop() == 0
    segments = list((daemon.directory / "file").rglob("*.segment"))
    assert segments
    for file in segments:
        lie(file)
    daemon.start()
    engine("reset_prefix_cache")
    assert engine.generate(turn) == answer
    engine("reset_prefix_cache")
    loads_again(engine, turn, answer)
    assert engine.counter("loads_failed") == failed


def test_an_engine_starts_without_a_daemon_and_finds_it_later(start_engine, daemon, prompt):
    turn = prompt(300)
    daemon.stop()
    engine = start_engine("llama", daemon, dtype="float32")
    answer = engine.generate(turn)
    daemon.start()
    engine("reset_prefix_cache")
    loads_again(engine, turn, answer)
