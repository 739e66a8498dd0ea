"""Every byte of a model's tensors tells its KV, and nobody waits for them to be read."""

from __future__ import annotations

import logging
import random
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.model.errors import Incompatible  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore_transformers import Prefixes, fingerprint, prefixes  # noqa: E402
from kvstore_transformers.fingerprint import WeightsFingerprint, weights_of  # noqa: E402
from tests.connectors.transformers.test_connector import make_model  # noqa: E402


def found(weights: dict[str, torch.Tensor]) -> str:
    prints = WeightsFingerprint(weights)
    assert prints.wait(30)
    return prints.found


def test_one_byte_anywhere_in_any_tensor_shows(monkeypatch):
    monkeypatch.setattr(fingerprint, "CHUNK_NBYTES", 1024)
    model = make_model("llama")
    weights = weights_of(model)
    draw = random.Random(1)
    names = sorted(weights)
    seen = {found(weights)}
    for turn in range(300):
        name = names[turn % len(names)]
        whole = weights[name].detach().reshape(-1).clone()
        flat = whole.view(torch.uint8)
        flat[draw.randrange(len(flat))] ^= 1 << draw.randrange(8)
        seen.add(found({**weights, name: whole.view(weights[name].shape)}))
    assert len(seen) >= 295, "only the same bit drawn twice may look the same"


def test_rows_between_the_old_samples_show():
    before = {"embeddings": torch.zeros(1000, 512)}
    after = {"embeddings": torch.zeros(1000, 512)}
    after["embeddings"][100:300] = 1
    assert found(before) != found(after)


def test_names_shapes_and_dtypes_show():
    same = torch.arange(64, dtype=torch.int32)
    variants = [
        {"a": same},
        {"b": same},
        {"a": same.view(8, 8)},
        {"a": same.view(torch.float32)},
        {"a": same, "b": same},
    ]
    assert len({found(each) for each in variants}) == len(variants)


def test_what_is_not_in_memory_is_refused():
    model = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(Incompatible, match="weights_id"):
        weights_of(model)


def test_nobody_waits_for_the_weights_and_the_cache_takes_part_when_they_are_known(
    monkeypatch, caplog
):
    monkeypatch.setattr(prefixes, "KNOWN_SOON_S", 0.0)
    caplog.set_level(logging.INFO)
    gate = threading.Event()
    digest = WeightsFingerprint._digest

    def held(self, weight):
        gate.wait(30)
        return digest(self, weight)

    monkeypatch.setattr(WeightsFingerprint, "_digest", held)
    model = make_model("llama")
    prompt = torch.randint(4, 1000, (1, 200))  # no padding
    with Daemon("dram.capacity=64MiB", "dram.extent=64MiB") as daemon:
        daemon.start()
        with Prefixes(model, daemon.target) as opened:
            answer = opened.generate(prompt, max_new_tokens=4, do_sample=False)
            assert not opened.wait_ready(0)
            assert opened.flush()
            assert opened.saved_blocks == 0
            gate.set()
            assert opened.wait_ready(30)
            assert "weights=hashed" in caplog.text
            opened.generate(prompt, max_new_tokens=4, do_sample=False)
            assert opened.flush()
            cache = opened.load(prompt)
            assert cache.restored_tokens == 192
            assert torch.equal(opened.generate(prompt, max_new_tokens=4, do_sample=False), answer)


def test_closing_stops_what_reads_the_weights(monkeypatch):
    monkeypatch.setattr(fingerprint, "CHUNK_NBYTES", 1)
    prints = WeightsFingerprint({"a": torch.zeros(1 << 22)})
    prints.close()
    assert not any(thread.is_alive() for thread in prints._threads)
    assert prints.found == ""
