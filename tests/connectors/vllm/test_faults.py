"""Whatever happens to the daemon, the engine says the right tokens and runs on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client
from kvstore.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.fault, pytest.mark.timeout(300)]

BACK_WITHIN_S = 10.0


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
