"""Pages of one model are never those of another one under the same name."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore import Incompatible
from kvstore.settings import default_digest_memory
from kvstore.system.model_files import weights_files
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from kvstore_lmcache import weights
from kvstore_lmcache.weights import ModelWeights, Weights
from tests.connectors.lmcache.conftest import Native, Pages, object_keys

LONG_AGO = time.time() - 3600


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of these tests' files are remembered here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_digest_memory().is_relative_to(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, older than this process."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, b"base")
    return folder


def write(folder: Path, tensor: bytes) -> None:
    (folder / "model.safetensors").write_bytes(tensor * 100)
    (folder / "config.json").write_text("{}")
    for file in folder.iterdir():
        os.utime(file, (LONG_AGO, LONG_AGO))


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has begun after the last change of any file."""
    monkeypatch.setattr("kvstore.system.fingerprints.process_began", lambda: time.time() + 60)


def native_of(daemon: Daemon, **params: object) -> Native:
    return Native(**{"target": daemon.target, "page_mib_max": 4, "lookup_deadline_s": 10, **params})


def test_another_fine_tune_at_the_same_path_shares_nothing(
    lmcache: None, daemon: Daemon, model: Path, began: None
) -> None:
    keys = object_keys("tune", 4, model=str(model))
    base, tuned, got = Pages(4).fill(1), Pages(4).fill(2), Pages(4)
    with native_of(daemon, weights_id="") as before:
        until(lambda: before.set(keys, base.views))
        assert all(before.exists(keys))
    write(model, b"tune")
    with native_of(daemon, weights_id="") as after:
        until(lambda: after.set(keys[:2], tuned.views[:2]))
        assert after.exists(keys) == [True, True, False, False]
        assert after.get(keys, got.views) == [True, True, False, False]
        assert np.array_equal(got.rows[:2], tuned.rows[:2])
    write(model, b"base")
    with native_of(daemon, weights_id="") as again:
        until(lambda: all(again.exists(keys)))
        assert all(again.get(keys, got.views))
        assert np.array_equal(got.rows, base.rows)


def test_files_that_change_while_lmcache_runs_are_nobodys(
    lmcache: None, daemon: Daemon, model: Path, began: None
) -> None:
    keys, pages = object_keys("change", 4, model=str(model)), Pages(4).fill(3)
    with native_of(daemon, weights_id="") as native:
        until(lambda: native.set(keys, pages.views))
        write(model, b"tune")
        until(lambda: not any(native.exists(keys)))
        assert not native.set(keys, pages.views)
        assert not any(native.get(keys, pages.views))
        write(model, b"base")  # an engine may have loaded what was there in between
        time.sleep(weights.LOOK_S)
        assert not any(native.exists(keys))
        assert native.client.counters.as_dict()["unnamed"]


@pytest.mark.parametrize(
    ("watched", "remedy"),
    [(True, "restart LMCache's server, then the engine, or"), (False, "'restart the engine, or")],
)
def test_files_younger_than_this_process_tell_nothing(
    model: Path, caplog: pytest.LogCaptureFixture, watched: bool, remedy: str
) -> None:
    told = Weights(str(model), watched=watched, began=lambda: LONG_AGO - 1)
    until(lambda: remedy in caplog.text)
    assert told.identity is None


