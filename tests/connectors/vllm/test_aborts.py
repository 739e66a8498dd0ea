"""A client may hang up at any moment: nothing of its request stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.testing.wait import until
from tests.connectors.vllm.test_faults import flip_bits_of_arena

pytestmark = [pytest.mark.vllm, pytest.mark.fault, pytest.mark.timeout(300)]

STEPS_MAX = 2000


class Engine:
    """An engine that is stepped by hand, and its daemon."""

    def __init__(self, process, daemon) -> None:
        self.process = process
        self.daemon = daemon

    def leases(self) -> int:
        with Client(self.daemon.target) as client:
            return client.admin.stats()["leases"]

    def step_until(self, true) -> None:
        for _ in range(STEPS_MAX):
            if true():
                return
            self.process("step")
        raise TimeoutError("the engine did not get there")

    def nothing_is_left(self) -> None:
        """Check engine, connector and daemon; forget the engine's own cached blocks."""
        assert self.process("reset_prefix_cache"), "a device block leaked"
        assert self.process("held") == {}
        until(lambda: not self.leases())
        with Client(self.daemon.target) as client:
            dram = client.admin.stats()["dram"]
        assert dram["leased_bytes"] == dram["limbo_bytes"] == 0


def test_an_abort_at_any_stage_leaves_nothing_behind(start_engine, daemon, prompt, tmp_path):
    """One engine, one life; the steps share its start, which is what takes time."""
    turn = prompt(705)
    process = start_engine("llama", daemon, dtype="float32", max_model_len=2048)
    engine = Engine(process, daemon)
    answer = process.generate(turn)
    engine.nothing_is_left()
    while_it_waits(engine, turn)
    while_it_is_looked_up(engine, turn)
    while_it_is_loaded(engine, turn, tmp_path / "gate")
    while_it_is_loaded_and_the_load_fails(engine, turn, tmp_path / "other-gate")
    while_it_runs_and_is_saved(engine, prompt(400, seed=1), tmp_path / "save-gate")
    when_it_has_finished_and_is_not_saved_yet(engine, prompt(400, seed=2))
    assert process.generate(turn) == answer
    engine.nothing_is_left()


def while_it_waits(engine, turn):
    """Before the engine's first step; its lease is there already."""
    engine.process("submit", name="waits", prompt=turn)
    until(lambda: engine.leases() == 1)
    engine.process("abort", name="waits")
    until(lambda: engine.leases() == 0)
    engine.nothing_is_left()


def while_it_is_looked_up(engine, turn):
    """The daemon hangs, and grants the lease after nobody wants it any more."""
    os.kill(engine.daemon.pid, signal.SIGSTOP)
    engine.process("submit", name="looked-up", prompt=turn)
    engine.process("step", times=3)
    assert engine.process("held")["tracked"] == 1
    engine.process("abort", name="looked-up")
    os.kill(engine.daemon.pid, signal.SIGCONT)
    engine.nothing_is_left()


def while_it_is_loaded(engine, turn, gate: Path):
    """The device blocks stay taken until the copy into them has ended."""
    begin_load(engine, "loaded", turn, gate)
    engine.process("abort", name="loaded")
    engine.process("step", times=3)
    assert engine.process("held")["device_blocks"] >= 22, "a copy is still writing to them"
    assert engine.leases() == 1
    gate.touch()
    engine.nothing_is_left()


def while_it_is_loaded_and_the_load_fails(engine, turn, gate: Path):
    failed = engine.process.counter("loads_failed")
    begin_load(engine, "fails", turn, gate)
    engine.process("abort", name="fails")
    flip_bits_of_arena(engine.daemon.target)
    gate.touch()
    assert engine.process("reset_prefix_cache"), "a device block leaked"
    assert engine.process("held") == {}
    assert engine.process.counter("loads_failed") == failed + 1
    until(lambda: stored_again(engine, turn))
    engine.nothing_is_left()


def begin_load(engine, name: str, turn: list[int], gate: Path) -> None:
    engine.process("hold_loads", gate=str(gate))
    engine.process("submit", name=name, prompt=turn)
    engine.step_until(Path(f"{gate}.0").exists)


def stored_again(engine, turn: list[int]) -> bool:
    """Whether what was dropped as corrupt is there again."""
    loads = engine.process.counter("loads")
    engine.process.generate(turn)
    engine.process("reset_prefix_cache")
    engine.process.generate(turn)
    engine.process("reset_prefix_cache")
    return engine.process.counter("loads") > loads


def while_it_runs_and_is_saved(engine, turn, gate: Path):
    """A copy out of its blocks is under way when they are freed; it ends before they are reused."""
    engine.process("hold_saves", gate=str(gate))
    engine.process("submit", name="runs", prompt=turn, max_tokens=200)
    engine.step_until(Path(f"{gate}.0").exists)
    engine.process("abort", name="runs")
    assert engine.process("held")["saves"] > 0
    gate.touch()
    engine.nothing_is_left()
    loads = engine.process.counter("loads")
    engine.process.generate(turn)
    assert engine.process.counter("loads") == loads + 1, "what it computed was saved"
    engine.nothing_is_left()


def when_it_has_finished_and_is_not_saved_yet(engine, turn):
    engine.process("submit", name="finished", prompt=turn, max_tokens=20)
    done: dict[str, list[int]] = {}
    while "finished" not in done:
        done = engine.process("step")
    assert engine.process("held")["pending_saves"] == 1
    engine.process("abort", name="finished")
    engine.nothing_is_left()
    loads = engine.process.counter("loads")
    assert engine.process.generate(turn, max_tokens=20) == done["finished"]
    assert engine.process.counter("loads") == loads + 1
    engine.nothing_is_left()
