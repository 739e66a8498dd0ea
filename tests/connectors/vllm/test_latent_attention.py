"""Latent attention: all workers of an engine hold the same KV, and one of them stores it, coded.

vLLM can go on from a stored prefix of such a model where it has kernels for AMX. Elsewhere it turns
prefix caching off, and the connector refuses; there these tests give vLLM kernels in torch.
"""

from __future__ import annotations

import json

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from kvstore_kernels import native
from tests.connectors.vllm.engines import SEVERAL_PROCESSES
from tests.connectors.vllm.latent_kernels import TORCH_KERNELS
from tests.connectors.vllm.test_tiles import HAS_TILES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 32
TURN_TOKENS = 705
BLOCKS = TURN_TOKENS // BLOCK
TURNS = 5
TURNS_COMPARED = 3
RAW_NBYTES = 4 * BLOCK * (512 + 64) * 2
"""Of a block: four layers in bfloat16."""
OPTIONS = {
    "dtype": "bfloat16",
    # vLLM 0.32's own kernel for the CPU takes the heads of these queries for adjacent, and rotates
    # the wrong features: then answers, and the KV of all layers but the first, are no model's.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}
KERNELS = {} if HAS_TILES else {TORCH_KERNELS: "1"}
ONE_RANK = {**OPTIONS, "environment": KERNELS}
TWO_RANKS = {
    **OPTIONS,
    "tensor_parallel_size": 2,
    "environment": {**SEVERAL_PROCESSES, **KERNELS},
}
SETTLED_S = 30.0
TIMES_SMALLER = 1.38
"""How many times smaller exact records of this model are, at 32 tokens a block."""
needs_library = pytest.mark.skipif(bool(native.reason()), reason=native.reason())


def stored(daemon) -> tuple[int, int]:
    """Return how many blocks there are of all namespaces, and their bytes."""
    with Client(daemon.target) as client:
        uses = client.admin.namespaces()
        return sum(use.blocks for use in uses), sum(use.dram_bytes for use in uses)


def totals(engine, name: str) -> list[float]:
    """Return one counter of all ranks."""
    return [each[name] for each in engine("in_workers", do="counters")]


def own_hits(engine, turns: list[list[int]]) -> list[list[int]]:
    """Return what an engine answers from the blocks that it holds itself."""
    for turn in turns:
        engine.generate(turn)
    return [engine.generate(turn) for turn in turns]


def from_store(engine, turns: list[list[int]]) -> list[list[int]]:
    """Return what an engine answers that has nothing but what is stored."""
    assert engine("reset_prefix_cache", settle=False)
    before = totals(engine, "loaded_blocks")
    answers = [engine.generate(turn) for turn in turns]
    loaded = [now - then for now, then in zip(totals(engine, "loaded_blocks"), before, strict=True)]
    assert loaded == [BLOCKS * len(turns)] * len(loaded), "not every rank has loaded every block"
    assert not any(totals(engine, "loads_failed"))
    return answers


def form(engine) -> str:
    """Return what the namespace says of how records are coded; "": as they are."""
    told = json.loads(engine("in_workers", do="namespace")[0])
    return str(dict(told["identity"]).get("record", ""))


@needs_library
def test_blocks_are_coded_and_an_engine_resumes_from_them(start_engine, daemon, prompt):
    turns = [prompt(TURN_TOKENS, seed=seed) for seed in range(2)]
    coded = start_engine("deepseek", daemon, **ONE_RANK)
    assert form(coded).startswith("l3/1 ")
    answers = own_hits(coded, turns)
    until(lambda: stored(daemon)[0] == BLOCKS * 2, SETTLED_S)
    assert from_store(coded, turns) == answers
    (raw_bytes,), (nbytes,) = totals(coded, "saved_raw_bytes"), totals(coded, "saved_bytes")
    assert raw_bytes > TIMES_SMALLER * nbytes
    assert not coded.counter("saved_uncoded_blocks")
    coded.close()

    raw = start_engine("deepseek", daemon, extra={"record": "raw"}, **ONE_RANK)
    assert form(raw) == ""
    assert own_hits(raw, turns) == answers
    assert raw.counter("offered_tokens") == 0, "these are other blocks"
    until(lambda: stored(daemon)[0] == BLOCKS * 4, SETTLED_S)
    assert from_store(raw, turns) == answers
    assert raw.counter("saved_bytes") == raw_bytes


@needs_library
def test_lossy_blocks_are_those_that_were_stored(start_engine, daemon, prompt):
    turn = prompt(TURN_TOKENS)
    engine = start_engine("deepseek", daemon, extra={"fidelity": "ep"}, **ONE_RANK)
    assert form(engine).startswith("ep/1 ")
    engine.generate(turn)
    engine("settle")
    counts = engine("counters")
    assert counts["saved_blocks"] == 2 * BLOCKS - 1, "but for the first one, blocks have two parts"
    assert counts["saved_raw_bytes"] > 1.7 * counts["saved_bytes"]
    assert counts["saved_raw_bytes"] > 2.8 * (counts["saved_bytes"] - counts["saved_fine_bytes"])
    assert engine("reset_prefix_cache")
    engine.generate(turn)
    assert engine.counter("loaded_blocks") == BLOCKS
    assert engine.counter("loaded_lossy_blocks") == BLOCKS - 1
    assert engine.counter("loads_failed") == 0


@pytest.mark.long
def test_ranks_store_it_once_and_engines_of_all_degrees_share_it(start_engine, daemon, prompt):
    """Each daemon gets the blocks of one engine, and serves one of the other degree. Two ranks sum
    up in another order: what is served to the other degree is compared in turns for which both
    degrees give the same answer by themselves."""
    turns = [prompt(TURN_TOKENS, seed=seed) for seed in range(TURNS)]
    with Daemon("dram.capacity=256MiB", "dram.extent=64MiB") as other:
        other.start()
        one = start_engine("deepseek", daemon, **ONE_RANK)
        one_says = own_hits(one, turns)
        until(lambda: stored(daemon)[0] == BLOCKS * TURNS, SETTLED_S)
        assert from_store(one, turns) == one_says
        one.close()

        two = start_engine("deepseek", other, **TWO_RANKS)
        two_says = own_hits(two, turns)
        until(lambda: stored(other)[0] == BLOCKS * TURNS, SETTLED_S)
        assert from_store(two, turns) == two_says
        two.close()
        assert stored(other)[1] <= 1.05 * stored(daemon)[1]
        if not native.reason():
            assert stored(other)[1] < BLOCKS * TURNS * RAW_NBYTES / 1.3

        same = [turn for turn in range(TURNS) if one_says[turn] == two_says[turn]]
        assert len(same) >= TURNS_COMPARED, "the degrees are two models"
        turns = [turns[turn] for turn in same]
        expected = [one_says[turn] for turn in same]
        two = start_engine("deepseek", daemon, **TWO_RANKS)
        assert from_store(two, turns) == expected, "of what one rank has stored"
        two.close()
        one = start_engine("deepseek", other, **ONE_RANK)
        assert from_store(one, turns) == expected, "of what two ranks have stored"


def test_it_is_refused_where_vllm_cannot_resume(start_engine, daemon):
    """As on every CPU without AMX: vLLM's reference for latent attention."""
    with pytest.raises(RuntimeError, match="prefix caching is off in this engine"):
        start_engine("deepseek", daemon, attention_config={"backend": "CPU_MLA"}, **OPTIONS)
