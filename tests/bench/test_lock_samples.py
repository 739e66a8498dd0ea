"""How long the interpreter's lock is held, found by samples."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore_bench.lock_samples import Counts, LockSamples, LockWatch, own_watch, sampled

BIG = bytearray(32 << 20)


def holds() -> None:
    bytes(BIG)  # a copy that keeps the lock


def sleeps() -> None:
    time.sleep(0.02)


def test_samples_find_a_lock_that_is_held_and_not_a_process_that_sleeps(tmp_path: Path) -> None:
    shares = []
    with LockSamples(tmp_path / "ours") as ours, LockSamples(tmp_path / "ours") as theirs:
        with sampled(theirs):
            for side in (holds, sleeps):
                before, end = ours.counts, time.perf_counter() + 1.0
                while time.perf_counter() < end:
                    side()
                shares.append(ours.counts.since(before).share)
        assert theirs.counts.taken > 100
    assert shares[0] > 0.5
    assert shares[1] < 0.2


def test_a_process_watches_itself_in_turns() -> None:
    with own_watch() as watch:
        end = time.perf_counter() + 2.0
        while time.perf_counter() < end:
            for side in (holds, sleeps):
                with watch.during(side.__name__, 1_000_000):
                    side()
    shares, per_gb = watch.held_shares(), watch.held_s_per_gb()
    assert shares["holds"] > 0.5
    assert shares["sleeps"] < 0.2
    assert per_gb["holds"] > per_gb["sleeps"]


def test_seconds_per_gb_are_those_of_all_moves_together(tmp_path: Path) -> None:
    with LockSamples(tmp_path / "d") as daemon, LockSamples(tmp_path / "c") as client:
        watch = LockWatch({"": daemon, "client_": client})
        took_s = []
        for held in (1, 0):
            began = time.perf_counter()
            with watch.during("read", 500_000_000):
                time.sleep(0.1)
                daemon.note(held=True, times=held)
                daemon.note(held=False, times=2 - held)
            took_s.append(time.perf_counter() - began)
        per_gb = watch.held_s_per_gb()
    assert per_gb["read"] == pytest.approx(took_s[0] / 2, rel=0.2)
    assert per_gb["client_read"] == 0
    assert Counts(0, 0).share == 0
