"""Too little device memory, and more than one process: still the right tokens."""

from __future__ import annotations

import pytest

from kvstore import Client

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_requests_preempted_while_their_blocks_are_saved_say_the_same(start_engine, daemon, prompt):
    """Device blocks are reused all the time: a save of overwritten blocks would be loaded later.

    The copies are so slow that blocks are wanted again before they are saved; the engine goes on.
    """
    prompts = [prompt(tokens, seed) for seed, tokens in enumerate((96, 70, 101, 64))]
    engine = start_engine(
        "gemma3", daemon, dtype="float32", num_gpu_blocks_override=110, max_model_len=512
    )
    alone = [engine.generate(each, max_tokens=300) for each in prompts]
    assert engine.counter("preemptions") == 0
    engine("reset_prefix_cache")
    with Client(daemon.target) as client:
        assert client.clear() > 0
    engine("slow_saves", seconds=0.03)
    assert engine.generate(*prompts, max_tokens=300) == alone
    engine("slow_saves", seconds=0)
    assert engine.counter("preemptions") > 0
    assert engine.counter("saves_dropped_reuse") > 0
    engine("reset_prefix_cache")
    before = engine.counter("loads")
    assert engine.generate(*prompts, max_tokens=300) == alone
    counters = engine("counters")
    assert counters["loads"] > before
    assert counters["loads_failed"] == 0
    assert counters["corrupt_blocks"] == 0


def test_an_engine_of_several_processes_saves_and_loads(start_engine, daemon, prompt):
    """The engine core runs in a process of its own: orders are pickled, counters are metrics."""
    turn = prompt(705)
    engine = start_engine(
        "llama", daemon, dtype="float32", environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    )
    answer = engine.generate(turn)
    for _ in range(20):
        # Saves run behind the engine; the next request carries the last of them.
        assert engine("reset_prefix_cache", settle=False)
        assert engine.generate(turn) == answer
        if engine("metrics").get("loads", 0):
            break
    assert engine("metrics")["loads"] > 0
    assert engine("metrics")["loads_failed"] == 0
