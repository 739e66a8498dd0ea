"""What the slowed daemon does to its devices, and what the benchmark makes of its samples."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from kvstore_bench.tiers.slow_daemon import slower, slower_task
from kvstore_bench.tiers.slowed import CASES, Answered, cases, not_loaded


def test_a_slowed_call_takes_so_many_times_as_long_and_answers_the_same() -> None:
    def call(answer: str) -> str:
        time.sleep(0.01)
        return answer

    began = time.monotonic()
    assert slower(call, 5)("yes") == "yes"
    assert time.monotonic() - began >= 0.05


def test_a_slowed_task_fails_as_late_as_it_would_succeed() -> None:
    async def call() -> None:
        await asyncio.sleep(0.01)
        raise OSError("no")

    began = time.monotonic()
    with pytest.raises(OSError, match="no"):
        asyncio.run(slower_task(call, 5)())
    assert time.monotonic() - began >= 0.05


def test_a_tier_that_cannot_be_slowed_is_refused() -> None:
    command = [sys.executable, "-m", "kvstore_bench.tiers.slow_daemon", "tape", "50", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "tape: slow down file or object" in done.stderr


def test_a_case_compares_each_prompt_with_its_own_recomputing() -> None:
    answered = [
        Answered(source, slowed, prompt, ttft_s=2.0 * (prompt + 1), recompute_s=s, loaded=96)
        for source, slowed in CASES
        for prompt, s in enumerate((4.0, 8.0))
    ]
    answered[-1] = Answered(*CASES[-1], 1, ttft_s=12.0, recompute_s=8.0, loaded=0)
    *usual, last = cases(answered)
    assert {(row["ratio"], row["ratio_max"]) for row in usual} == {(0.5, 0.5)}
    assert (last["ratio"], last["ratio_max"], last["loaded_tokens"]) == (1.0, 1.5, 48)


def test_a_case_that_loaded_nothing_passes_only_out_of_the_slow_tier() -> None:
    rows = [
        {"source": source, "slowed": slowed, "loaded_tokens": 0.0 if source == slowed else 96.0}
        for source, slowed in CASES
    ]
    assert not_loaded(rows) == []
    rows[0]["loaded_tokens"] = rows[3]["loaded_tokens"] = 0.0
    assert not_loaded(rows) == [
        "out of dram while file was slow",
        "out of file while object was slow",
    ]
