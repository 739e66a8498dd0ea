"""Lossy blocks in a real engine: it restarts and hits, beside one that is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.model.outcome import Reason
from kvstore_kernels import native
from tests.cli.run import kvstore

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(native.reason()), reason=native.reason()),
]

AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
BLOCKS = 22  # of a prompt of 705 tokens
LOSSY = {"fidelity": "ep"}
INSISTS = {"kvstore": {"fidelity": "fine"}}


def test_a_lossy_engine_hits_after_a_restart_and_an_exact_one_does_not(
    start_engine, daemon, prompt
):
    turn = prompt(705)
    saving = start_engine("llama", daemon, extra=LOSSY, dtype="bfloat16")
    saving.generate(turn)
    saving("settle")
    metrics = saving("counters")
    # The first block is exact: one part. All others have two.
    assert metrics["saved_blocks"] == 2 * BLOCKS - 1
    assert metrics["saved_raw_bytes"] > 1.5 * metrics["saved_bytes"]
    base_bytes = metrics["saved_bytes"] - metrics["saved_fine_bytes"]
    assert metrics["saved_raw_bytes"] > 2.4 * base_bytes
    assert saving("reset_prefix_cache")
    saving.generate(turn)
    assert saving.counter("loaded_lossy_blocks") == BLOCKS - 1
    assert saving.counter("loaded_base_blocks") == 0, "DRAM keeps fine parts"
    saving("settle")
    assert saving.counter("saved_blocks") == 2 * BLOCKS - 1, "what was loaded is not saved again"
    saving.close()
    assert daemon.stop() == 0  # its files keep base parts
    daemon.start()

    loading = start_engine("llama", daemon, extra=LOSSY, dtype="bfloat16")
    loading.generate(turn)
    assert loading.counter("offered_tokens") == BLOCKS * 32
    assert loading.counter("loads_failed") == 0
    assert loading.counter("loaded_blocks") == BLOCKS
    assert loading("metrics")["loaded_base_blocks"] == BLOCKS - 1
    with Client(daemon.target) as client:
        (outcome,) = client.admin.outcomes()
        assert (outcome.hit_blocks, outcome.base_blocks) == (BLOCKS, BLOCKS - 1)
        (kept,) = [each for each in client.admin.stats()["fidelities"] if each["tier"] == "file"]
        assert (kept["fidelity"], kept["blocks"], kept["refined_blocks"]) == ("ep", BLOCKS, 0)
    told = kvstore("explain", outcome.request_id, "--json", "--target", daemon.target)
    assert json.loads(told.output)["base_blocks"] == BLOCKS - 1

    insisting_gets_the_exact_block_and_stores_the_others_finer(loading, daemon, turn)
    loading.close()

    exact = start_engine("llama", daemon, dtype="bfloat16")
    exact.generate(turn)
    assert exact.counter("loads") == exact.counter("offered_tokens") == 0
    with Client(daemon.target) as client:
        ending = client.admin.outcomes(limit=1)[0].ending
    assert ending is not None
    assert ending.reason is Reason.OTHER_NAMESPACE
    assert exact("reset_prefix_cache")
    exact.generate(turn)
    assert exact.counter("loaded_blocks") == BLOCKS
    assert exact.counter("loaded_lossy_blocks") == 0


def insisting_gets_the_exact_block_and_stores_the_others_finer(engine, daemon, turn):
    assert engine("reset_prefix_cache")
    engine.generate(turn, kv_transfer_params=INSISTS)
    assert engine.counter("offered_tokens") == (BLOCKS + 1) * 32
    with Client(daemon.target) as client:
        ending = client.admin.outcomes(limit=1)[0].ending
    assert ending is not None
    assert ending.reason is Reason.COARSE
    assert engine("reset_prefix_cache")
    engine.generate(turn, kv_transfer_params=INSISTS)
    assert engine.counter("offered_tokens") == (2 * BLOCKS + 1) * 32
    assert engine.counter("loads_failed") == 0
    assert engine.counter("loaded_base_blocks") == BLOCKS - 1, "those of the first load"
    # A wish that nobody knows is counted, and is none.
    assert engine("reset_prefix_cache")
    engine.generate(turn, kv_transfer_params={"kvstore": {"fidelity": "best"}})
    assert engine("metrics")["hints_ignored"] == 1
    assert engine.counter("offered_tokens") == (3 * BLOCKS + 1) * 32


def test_where_it_is_not_possible_the_engine_says_why_and_does_not_start(start_engine, daemon):
    """What the pages look like is known late, in the worker."""
    if not AVX512:
        pytest.skip("vLLM's CPU back end has fp8 with AVX-512 alone")
    with pytest.raises(RuntimeError, match='"fidelity": "ep" is not possible here'):
        start_engine("llama", daemon, extra=LOSSY, dtype="bfloat16", kv_cache_dtype="fp8_e5m2")
