"""kvstore behind vLLM's own offloading: what left host memory, or its engine, comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import Client
from kvstore.testing.wait import until
from tests.connectors.vllm.test_faults import flip_bits_of_arena

pytestmark = [pytest.mark.vllm, pytest.mark.fault, pytest.mark.timeout(300)]

BLOCKS = 22
FOUND_WITHIN_S = 10.0


@pytest.fixture(autouse=True)
def no_shared_memory_left():
    """vLLM unlinks its host pool at a clean end of the engine only."""
    before = set(Path("/dev/shm").glob("vllm_offload_*"))
    yield
    for file in set(Path("/dev/shm").glob("vllm_offload_*")) - before:
        file.unlink()


def offloading(daemon, **tier) -> dict:
    """Return vLLM's own offloading with the daemon as its second tier."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.connectors.vllm.host_tiering_spec",
            "cpu_bytes_to_use": 8 << 20,
            "secondary_tiers": [
                {"type": "kvstore", "target": daemon.target, "plain_text": True, **tier}
            ],
        },
    }


def stored_blocks(daemon) -> int:
    with Client(daemon.target) as client:
        return client.admin.stats()["blocks"]


def read_bytes(engine) -> float:
    return engine("metric", name="vllm:kv_offload_tiering_read_bytes")


def forget(engine) -> None:
    """Empty the device and vLLM's own host pool; the second tier keeps what it has."""
    until(lambda: engine("reset_all"))


def comes_from_the_tier(engine, turn, answer) -> bool:
    before = read_bytes(engine)
    assert engine.generate(turn) == answer
    forget(engine)
    return read_bytes(engine) > before


def test_an_engine_finds_in_the_daemon_what_another_one_offloaded(start_engine, daemon, prompt):
    turn = prompt(705)
    first = start_engine("llama", daemon, transfer=offloading(daemon), dtype="float32")
    answer = first.generate(turn)
    until(lambda: stored_blocks(daemon) == BLOCKS)
    forget(first)
    assert comes_from_the_tier(first, turn, answer)
    assert stored_blocks(daemon) == BLOCKS, "what was loaded is not stored again"
    first.close()
    assert daemon.stop() == 0
    daemon.start()

    engine = start_engine("llama", daemon, transfer=offloading(daemon), dtype="float32")
    assert comes_from_the_tier(engine, turn, answer)

    # Memory that lies is a miss: the chunks are dropped, computed, and stored again.
    flip_bits_of_arena(daemon.target)
    assert not comes_from_the_tier(engine, turn, answer)
    until(lambda: stored_blocks(daemon) == BLOCKS)
    until(lambda: comes_from_the_tier(engine, turn, answer), FOUND_WITHIN_S)

    daemon.kill()
    assert not comes_from_the_tier(engine, turn, answer)
    daemon.start()
    until(lambda: comes_from_the_tier(engine, turn, answer), FOUND_WITHIN_S)


def test_a_tier_says_what_is_wrong_with_its_settings():
    pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure")
    from kvstore import ConfigError, Incompatible
    from kvstore_vllm.tier import TierSettings, _parse

    text = TierSettings("unix:/k", plain_text=True)
    assert _parse({"target": "unix:/k", "plain_text": True}) == text
    for plain in ({}, {"plain_text": False}):
        with pytest.raises(Incompatible, match=r"LoRA.*images.*\"plain_text\": true"):
            _parse({"target": "unix:/k", **plain})
    lossy = {"target": "unix:/k", "plain_text": True, "fidelity": "ep"}
    for wrong, named in [
        ({}, "target"),
        ({"target": "unix:/k", "weight_id": "x"}, "weight_id"),
        (lossy, "or use KVStoreConnector"),
    ]:
        with pytest.raises(ConfigError, match=named):
            _parse(wrong)
