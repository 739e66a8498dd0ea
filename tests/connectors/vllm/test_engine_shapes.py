"""Beside another connector, with drafts, scheduled synchronously: still the right tokens."""

from __future__ import annotations

import pytest

from kvstore import Client
from kvstore.testing.wait import until
from tests.connectors.vllm.engines import kvstore_transfer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK = 32


def leases(daemon) -> int:
    with Client(daemon.target) as client:
        return client.admin.stats()["leases"]


def with_native_offloading(daemon) -> dict:
    """Return a MultiConnector of kvstore and vLLM's own offloading to host memory."""
    native = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostSpec",
            "spec_module_path": "kvstore_bench.demo.native_spec",
            "cpu_bytes_to_use": 64 << 20,
        },
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [kvstore_transfer(daemon), native]},
    }


def test_beside_another_connector_each_serves_what_the_other_lacks(start_engine, daemon, prompt):
    turn = prompt(705)
    engine = start_engine("llama", daemon, transfer=with_native_offloading(daemon), dtype="float32")
    answer = engine.generate(turn)
    assert engine("reset_prefix_cache")
    assert engine.generate(turn) == answer
    assert engine.counter("loads") == 1, "the first of the connectors that has it loads"

    with Client(daemon.target) as client:
        assert client.admin.clear() > 0
    assert engine("reset_prefix_cache")
    assert engine.generate(turn) == answer
    assert engine.counter("loads") == 1
    assert engine.tokens_from_outside() > 0, "the other one loaded"
    engine("settle")
    assert engine("held") == {}

    daemon.kill()
    assert engine("reset_prefix_cache")
    assert engine.generate(turn) == answer
    daemon.start()

    # A reset reaches every connector: nothing stored before may be hit.
    before = engine.tokens_from_outside()
    assert engine("reset_all")
    assert engine.generate(turn) == answer
    assert engine.tokens_from_outside() == before
    until(lambda: leases(daemon) == 0)


def test_drafts_are_not_what_is_stored(start_engine, daemon, prompt):
    """Only final tokens are keyed, and a rejected draft's KV is overwritten before it is saved."""
    phrase = prompt(40)
    turn = phrase * 8
    options = {"dtype": "float32", "max_model_len": 2048}
    plain = start_engine("llama", None, **options)
    answer = plain.generate(turn, max_tokens=150)
    second = [*turn, *answer, *prompt(20, seed=3)]
    second_answer = plain.generate(second, max_tokens=60)
    plain.close()

    drafting = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    engine = start_engine("llama", daemon, speculative_config=drafting, **options)
    assert engine.generate(turn, max_tokens=150) == answer
    assert engine.drafts() > engine.drafts(accepted=True), "no draft was rejected"
    assert engine("reset_prefix_cache")
    assert engine.generate(second, max_tokens=60) == second_answer
    counters = engine("counters")
    assert counters["loads"] == 1
    # Prompt and answer, less the newest token and its draft.
    assert counters["loaded_blocks"] >= (len(turn) + len(answer) - 2) // BLOCK - 1


def test_salts_and_synchronous_scheduling(start_engine, daemon, prompt):
    turn = prompt(705)
    engine = start_engine("llama", daemon, dtype="float32", async_scheduling=False)
    answer = engine.generate(turn, cache_salt="alice")
    assert engine("reset_prefix_cache")
    assert engine.generate(turn, cache_salt="bob") == answer
    assert engine.counter("loads") == 0, "what one salt stored is not another one's"
    assert engine("reset_prefix_cache")
    assert engine.generate(turn, cache_salt="alice") == answer
    assert engine.counter("loads") == 1
