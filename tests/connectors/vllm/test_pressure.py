"""Too little device memory, and more than one process: still the right tokens."""

from __future__ import annotations

import pytest

from kvstore import Client
from kvstore.testing.wait import until

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
        assert client.admin.clear() > 0
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


def test_requests_with_drafts_preempted_under_asynchronous_scheduling_say_the_same(
    start_engine, daemon, prompt, models
):
    """A step is scheduled before the drafts of the last one are judged: what the scheduler knows
    of a preempted request is ahead of its tokens. vLLM does not draft by n-grams there."""
    prompts = [prompt(tokens, seed) for seed, tokens in enumerate((96, 70, 101, 64, 130, 45))]
    options = {"dtype": "float32", "max_model_len": 512}
    plain = start_engine("llama", None, **options)
    alone = plain.generate(*prompts, max_tokens=200)
    plain.close()
    drafting = {
        "method": "draft_model",
        "model": str(models / "drafter"),
        "num_speculative_tokens": 3,
    }
    engine = start_engine(
        "llama",
        daemon,
        speculative_config=drafting,
        async_scheduling=True,
        num_gpu_blocks_override=24,
        **options,
    )
    engine("slow_saves", seconds=0.15)  # blocks are wanted again before they are saved
    preemptions = 0.0
    for cold in (True, False):
        assert engine.generate(*prompts, max_tokens=200) == alone
        counters = engine("counters")
        assert counters["preemptions"] > preemptions
        assert cold or counters["loads"] > 0
        preemptions = counters["preemptions"]
        engine("settle")
        assert engine("held") == {}
        engine("reset_prefix_cache")
    assert engine.drafts() > engine.drafts(accepted=True) > 0
    assert counters["saves_dropped_reuse"] > 0
    for failed in ("loads_failed", "corrupt_blocks", "saves_dropped_down", "lookups_failed"):
        assert counters[failed] == 0, failed
    until(lambda: not any(held_by_clients(daemon).values()))


def held_by_clients(daemon) -> dict[str, int]:
    with Client(daemon.target) as client:
        stats = client.admin.stats()
    return {
        "leases": stats["leases"],
        **{name: stats["dram"][f"{name}_bytes"] for name in ("leased", "limbo", "pinned")},
    }


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
