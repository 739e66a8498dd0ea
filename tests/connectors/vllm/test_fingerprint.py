"""The fingerprint changes with every byte of the weights, and no engine waits for it."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from pathlib import Path

import pytest

from kvstore.model.errors import Incompatible
from kvstore.system import file_digests, model_files
from kvstore.system.file_digests import FileDigests
from kvstore.testing.wait import until
from kvstore_vllm.fingerprint import Fingerprints, process_began, weights_files

FILES = {
    "model-00001-of-00002.safetensors": 40_000,
    "model-00002-of-00002.safetensors": 30_000,
    "model.safetensors.index.json": 500,
    "config.json": 700,
    "quantize_config.json": 200,
    "modeling_own.py": 300,
}


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, nbytes in FILES.items():
        (folder / name).write_bytes(random.Random(name).randbytes(nbytes))
    return folder


@pytest.fixture
def memory(tmp_path) -> FileDigests:
    return FileDigests(tmp_path / "cache/digests.json")


@pytest.fixture(autouse=True)
def _settled(monkeypatch) -> None:
    monkeypatch.setattr(file_digests, "SETTLED_S", -1)


def found(folder: Path, digests: FileDigests | None = None) -> str:
    """Return the fingerprint of an engine that begins after the files were written."""
    prints = Fingerprints(
        {"weights": weights_files(folder)}, digests or FileDigests(), lambda: time.time() + 60
    )
    until(lambda: prints.found is not None)
    assert prints.found is not None
    return prints.found["weights"]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_one_byte_anywhere_shows(model, kind):
    if kind == "bin":
        for file in model.glob("*.safetensors"):
            file.rename(file.with_suffix(".bin"))
    draw = random.Random(kind)
    files = sorted(model.iterdir())
    seen = {found(model)}
    for _ in range(500):
        file = draw.choices(files, [each.stat().st_size for each in files])[0]
        content = bytearray(before := file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        seen.add(found(model))
        file.write_bytes(before)
    for file in files:  # small ones are seldom drawn
        before = file.read_bytes()
        file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        seen.add(found(model))
        file.write_bytes(before)
    assert len(seen) >= 500 + len(files) - 5, "only the same byte drawn twice may look the same"
    assert found(model) in seen


def test_a_second_layout_of_the_weights_counts(model):
    """vLLM reads consolidated files before the shards, if both are there."""
    before = found(model)
    (model / "consolidated.safetensors").write_bytes(b"other weights")
    assert found(model) != before


def test_files_that_make_no_model_do_not_count(model):
    before = found(model)
    for name in ("README.md", "LICENSE", "chat_template.jinja", ".gitattributes", "optimizer.pt"):
        (model / name).write_bytes(b"anything")
    (model / "checkpoint-500").mkdir()
    (model / "checkpoint-500/model.safetensors").write_bytes(b"an earlier one")
    assert found(model) == before
    (model / "sub").mkdir()
    (model / "sub/model.safetensors").write_bytes(b"a part of it")
    assert found(model) != before


def test_all_parts_of_a_split_file_count(tmp_path):
    parts = [tmp_path / f"model-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        part.write_bytes(b"weights")
    (tmp_path / "other.gguf").write_bytes(b"another model")
    assert weights_files(parts[0]) == parts
    assert weights_files(tmp_path / "other.gguf") == [tmp_path / "other.gguf"]


def test_no_weights_is_an_error_that_says_what_to_type(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for missing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(Incompatible, match="weights_id"):
            weights_files(missing)


def test_a_folder_of_everything_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "FILES_MAX", 3)
    for number in range(4):
        (tmp_path / f"{number}.safetensors").write_bytes(b"")
    with pytest.raises(Incompatible, match="is it a model"):
        weights_files(tmp_path)


def test_a_name_needs_no_files():
    assert Fingerprints({"weights": "my-model-v3"}).found == {"weights": "my-model-v3"}


def test_nobody_waits_for_the_first_time_and_the_next_has_it_at_once(
    model, memory, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    gate = threading.Event()
    hashed = file_digests._hashed

    def held(*args):
        gate.wait(30)
        return hashed(*args)

    monkeypatch.setattr(file_digests, "_hashed", held)
    sources = {"weights": weights_files(model)}
    first = Fingerprints(sources, memory, lambda: time.time() + 60)
    assert first.found is None
    assert "saves and loads begin when it is done" in caplog.text
    gate.set()
    until(lambda: first.found is not None)
    assert "weights=hashed" in caplog.text
    monkeypatch.setattr(file_digests, "_hashed", None)  # whoever hashes fails
    assert Fingerprints(sources, memory, lambda: time.time() + 60).found == first.found


def test_weights_that_changed_after_the_engine_began_are_not_taken_for_what_it_loaded(
    model, memory, caplog
):
    began = time.time()
    time.sleep(0.02)
    (model / "config.json").write_bytes(b"{}")
    prints = Fingerprints({"weights": weights_files(model)}, memory, lambda: began)
    until(lambda: "cache=off" in caplog.text)
    assert prints.found is None
    assert "config.json changed after this engine began" in caplog.text
    again = Fingerprints({"weights": weights_files(model)}, memory, lambda: began)
    assert again.found is None, "although its digest is remembered by now"


def test_what_the_hub_has_downloaded_meanwhile_is_what_was_loaded(model, tmp_path, memory):
    began = time.time() - 60
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/1"
    snapshot.mkdir(parents=True)
    model.rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    prints = Fingerprints({"weights": weights_files(snapshot)}, memory, lambda: began)
    until(lambda: prints.found is not None)


def test_a_file_that_goes_away_leaves_the_cache_off(model, caplog, monkeypatch):
    sources = {"weights": weights_files(model)}

    def gone(*args):
        raise FileNotFoundError("it was moved")

    monkeypatch.setattr(file_digests, "_hashed", gone)
    prints = Fingerprints(sources, FileDigests(), lambda: time.time() + 60)
    until(lambda: "cache=off" in caplog.text)
    assert prints.found is None


def test_a_process_knows_when_it_began():
    assert 0 <= time.time() - process_began() < 24 * 3600
    born = Path(f"/proc/{os.getpid()}").stat().st_ctime
    assert process_began() == pytest.approx(born, abs=60)
