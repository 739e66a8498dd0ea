"""Two workers that each hold half of the layers: both halves of a block make it a hit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore import Client, KeyChain, Namespace, Part, Span, root_key
from kvstore.testing.wait import until
from tests.connectors.vllm.engines import SEVERAL_PROCESSES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 32
FOUR_WORKERS_GIB = 10
PIPELINE = {
    "dtype": "float32",
    "pipeline_parallel_size": 2,
    # Without a trace, vLLM 0.32 has no buffer for what the first stage hands on to the second.
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
    "environment": SEVERAL_PROCESSES,
}


def available_gib() -> float:
    """Return the memory that is free, or can be had by dropping caches."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) / (1 << 20)


def totals(engine, name: str) -> list[float]:
    """Return one counter of both stages."""
    return [each[name] for each in engine("in_workers", do="counters")]


def namespaces(engine) -> list[Namespace]:
    return [Namespace.from_json(text) for text in engine("in_workers", do="namespace")]


def stored(daemon, namespace: Namespace, turn: list[int], shard: int = 0) -> list[int]:
    """Return how many blocks are stored of one shard of each group."""
    with Client(daemon.target) as client:
        namespace_id = client.register(namespace)
        keys = KeyChain(root_key(namespace_id), BLOCK).update(turn)
        groups = range(len(namespace.groups))
        spans = [Span(Part(group, shard), 0, len(keys)) for group in groups]
        present = client.match(namespace_id, keys, each=True, spans=spans).present
        return [sum(present[group * len(keys) : (group + 1) * len(keys)]) for group in groups]


def test_a_pipeline_resumes_what_one_like_it_has_stored(start_engine, daemon, prompt):
    turn = prompt(705)
    first = start_engine("llama", daemon, **PIPELINE)
    one, other = namespaces(first)
    assert one == other
    assert [group.name for group in one.groups] == ["0@0", "0@1"]
    assert dict(one.identity)["pipeline"] == "2+2"
    answer = first.generate(turn)
    until(lambda: stored(daemon, one, turn) == [22, 22], 30)
    first.close()

    second = start_engine("llama", daemon, **PIPELINE)
    assert second.generate(turn) == answer
    assert totals(second, "loaded_blocks") == [22, 22]
    assert totals(second, "loads_failed") == [0, 0]
    second.close()

    alone = start_engine("llama", daemon, dtype="float32")
    assert alone.generate(turn) == answer
    assert alone.counter("loaded_blocks") == 0, "an engine of one stage shares nothing with two"


@pytest.mark.long
def test_a_pipeline_of_two_workers_a_stage_resumes(start_engine, daemon, prompt):
    """Four workers: each holds half of the heads of half of the layers."""
    if available_gib() < FOUR_WORKERS_GIB:
        pytest.skip(f"four workers need {FOUR_WORKERS_GIB} GiB of memory, and less is free here")
    turn = prompt(705)
    options = {**PIPELINE, "tensor_parallel_size": 2}
    first = start_engine("llama", daemon, **options)
    namespace, *others = namespaces(first)
    assert others == [namespace] * 3
    assert [(group.name, group.shards) for group in namespace.groups] == [("0@0", 2), ("0@1", 2)]
    answer = first.generate(turn)
    for shard in (0, 1):
        until(lambda shard=shard: stored(daemon, namespace, turn, shard) == [22, 22], 30)
    first.close()

    second = start_engine("llama", daemon, **options)
    assert second.generate(turn) == answer
    assert totals(second, "loaded_blocks") == [22] * 4
    assert totals(second, "loads_failed") == [0] * 4


@pytest.mark.long
def test_the_layers_of_a_hybrid_model_are_dealt_out(start_engine, daemon, prompt):
    """Its only layer of full attention is the last one: the first stage has none of that group."""
    turn = prompt(705)
    first = start_engine("gemma3", daemon, **PIPELINE)
    namespace = namespaces(first)[0]
    names = [group.name for group in namespace.groups]
    assert {name.partition("@")[2] for name in names} == {"0", "1"}, json.dumps(names)
    answer = first.generate(turn)
    first.close()
    second = start_engine("gemma3", daemon, **PIPELINE)
    assert second.generate(turn) == answer
    assert min(totals(second, "loaded_blocks")) > 0
    assert totals(second, "loads_failed") == [0, 0]
