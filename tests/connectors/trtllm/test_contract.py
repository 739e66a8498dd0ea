"""The connector against TensorRT-LLM's own signatures, of the version that it is made for."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.signatures import class_facts, takes
from tests.connectors.trtllm.contract import ARGUMENTS, OPTIONS
from tests.connectors.trtllm.standin import CONNECTOR, facts

OURS = Path(__file__).parents[3] / "connectors/kvstore_trtllm"
KEPT = facts()
HALVES = {
    "scheduler.py": ("KVStoreScheduler", "KvCacheConnectorScheduler"),
    "worker.py": ("KVStoreWorker", "KvCacheConnectorWorker"),
}


def test_the_facts_are_of_the_version_that_the_connector_is_made_for() -> None:
    from kvstore_trtllm.compat import MADE_FOR

    assert (KEPT["version"],) == MADE_FOR


@pytest.mark.parametrize("file", HALVES)
def test_each_half_has_every_hook_and_takes_what_it_is_called_with(file: str) -> None:
    name, base = HALVES[file]
    ours = class_facts(OURS / file, name)["methods"]
    theirs = KEPT["facts"][f"{CONNECTOR}:{base}"]
    assert set(theirs["abstract"]) <= set(ours)
    for method in sorted(set(ours) & set(theirs["methods"])):
        called = theirs["methods"][method]
        assert takes(ours[method], called), (method, ours[method], called)


def test_a_half_that_lacks_a_hook_could_not_be_made() -> None:
    """The stand-in is as strict as the real classes."""
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorWorker

    class Half(KvCacheConnectorWorker):  # type: ignore[misc]
        def start_load_kv(self, stream: Any) -> None: ...

    with pytest.raises(TypeError, match="wait_for_save"):
        Half(None)


def test_what_steps_say_is_there() -> None:
    for name, fields in {
        "RequestData": {
            "computed_position",
            "new_block_ids",
            "new_tokens",
            "num_scheduled_tokens",
            "request_id",
        },
        "SchedulerOutput": {"cached_requests", "new_requests"},
    }.items():
        assert fields <= set(KEPT["facts"][f"{CONNECTOR}:{name}"]["fields"])


def test_the_options_it_reads_are_there() -> None:
    for name, used in OPTIONS.items():
        assert set(used) == set(KEPT["facts"][name]["fields"]), name
    connector = KEPT["facts"][f"{ARGUMENTS}:KvCacheConnectorConfig"]["fields"]
    assert len(connector) == 3


def test_no_other_file_names_tensorrt_llm() -> None:
    for path in OURS.glob("*.py"):
        imported = {
            (getattr(node, "module", None) or node.names[0].name).partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert ("tensorrt_llm" in imported) == (path.name == "compat.py"), path.name
