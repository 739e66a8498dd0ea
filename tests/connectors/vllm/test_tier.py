"""kvstore behind vLLM's own offloading: what left host memory, or its engine, comes back."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore import Client
from kvstore.testing.wait import until
from tests.connectors.vllm.cpu_layers import import_vllm
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
    until(lambda: engine("reset_host_pool"))


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

    # Somebody may have changed its weights in place.
    until(lambda: first("reset_all"))
    assert not comes_from_the_tier(first, turn, answer)
    until(lambda: stored_blocks(daemon) == 2 * BLOCKS)
    assert comes_from_the_tier(first, turn, answer)
    first.close()
    assert daemon.stop() == 0
    daemon.start()

    engine = start_engine("llama", daemon, transfer=offloading(daemon), dtype="float32")
    assert comes_from_the_tier(engine, turn, answer)

    # Memory that lies is a miss: the chunks are dropped, computed, and stored again.
    flip_bits_of_arena(daemon.target)
    assert not comes_from_the_tier(engine, turn, answer)
    until(lambda: stored_blocks(daemon) == 2 * BLOCKS)
    until(lambda: comes_from_the_tier(engine, turn, answer), FOUND_WITHIN_S)

    daemon.kill()
    assert not comes_from_the_tier(engine, turn, answer)
    daemon.start()
    until(lambda: comes_from_the_tier(engine, turn, answer), FOUND_WITHIN_S)


CHUNK_NBYTES = 4096
SPEC = SimpleNamespace(
    config=SimpleNamespace(
        model=SimpleNamespace(name="/nowhere/model", dtype="torch.bfloat16"),
        groups=[SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=["layer.0"])],
        parallel=SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        cache=SimpleNamespace(tokens_per_hash=32),
        kv_cache_layout="HNC",
        canonical_layout=False,
        replicated_layout=False,
    ),
    tokens_per_block=[32],
    blocks_per_chunk=1,
)


@pytest.fixture
def tier(daemon):
    """A tier without an engine, over a pool of two chunks."""
    import_vllm()
    pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure")
    from kvstore_vllm.tier import KVStoreTier

    pool = memoryview(bytearray(2 * CHUNK_NBYTES)).cast("B", (2, CHUNK_NBYTES))
    options = {"target": daemon.target, "plain_text": True, "weights_id": "weights"}
    tier = KVStoreTier(SPEC, pool, "kvstore", **options)
    yield tier
    tier.shutdown()


def transfer(tier, how: str, request: str, chunk: int) -> bool:
    """Store or load the one chunk of a prefix; return whether that went well."""
    import numpy
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob

    key = make_offload_key(b"prefix", 0)
    context = ReqContext(req_id=request)
    job = TransferJob(1, [key], numpy.array([chunk]), how == "load", context)
    {"load": tier.submit_load, "store": tier.submit_store}[how](job)
    results = []
    until(lambda: results.extend(tier.get_finished_jobs()) or results)
    return results[0].success


def test_a_tier_shares_nothing_with_its_past_after_a_reset(tier):
    """The weights may have been changed in place, and the keys of vLLM do not say so."""
    first, second = tier._pool[:CHUNK_NBYTES], tier._pool[CHUNK_NBYTES:]
    requests = {name: SimpleNamespace(req_id=name) for name in ("old", "new")}
    tier.on_new_request(requests["old"])
    first[:] = b"o" * CHUNK_NBYTES
    assert transfer(tier, "store", "old", 0)
    assert transfer(tier, "load", "old", 1)
    assert second == first
    tier.drain_jobs()
    assert not transfer(tier, "load", "old", 1)
    assert not transfer(tier, "store", "old", 0), "it runs on with KV of before"
    tier.on_new_request(requests["new"])
    assert not transfer(tier, "load", "new", 1)
    first[:] = b"n" * CHUNK_NBYTES
    assert transfer(tier, "store", "new", 0)
    assert transfer(tier, "load", "new", 1)
    assert second == first
    for request in requests.values():
        tier.on_request_finished(request)
    assert tier._requests == tier._of_the_past == set()
    first.release()
    second.release()


def test_vllm_drains_its_tiers_to_reset_them_and_for_nothing_else():
    """So a tier learns of a reset."""
    import_vllm()
    manager = pytest.importorskip("vllm.v1.kv_offload.tiering.manager")
    callers = {
        function.name
        for function in ast.walk(ast.parse(Path(manager.__file__).read_text()))
        if isinstance(function, ast.FunctionDef)
        and any(getattr(node, "attr", "") == "drain_jobs" for node in ast.walk(function))
    }
    assert callers == {"reset_cache"}


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
