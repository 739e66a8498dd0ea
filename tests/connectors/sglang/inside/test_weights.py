"""What SGLang says of its model becomes part of every name; what it does not say is refused."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Client as Admin
from kvstore import Incompatible
from kvstore.system import file_digests
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from kvstore_sglang import weights
from tests.connectors.sglang.inside.engine import Rank, hashes, publish

FILES = {"model.safetensors": 9000, "config.json": 300}


def write_model(folder: Path, seed: str = "", **sizes: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, nbytes in {**FILES, **sizes}.items():
        (folder / name).write_bytes(random.Random(name + seed).randbytes(nbytes))
    return folder


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are remembered in a file of the test's; files count as written before the engine."""
    monkeypatch.setattr(weights, "default_digest_memory", lambda: tmp_path / "digests.json")
    monkeypatch.setattr(file_digests, "SETTLED_S", -1)
    monkeypatch.setattr("kvstore.system.fingerprints.process_began", lambda: 2.0**40)


def named(rank: Rank) -> Rank:
    """Wait until the weights are known."""
    until(lambda: rank.storage._weights.identity is not None)
    return rank


def test_the_same_weights_elsewhere_share_and_others_do_not(daemon: Daemon, tmp_path: Path) -> None:
    keys = hashes("content", 2)
    publish(model_path=str(write_model(tmp_path / "one")))
    with named(Rank(daemon.target, weights="")).fill(1) as one:
        assert all(one.save(keys, [0, 1]))
        expected = [one.page(0), one.page(1)]
    publish(model_path=str(write_model(tmp_path / "elsewhere/two")))
    with named(Rank(daemon.target, weights="")) as two:
        assert all(two.load(keys, [2, 3]))
        assert [two.page(2), two.page(3)] == expected
    publish(model_path=str(write_model(tmp_path / "three", seed="other")))
    with named(Rank(daemon.target, weights="")) as three:
        assert three.storage.batch_exists(keys) == 0
    publish(model_path=str(tmp_path / "one"), kv_cache_dtype="fp8_e4m3")
    with named(Rank(daemon.target, weights="")) as cast:
        assert cast.storage.batch_exists(keys) == 0


def test_until_the_weights_are_known_all_is_a_miss(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = hashes("unknown", 2)
    publish(model_path=str(write_model(tmp_path / "slow")))
    with named(Rank(daemon.target, weights="")).fill(2) as rank:
        monkeypatch.setattr(rank.storage._weights._prints, "found", None)
        assert rank.save(keys, [0, 1]) == [False, False]
        assert rank.storage.batch_exists(keys) == 0
        assert rank.load(keys, [0, 1]) == [False, False]
        assert rank.storage.counters.as_dict()["unnamed"] == 6


def test_a_draft_model_and_scales_are_part_of_it(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    model, draft = write_model(tmp_path / "model"), write_model(tmp_path / "draft", seed="draft")
    found = weights.sources(
        told(
            model={"model_path": str(model), "quantization_param_path": str(scales)},
            draft={"speculative_draft_model_path": str(draft)},
        ),
        "",
    )
    assert set(found) == {"weights", "draft_weights", "kv_scales"}
    assert all(str(draft) in str(path) for path in found["draft_weights"])


def told(**changes: dict[str, Any]) -> weights.Arguments:
    model = {"model_path": "", "revision": None, "load_format": "auto", "download_dir": None}
    return weights.Arguments(
        model=SimpleNamespace(**{**model, **changes.get("model", {})}),
        draft=SimpleNamespace(**changes.get("draft", {})),
        lora=SimpleNamespace(**changes.get("lora", {})),
        serving=SimpleNamespace(weight_version="default"),
        modelscope=False,
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora": {"enable_lora": True}}, "adapters"),
        ({"lora": {"lora_paths": ["a=b"]}}, "adapters"),
        ({"model": {"load_format": "dummy"}}, "--load-format dummy"),
        ({"model": {"load_format": "remote"}}, "--load-format remote"),
        ({"model": {"custom_weight_loader": ["x"]}}, "--custom-weight-loader"),
        ({"model": {"weight_cache_mode": "client"}}, "--weight-cache-mode client"),
        ({"model": {"weight_cache_mode": "daemon"}}, "--weight-cache-mode daemon"),
        ({"model": {"model_path": "org/not-here"}}, "on this machine"),
        ({"model": {"model_path": "EMPTY"}}, "no weights"),
    ],
)
def test_what_files_do_not_tell_is_refused_with_what_to_type(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    model = {"model_path": str(write_model(tmp_path / "model")), **changes.get("model", {})}
    if model["model_path"] == "EMPTY":
        model["model_path"] = str(empty)
    with pytest.raises(Incompatible, match=says) as refused:
        weights.sources(told(**{**changes, "model": model}), "")
    assert '"weights": "my-model-v3"' in str(refused.value)
    assert weights.sources(told(**{**changes, "model": model}), "mine") == {"weights": "named mine"}


def test_outside_sglangs_processes_the_weights_have_to_be_named(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_sglang.storage.arguments", lambda: None)
    with pytest.raises(Incompatible, match="does not say here which model"):
        Rank(daemon.target, weights="")
    with Rank(daemon.target, weights="named").fill(3) as rank:
        assert all(rank.save(hashes("outside", 1), [0]))


def test_sglang_says_what_decides_its_kv(tmp_path: Path, daemon: Daemon) -> None:
    publish(model_path=str(write_model(tmp_path / "said")), dtype="float16")
    with named(Rank(daemon.target, weights="", model="org/said")).fill(4) as rank:
        assert all(rank.save(hashes("said", 1), [0]))
    with Admin(daemon.target) as admin:
        (use,) = [each for each in admin.admin.namespaces() if each.model == "org/said"]
    assert use.namespace is not None
    identity = dict(use.namespace.identity)
    assert identity["dtype"] == "float16"
    assert len(identity["weights"]) == 64
    assert not set(identity) & {"model", "model_path"}  # names and places of it do not matter


def test_weights_exchanged_in_a_running_engine_end_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By each of SGLang's ways: all of them go through one method of its scheduler's."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    keys = hashes("exchanged", 2)
    assert weights.UPDATER in sys.modules
    with Rank(daemon.target).fill(5) as rank, caplog.at_level(logging.ERROR):
        assert all(rank.save(keys, [0, 1]))
        manager = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
        manager.metrics_collector = None
        with manager._observe_weight_load("tensor"):
            assert rank.storage.batch_exists(keys) == 0  # at once
        assert rank.save(keys, [0, 1]) == [False, False]
        assert rank.load(keys, [0, 1]) == [False, False]
        assert "weights=exchanged" in caplog.text
    with Rank(daemon.target) as started_again:
        assert started_again.storage.batch_exists(keys) == 2


def test_every_way_to_exchange_weights_is_watched() -> None:
    """If SGLang gets one that is not, this fails: the connector has to know of it."""
    source = Path(sys.modules[weights.UPDATER].__file__ or "").read_text()
    ways = source.count("    def update_weights_from_")
    assert ways == source.count("with self._observe_weight_load(") == 4


def test_a_version_that_operators_give_to_weights_is_noticed(daemon: Daemon) -> None:
    from sglang.srt.runtime_context import get_context

    publish()
    keys = hashes("version", 1)
    with Rank(daemon.target).fill(6) as rank:
        assert all(rank.save(keys, [0]))
        get_context().override("tests", weight_version="2")
        assert rank.storage.batch_exists(keys) == 0