@pytest.mark.parametrize("name", ["org/model", "", "/no/such/model", "a\0b", "models"])
def test_a_name_alone_is_refused_with_what_to_set(
    lmcache: None, daemon: Daemon, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()  # where LMCache's server runs says nothing of an engine's paths
    told = ModelWeights("")
    with pytest.raises(Incompatible, match='set "weights_id" to a text that changes'):
        until(lambda: told.identity(name))
    keys, pages = object_keys("name", 2, model=name), Pages(2).fill(4)
    with native_of(daemon, weights_id="") as native:
        until(lambda: native.client._client.instance)
        assert not native.set(keys, pages.views)
        assert native.exists(keys) == native.get(keys, pages.views) == [False, False]
        assert native.client.counters.as_dict()["unnamed"] == 6


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    told = ModelWeights("")
    for _ in range(2):
        with pytest.raises(Incompatible, match="found no weights"):
            until(lambda: told.identity(str(tmp_path)))


def test_names_of_weights_and_dtypes_tell_pages_apart(lmcache: None, daemon: Daemon) -> None:
    keys, pages = object_keys("named", 2), Pages(2).fill(5)
    with native_of(daemon, weights_id="v1", kv_dtype="fp8_e4m3") as first:
        until(lambda: first.set(keys, pages.views))
    for params, found in (
        ({"weights_id": "v1", "kv_dtype": "fp8_e4m3"}, True),
        ({"weights_id": "v1", "kv_dtype": "int8"}, False),
        ({"weights_id": "v1"}, False),
        ({"weights_id": "v2", "kv_dtype": "fp8_e4m3"}, False),
    ):
        with native_of(daemon, **params) as other:
            until(lambda: other.client._client.instance)
            assert other.exists(keys) == [found] * 2


def test_a_file_system_that_hangs_is_a_miss_within_a_moment(
    model: Path, began: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, hangs = Weights(str(model), watched=True), threading.Event()
    until(lambda: told.identity)
    look = told._look
    monkeypatch.setattr(told, "_look", lambda: (hangs.wait(30), look())[1])
    told._look_at = 0.0
    started = time.monotonic()
    assert [told.identity for _ in range(100)] == [None] * 100
    assert time.monotonic() - started < 5
    hangs.set()
    until(lambda: told.identity)


def look_now(told: Weights) -> str | None:
    told._look_at = 0.0
    return told.identity


def test_a_look_that_cannot_start_is_a_miss_and_the_next_one_is_made(
    model: Path, began: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Weights(str(model), watched=True)
    until(lambda: told.identity)
    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", no_thread)
        assert [look_now(told) for _ in range(2)] == [None, None]
    until(lambda: look_now(told))


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_look_that_ended_late_says_nothing_an_hour_later(
    model: Path, began: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, hangs = Weights(str(model), watched=True), threading.Event()
    until(lambda: told.identity)
    look = told._look
    with monkeypatch.context() as slow:
        slow.setattr(told, "_look", lambda: (look(), hangs.wait(30))[0])
        assert look_now(told) is None
        hangs.set()
        until(lambda: told._looking is not None and not told._looking.is_alive())
    write(model, b"tune")
    assert look_now(told) is None


@pytest.mark.parametrize("how", ["stat", "folder"])
def test_what_cannot_be_read_for_a_moment_is_a_miss_for_that_moment(
    model: Path, began: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    told = Weights(str(model), watched=True)
    until(lambda: told.identity)
    with monkeypatch.context() as stale:
        if how == "stat":
            stale.setattr(weights, "stamp_of", lambda files: (None,) * len(files))
        else:
            stale.setattr(weights, "weights_files", stale_handle)
        assert [look_now(told) for _ in range(3)] == [None] * 3
    until(lambda: look_now(told))
    write(model, b"tune")
    until(lambda: look_now(told) is None and told._exchanged)
    write(model, b"base")
    assert look_now(told) is None


def stale_handle(path: Path, *, advice: str) -> list[Path]:
    raise OSError(errno.ESTALE, "Stale file handle")


def test_a_model_that_nothing_told_at_first_is_asked_for_again(
    model: Path, began: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, name = ModelWeights(""), str(model)
    with monkeypatch.context() as stale:
        stale.setattr(weights, "weights_files", stale_handle)
        with pytest.raises(Incompatible, match="Stale file handle"):
            until(lambda: told.identity(name))
    with pytest.raises(Incompatible, match="Stale file handle"):
        told.identity(name)
    told._models[name]._again_at = 0.0
    until(lambda: told.identity(name))


def test_a_file_system_that_hangs_at_first_delays_one_call_for_a_moment(
    model: Path, began: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, hangs = ModelWeights(""), threading.Event()
    files = weights_files
    monkeypatch.setattr(
        weights,
        "weights_files",
        lambda path, advice: (hangs.wait(30), files(path, advice=advice))[1],
    )
    started = time.monotonic()
    assert [told.identity(str(model)) for _ in range(100)] == [None] * 100
    assert time.monotonic() - started < 5
    hangs.set()
    until(lambda: told.identity(str(model)))


def test_whatever_goes_wrong_at_first_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "default_digest_memory", lambda: 1 / 0)
    told = ModelWeights("")
    with pytest.raises(Incompatible, match="ZeroDivisionError"):
        until(lambda: told.identity(str(model)))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(Incompatible, match="can't start new thread"):
        told.identity("/another")
