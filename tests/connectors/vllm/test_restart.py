"""What one engine saved, the next one loads, and says the same."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvstore.testing.daemon import Daemon

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_a_new_engine_continues_where_the_last_one_stopped(start_engine, daemon, prompt):
    """A hybrid model in float32, where cold, loaded and locally cached KV give the same tokens."""
    first_turn, whole_blocks = prompt(705), prompt(704, seed=2)
    plain = start_engine("gemma3", None, dtype="float32")
    answer = plain.generate(first_turn)
    second_turn = [*first_turn, *answer, *prompt(70, seed=1)]
    second_answer = plain.generate(second_turn)
    other_answer = plain.generate(whole_blocks)
    plain.close()

    saving = start_engine("gemma3", daemon, dtype="float32")
    began = time.perf_counter()
    assert saving.generate(first_turn) == answer
    assert saving.generate(whole_blocks) == other_answer
    took_s = time.perf_counter() - began
    counters = saving("counters")
    assert counters["computed_tokens"] == 705 + 704
    # Most of the time is decoding; what is timed must be the model all the same.
    assert 0.01 * took_s < counters["computed_seconds"] < took_s
    saving("settle")
    saving.close()
    assert daemon.stop() == 0
    daemon.start()

    loading = start_engine("gemma3", daemon, dtype="float32")
    assert loading.generate(second_turn) == second_answer
    counters = loading("counters")
    # The blocks of the first turn and its answer: (705 + 15) // 32.
    assert counters["offered_tokens"] == 22 * 32
    assert counters["loads"] == 1
    assert counters["loads_failed"] == 0
    # All of the full-attention layer, but of the five others only their window of 128 tokens;
    # without the hybrid KV cache manager all layers are one group.
    assert counters["loaded_blocks"] == (22 + 5 * 4 if loading("groups") == 6 else 22)
    # A prompt of whole blocks: one block less, to leave a token to compute.
    assert loading.generate(whole_blocks) == other_answer
    assert loading.counter("offered_tokens") == (22 + 21) * 32
    assert loading("metrics")["loads"] == 2


SEALED = ("tenants.acme.arena=sealed", "tenants.acme.dram.guaranteed=256MiB")


@pytest.fixture
def sealed() -> Iterator[Daemon]:
    """A daemon with one tenant, whose arena nobody but the daemon writes to."""
    with Daemon("dram.capacity=256MiB", "dram.extent=64MiB", *SEALED) as daemon:
        daemon.start()
        daemon.socket = daemon.socket.parent / "acme/kvstore.sock"
        yield daemon


@pytest.mark.parametrize(("model", "arena"), [("llama", "daemon"), ("gemma3", "sealed")])
def test_loaded_blocks_equal_the_engines_own_hit_bit_for_bit(
    model, arena, start_engine, request, prompt
):
    """In bfloat16 a cold run may round differently, but a load may not differ from a local hit."""
    daemon = request.getfixturevalue(arena)
    engine = start_engine(model, daemon, dtype="bfloat16")
    prompts = [prompt(tokens, seed) for seed, tokens in enumerate((33, 320, 641, 1500))]
    for each in prompts:
        engine.generate(each)
    assert engine.counter("loads") == 0
    local = [engine.generate(each) for each in prompts]
    assert engine.counter("loads") == 0, "the engine's own hits are not loaded"

    assert engine("reset_prefix_cache")
    assert [engine.generate(each) for each in prompts] == local
    assert engine.counter("loads") == len(prompts)
    saved = engine.counter("saved_blocks")

    # All at once: lookups, loads and saves of several requests overlap.
    assert engine("reset_prefix_cache")
    assert engine.generate(*prompts) == local
    assert engine.counter("loads") == 2 * len(prompts)
    assert engine.counter("loads_failed") == 0
    engine("settle")
    assert engine.counter("saved_blocks") == saved, "what was loaded is not saved again"

    # After a change of weights nothing old may be hit.
    assert engine("reset_all")
    engine.generate(prompts[-1])
    assert engine.counter("loads") == 2 * len(prompts)
    assert engine("reset_prefix_cache")
    assert engine.generate(prompts[-1]) == local[-1]
    assert engine.counter("loads") == 2 * len(prompts) + 1
