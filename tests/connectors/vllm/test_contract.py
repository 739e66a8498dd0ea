"""The newest vLLM has no wheel for the CPU: what the connector uses of it, by signatures."""

from __future__ import annotations

import ast
import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvstore.system.engine_versions import release_of
from tests.connectors.signatures import Facts, class_facts, takes
from tests.connectors.vllm import contract

CONNECTOR = Path(__file__).parents[3] / "connectors/kvstore_vllm"
KEPT = contract.facts()
OWN = {
    "connector.py": ("KVStoreConnector", f"{contract.BASE}:KVConnectorBase_V1"),
    "scheduler_hooks.py": ("SchedulerHooks", f"{contract.BASE}:KVConnectorBase_V1"),
    "stats.py": ("KVStoreStats", f"{contract.METRICS}:KVConnectorStats"),
    "tier.py": ("KVStoreTier", f"{contract.TIER}/base.py:SecondaryTierManager"),
    "worker_hooks.py": ("WorkerHooks", f"{contract.BASE}:KVConnectorBase_V1"),
}
"""Classes of ours that vLLM calls, by file, and the class of vLLM's whose place they take."""
SINCE_0_32 = {"restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches"}
"""Hooks that 0.32 has not: sleep mode, which asks that nothing reads the blocks."""


def own(file: str) -> tuple[Facts, Facts]:
    name, base = OWN[file]
    return class_facts(CONNECTOR / file, name), KEPT["facts"][base]


def test_the_facts_are_of_the_newest_version_that_the_connector_knows() -> None:
    tree = ast.parse((CONNECTOR / "compat.py").read_text())
    (known,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TESTED"
    )
    assert release_of(KEPT["version"])[:2] == release_of(known[-1])


@pytest.mark.parametrize("file", OWN)
def test_every_hook_takes_what_vllm_calls_it_with(file: str) -> None:
    ours, theirs = own(file)
    shared = set(ours["methods"]) & set(theirs["methods"]) - {"__init__"}
    assert shared, "nothing is compared"
    for name in sorted(shared):
        called = theirs["methods"][name]
        assert takes(ours["methods"][name], called), (name, ours["methods"][name], called)


def test_every_abstract_hook_is_there() -> None:
    both = f"{contract.BASE}:SupportsHMA", f"{contract.BASE}:KVConnectorBase_V1"
    wanted = {name for each in both for name in KEPT["facts"][each]["abstract"]}
    files = ("connector.py", "scheduler_hooks.py", "worker_hooks.py")
    has = {name for file in files for name in own(file)[0]["methods"]}
    assert "request_finished_all_groups" in wanted
    assert wanted <= has
    tier, base = own("tier.py")
    assert set(base["abstract"]) <= set(tier["methods"])


def test_sleep_mode_is_told_to_stop_reading() -> None:
    """vLLM unmaps the blocks right after: a copy out of them would end the engine."""
    assert "unregister_kv_caches" in own("worker_hooks.py")[0]["methods"]
    assert set(own("worker_hooks.py")[1]["methods"]) >= SINCE_0_32


def missing(facts: dict[str, Any]) -> list[str]:
    """Return what the connector uses, and these facts lack, or take otherwise."""
    found = [
        f"{name}.{field}"
        for name, fields in contract.FIELDS.items()
        for field in fields
        if field not in facts[name]["fields"]
    ]
    for name, methods in contract.METHODS.items():
        for method, called in methods.items():
            own = facts[name]["methods"].get(method)
            if own is None or not takes(own, called):
                found.append(f"{name}.{method}({', '.join(called)})")
    return found


def test_what_the_connector_uses_is_there() -> None:
    assert missing(KEPT["facts"]) == []


def test_what_is_missing_would_be_seen() -> None:
    broken = {**KEPT["facts"]}
    name = f"{contract.SPECS}:KVCacheConfig"
    fields = [each for each in broken[name]["fields"] if each != "num_blocks"]
    broken[name] = {**broken[name], "fields": fields}
    manager = "vllm/v1/core/kv_cache_manager.py:KVCacheManager"
    broken[manager] = {
        **broken[manager],
        "methods": {"get_block_ids": ["request_id", "group"], "get_computed_blocks": ["request"]},
    }
    assert missing(broken) == [f"{name}.num_blocks", f"{manager}.get_block_ids(request_id)"]


def test_the_vllm_that_is_installed_has_the_same_but_for_what_is_noted() -> None:
    """So the facts are read as the real thing is, and a change between the two is no surprise."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    if release_of(version("vllm"))[:2] != (0, 32):
        pytest.skip("the difference that is noted is from 0.32 on")
    here = contract.read(Path(found.origin).parents[1])
    assert missing(here) == []
    base = f"{contract.BASE}:KVConnectorBase_V1"
    before, after = here[base]["methods"], KEPT["facts"][base]["methods"]
    assert set(after) - set(before) == SINCE_0_32
    assert set(before) <= set(after)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == set()


@pytest.mark.parametrize(
    ("own", "called", "taken"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a"], ["a", "b"], False),
        (["a", "b="], ["a"], True),
        (["a", "b"], ["a"], False),
        (["a", "b"], ["a", "b="], False),
        (["a", "b="], ["a", "b="], True),
        (["b", "a"], ["a", "b"], False),
        (["a", "**kwargs"], ["a", "**kwargs"], True),
        (["a"], ["a", "**kwargs"], False),
        (["a", "**more"], ["a", "b", "**kwargs"], True),
        (["*args", "**kwargs"], ["a", "b"], True),
        (["a", "*", "b="], ["a"], True),
        ([], [], True),
    ],
)
def test_which_calls_a_method_takes(own: list[str], called: list[str], taken: bool) -> None:
    assert takes(own, called) is taken
