"""The fingerprint changes with the weights, and with nothing else."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from kvstore.errors import Incompatible
from kvstore_vllm.fingerprint import weights_fingerprint


def write_safetensors(path: Path, tensors: dict[str, bytes], **metadata: str) -> None:
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, data in tensors.items():
        end = at + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


@pytest.fixture
def tensors() -> dict[str, bytes]:
    return {"a": bytes(range(256)) * 100, "b": b"short", "c": b"", "d": b"x" * 12288}


def test_sharding_names_and_metadata_do_not_matter(tmp_path, tensors):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    write_safetensors(one / "model.safetensors", tensors, format="pt")
    write_safetensors(two / "x-2.safetensors", {name: tensors[name] for name in "ca"})
    write_safetensors(two / "x-1.safetensors", {name: tensors[name] for name in "db"})
    assert weights_fingerprint(one) == weights_fingerprint(two)


@pytest.mark.parametrize("at", [0, 12800, 25599], ids=["start", "middle", "end"])
def test_a_changed_byte_in_a_sample_shows(tmp_path, tensors, at):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, tensors)
    before = weights_fingerprint(tmp_path)
    changed = bytearray(tensors["a"])
    changed[at] ^= 1
    write_safetensors(file, {**tensors, "a": bytes(changed)})
    assert weights_fingerprint(tmp_path) != before


def test_names_shapes_and_missing_tensors_show(tmp_path, tensors):
    file = tmp_path / "model.safetensors"
    prints = set()
    for variant in (tensors, {**tensors, "e": b""}, {"z": tensors["a"]}, {"a": tensors["a"]}):
        write_safetensors(file, variant)
        prints.add(weights_fingerprint(file))
    assert len(prints) == 4


def test_a_second_copy_of_the_weights_is_not_read(tmp_path, tensors):
    write_safetensors(tmp_path / "model-1.safetensors", tensors)
    before = weights_fingerprint(tmp_path)
    write_safetensors(tmp_path / "consolidated.safetensors", {"other": b"layout"})
    assert weights_fingerprint(tmp_path) == before
    index = {"weight_map": {"other": "consolidated.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_fingerprint(tmp_path) != before


def test_other_formats_are_told_by_name_size_and_samples(tmp_path):
    file = tmp_path / "model.gguf"
    prints = set()
    for content in (b"a" * 9000, b"a" * 9001, b"a" * 4500 + b"b" * 4500):
        file.write_bytes(content)
        prints.add(weights_fingerprint(file))
        assert weights_fingerprint(file) == weights_fingerprint(tmp_path)
    assert len(prints) == 3


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"[1,2", struct.pack("<Q", 13) + b'{"a": "tensor"}'],
)
def test_a_malformed_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(Incompatible, match="not a safetensors file"):
        weights_fingerprint(tmp_path)


def test_no_weights_is_an_error_that_says_what_to_type(tmp_path):
    for missing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(Incompatible, match="weights_id"):
            weights_fingerprint(missing)
