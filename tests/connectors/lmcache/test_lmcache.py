"""A real LMCache: in an engine's process, and its own benchmark of L2 with verification on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.lmcache import lmcache_environment
from tests.connectors.lmcache.conftest import WEIGHTS

IN_ENGINE = Path(__file__).with_name("in_engine.py")
IN_SERVER = Path(__file__).with_name("in_server.py")


def run(site: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=lmcache_environment(site),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def said(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine's LMCache said, whose daemon was killed in the end."""
    model = tmp_path_factory.mktemp("model")
    (model / "model.safetensors").write_bytes(b"weights")
    with Daemon() as daemon:
        out = run(site, str(IN_ENGINE), daemon.start().target, str(daemon.pid), str(model))
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def test_chunks_come_back_one_by_one_and_in_batches(said: dict[str, Any]) -> None:
    assert said["missed_at_first"] == 24
    assert (said["same"], said["one"]) == (20, 1)


def test_lookups_tell_the_prefix_and_single_chunks(said: dict[str, Any]) -> None:
    assert (said["prefix"], said["contains"], said["exists_sync"]) == (20, [True, False], True)
    assert said["beyond"] == 4
    assert (said["removed"], said["after_remove"]) == (True, 19)


def test_workers_and_tags_share_nothing(said: dict[str, Any]) -> None:
    assert (said["of_another_worker"], said["of_another_tag"]) == (0, 0)


def test_a_chunk_that_is_not_full_is_counted_and_not_stored(said: dict[str, Any]) -> None:
    assert (said["partial"], said["partial_found"]) == (1, False)


def test_a_killed_daemon_costs_misses_and_no_memory(said: dict[str, Any]) -> None:
    assert said["away"] == [0, 24]
    assert said["leaked"] == 0


def test_what_cannot_work_is_refused_with_what_to_do(said: dict[str, Any]) -> None:
    assert "set it to false" in said["refused"]["layerwise"]
    assert "unknown field `socket`; known keys: target, " in said["refused"]["setting"]


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ("weights", 'set "weights_id" to a text that changes'),
        ("dtype", 'set "kv_dtype" to the engine'),
    ],
)
def test_pages_without_a_name_are_misses_and_its_own_memory_goes_on(
    said: dict[str, Any], what: str, advice: str
) -> None:
    below, own, saved, counted, reason = said["unnamed"][what]
    assert (below, own, saved, counted) == ([False, 0], True, 0, True)
    assert advice in reason


def test_the_files_of_a_model_tell_its_weights(said: dict[str, Any]) -> None:
    told, found, asked = said["folder"]
    assert re.fullmatch("sha256 [0-9a-f]{64}", told)
    assert (found, asked) == (0, 1)


def test_after_close_all_is_a_miss(said: dict[str, Any]) -> None:
    assert said["closed"] == [0, False, False, 0, [None, None]]


def test_its_own_benchmark_verifies_what_it_loads(site: Path, daemon: Daemon) -> None:
    spec = {
        "type": "native_plugin",
        "module_path": "kvstore_lmcache",
        "class_name": "Client",
        "adapter_params": {
            "target": daemon.target,
            "page_mib_max": 4,
            "weights_id": WEIGHTS,
            "lookup_deadline_s": 10,  # whatever else runs here
        },
    }
    arguments = ["--num-keys", "16", "--in-flight", "4", "--rounds", "2", "--no-skip-verify"]
    out = run(
        site,
        *("-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", json.dumps(spec)),
        *arguments,
        *("--lookup-max-hit-rate", "0.5"),
    )
    assert re.findall(r"Total success: +(\d+)", out) == ["128", "64", "128"], out
    assert "All 64 keys data verified OK." in out, out


def test_what_its_own_eviction_drops_is_gone_and_the_rest_stays(site: Path) -> None:
    with Daemon("dram.capacity=128MiB") as daemon:
        said = json.loads(run(site, str(IN_SERVER), daemon.start().target).splitlines()[-1])
        with Client(daemon.target) as client:
            (use,) = client.admin.namespaces()
    assert said["used"] < 0.8
    assert 0 < said["deleted"] < 40
    assert said["found"] == said["same"] == 40 - said["deleted"]
    assert said["again"] == [True, True]
    assert said["failed"] == 0
    assert use.blocks == said["found"] + 2
