"""What a block's KV depends on beside its tokens is in its key by its bytes, or it has no key."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from kvstore.system import file_digests
from kvstore.testing.wait import until
from kvstore_vllm import adapters
from tests.connectors.vllm.scheduler_engine import BLOCK, Engine, keys_of, make_request, saved

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from safetensors.torch import save_file  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402

TABLES = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
names = map(str, count())


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch) -> Path:
    """Where digests are remembered, of files that have just been written too."""
    monkeypatch.setattr(file_digests, "SETTLED_S", -1)
    memory = tmp_path / "cache/digests.json"
    monkeypatch.setattr(adapters, "default_digest_memory", lambda: memory)
    return memory


@pytest.fixture
def folder(tmp_path) -> Path:
    """An adapter as PEFT writes it."""
    return write_adapter(tmp_path / "adapters/own")


def write_adapter(folder: Path, seed: int = 0, kind: str = "safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {
        name.format("A"): torch.randn(8, 128, generator=draw),
        name.format("B"): torch.randn(128, 8, generator=draw),
    }
    if kind == "safetensors":
        save_file(tensors, folder / "adapter_model.safetensors")
    else:
        torch.save(tensors, folder / f"adapter_model.{kind}")
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def lora(folder: Path | str, name: str = "own", number: int = 1, **fields) -> LoRARequest:
    return LoRARequest(name, number, str(folder), **fields)


def ask(engine: Engine, adapter: LoRARequest, **fields) -> bytes | None:
    """Hand in a request; return its first key, None if it passes by."""
    before = len(engine.client.asked)
    engine.side.on_new_request(make_request(22, next(names), lora_request=adapter, **fields))
    return engine.client.asked[-1].keys[0] if len(engine.client.asked) > before else None


def key_of(adapter: LoRARequest, engine: Engine | None = None, **options) -> bytes:
    """Return the key of a first block, asked for until the adapter is known."""
    engine = engine or Engine(**options)
    keys: list[bytes | None] = [None]
    until(lambda: keys.append(ask(engine, adapter)) or keys[-1])
    assert keys[-1] is not None
    return keys[-1]


def bypassed(engine: Engine, reason: str) -> float:
    totals = engine.side.counters.totals
    return totals[f"bypassed_{reason}"]


# ---- adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "bin", "pt"])
def test_one_byte_anywhere_makes_other_keys(tmp_path, kind):
    folder = write_adapter(tmp_path / "adapter", kind=kind)
    draw = random.Random(kind)
    files = sorted(folder.iterdir())
    unchanged = key_of(lora(folder))
    places = {
        (file, draw.randrange(file.stat().st_size), draw.randrange(8))
        for file in files
        for _ in range(60)
    }
    seen = {unchanged}
    for file, at, bit in places:
        content = bytearray(before := file.read_bytes())
        content[at] ^= 1 << bit
        file.write_bytes(content)
        seen.add(key_of(lora(folder)))
        file.write_bytes(before)
    assert len(seen) == 1 + len(places)
    assert key_of(lora(folder)) == unchanged


def test_an_adapter_retrained_to_the_same_path_is_another_for_the_next_engine(folder):
    first = key_of(lora(folder))
    write_adapter(folder, seed=1)
    assert key_of(lora(folder)) != first


def test_the_same_bytes_are_the_same_adapter_whatever_it_is_called(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "elsewhere/copy")
    link = tmp_path / "link"
    link.symlink_to(copy)
    keys = {key_of(lora(folder)), key_of(lora(copy, "b", 2)), key_of(lora(link, "c", 3))}
    assert len(keys) == 1
    assert keys != {keys_of(make_request(22))[0]}, "the model without an adapter has other KV"


def test_files_that_vllm_reads_first_count_and_those_of_training_do_not(folder):
    first = key_of(lora(folder))
    for name in ("optimizer.pt", "training_args.bin", "README.md"):
        (folder / name).write_bytes(b"anything")
    assert key_of(lora(folder)) == first
    (folder / "new_embeddings.safetensors").write_bytes(b"new tokens")
    assert key_of(lora(folder)) != first


def test_settings_that_decide_what_the_files_do_count(folder):
    keys = {
        key_of(lora(folder)),
        key_of(lora(folder, is_3d_lora_weight=True)),
        key_of(lora(folder), adapter_settings='{"target_modules": ["q_proj"]}'),
    }
    assert len(keys) == 3


def test_hashing_holds_up_nobody_and_an_engine_that_comes_later_knows_at_once(folder, monkeypatch):
    gate = threading.Event()
    hashed = file_digests._hashed

    def held(*args):
        gate.wait(30)
        return hashed(*args)

    monkeypatch.setattr(file_digests, "_hashed", held)
    engine = Engine()
    began = time.perf_counter()
    for _ in range(10):
        assert ask(engine, lora(folder)) is None
    assert time.perf_counter() - began < 5
    assert bypassed(engine, "unknown_adapter") == 10
    assert ask(engine, None) is not None, "requests without an adapter take part"
    gate.set()
    key = key_of(lora(folder), engine)
    monkeypatch.setattr(file_digests, "_hashed", None)  # whoever hashes fails
    assert ask(Engine(), lora(folder)) == key


def test_the_first_look_at_an_adapter_is_quick_however_much_is_remembered(tmp_path, memory):
    """It is the scheduler's: no request is computed meanwhile."""
    folders = [write_adapter(tmp_path / f"adapters/{seed}", seed) for seed in range(21)]
    draw = random.Random(0)
    stamps = [":".join(str(draw.randrange(10**18)) for _ in range(5)) for _ in range(4000)]
    memory.parent.mkdir(exist_ok=True)
    memory.write_text(json.dumps({stamp: f"{draw.getrandbits(256):064x}" for stamp in stamps}))
    memory.chmod(0o600)
    known = file_digests.FileDigests(memory)
    for folder in folders:
        known.digest(adapters._files(folder))
    engine = Engine()
    took_s = []
    for number, folder in enumerate(folders, 1):
        began = time.perf_counter()
        assert ask(engine, lora(folder, folder.name, number)) is not None, "it is remembered"
        took_s.append(time.perf_counter() - began)
    assert sorted(took_s)[len(took_s) // 2] < 0.005


def test_few_adapters_wait_and_all_get_their_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "QUEUE_MAX", 2)
    folders = [write_adapter(tmp_path / str(seed), seed) for seed in range(6)]
    gate = threading.Event()
    digest = file_digests.FileDigests.digest
    monkeypatch.setattr(
        file_digests.FileDigests, "digest", lambda *args: gate.wait(30) and digest(*args)
    )
    engine = Engine()
    requests = [lora(path, path.name, int(path.name) + 1) for path in folders]
    for each in requests:
        assert ask(engine, each) is None
    assert len(engine.side._adapters._queue) <= 2
    gate.set()
    assert len({key_of(each, engine) for each in requests}) == 6


def retrain(folder: Path) -> None:
    write_adapter(folder, seed=1)


def retrain_and_keep_the_times(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    before = file.stat()
    write_adapter(folder, seed=1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(folder: Path) -> None:
    """By files that are older than the engine."""
    folder.rename(folder.with_name("old"))
    folder.with_name("other").rename(folder)


def add_what_goes_first(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


CHANGES = [retrain, retrain_and_keep_the_times, replace, add_what_goes_first]


@pytest.mark.parametrize("change", CHANGES)
def test_an_adapter_that_changes_under_a_running_engine_passes_by(folder, change, caplog):
    write_adapter(folder.with_name("other"), seed=1)
    time.sleep(0.05)
    engine = Engine()
    old = key_of(lora(folder), engine)
    time.sleep(0.05)
    change(folder)
    for _ in range(3):
        assert ask(engine, lora(folder)) is None
    assert bypassed(engine, "changed_adapter") == 3
    assert caplog.text.count("restart the engine") == 1
    if change is not add_what_goes_first:
        new = key_of(lora(folder), Engine() if change is not replace else None)
        assert new != old


@pytest.mark.parametrize("change", CHANGES)
def test_an_adapter_that_changed_before_its_first_request_passes_by(folder, change):
    """vLLM may have loaded it when it was registered, which nobody tells the connector."""
    write_adapter(folder.with_name("other"), seed=1)
    time.sleep(0.05)
    engine = Engine()
    time.sleep(0.05)
    change(folder)
    assert ask(engine, lora(folder)) is None
    assert bypassed(engine, "changed_adapter") == 1


def test_a_link_that_points_elsewhere_since_the_engine_began_is_a_change(folder, tmp_path):
    other = write_adapter(tmp_path / "other", seed=1)
    link = tmp_path / "current"
    link.symlink_to(folder.parent)
    (other.parent / "next").mkdir()
    other.rename(other.parent / "next/own")
    time.sleep(0.05)
    engine = Engine()
    time.sleep(0.05)
    link.unlink()
    link.symlink_to(other.parent / "next")
    assert ask(engine, lora(link / "own")) is None
    assert bypassed(engine, "changed_adapter") == 1


def test_an_adapter_that_changes_while_it_is_hashed_passes_by(folder, monkeypatch):
    digest = file_digests.FileDigests.digest

    def changed(self, files):
        found = digest(self, files)
        write_adapter(folder, seed=1)
        return found

    monkeypatch.setattr(file_digests.FileDigests, "digest", changed)
    time.sleep(0.05)
    engine = Engine()
    until(lambda: ask(engine, lora(folder)) or bypassed(engine, "changed_adapter"))
    assert ask(engine, lora(folder)) is None
    assert not engine.client.asked


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_what_was_computed_after_an_adapter_changed_is_not_saved(folder, change):
    """vLLM may have read the files anew for this very step."""
    write_adapter(folder.with_name("other"), seed=1)
    time.sleep(0.05)
    engine = Engine()
    key_of(lora(folder), engine)
    request = make_request(22, "computed", lora_request=lora(folder))
    engine.side.on_new_request(request)
    engine.admit(request, TABLES)
    engine.step(new=[(request, TABLES, 22)])
    time.sleep(0.05)
    if change is not None:
        change(folder)
    meta = engine.step(cached=[(request, None, 1)])
    assert bool(saved(meta)) == (change is None)
    dropped = engine.side.counters.totals["saves_dropped_changed_adapter"]
    assert bool(dropped) == (change is not None)


@pytest.mark.parametrize(
    ("name", "number", "fields"),
    [
        ("own", 2, {"lora_path": "other"}),
        ("new", 1, {"lora_path": "other"}),
        ("own", 1, {"lora_path": "other"}),
        ("own", 1, {"load_inplace": True}),
        ("own", 1, {"is_3d_lora_weight": True}),
    ],
    ids=["name", "number", "both", "in place", "read otherwise"],
)
def test_a_name_or_number_that_stands_for_two_passes_by(folder, name, number, fields):
    """vLLM keys its own blocks by the name, and holds weights by the number."""
    third = write_adapter(folder.with_name("third"), seed=2)
    other = write_adapter(folder.with_name("other"), seed=1)
    if "lora_path" in fields:
        fields = {"lora_path": str(other)}
    engine = Engine()
    key_of(lora(folder), engine)
    second = LoRARequest(**{"lora_path": str(folder), **fields}, lora_name=name, lora_int_id=number)
    for each in (second, lora(folder)):
        assert ask(engine, each) is None
    assert bypassed(engine, "changed_adapter") == 2
    assert key_of(lora(third, "third", 3), engine), "others take part"


def test_requests_that_pass_by_for_another_reason_put_an_adapter_in_doubt_too(folder):
    other = write_adapter(folder.with_name("other"), seed=1)
    engine = Engine()
    key_of(lora(folder), engine)
    assert ask(engine, lora(other), prompt_embeds=object()) is None
    assert ask(engine, lora(folder)) is None


def test_the_same_adapter_registered_again_under_another_number_takes_part(folder):
    engine = Engine()
    assert key_of(lora(folder), engine) == key_of(lora(folder, number=2), engine)


def no_folder(folder: Path) -> str:
    return str(folder / "nowhere")


def name_of_the_hub(folder: Path) -> str:
    return "someone/adapter"


def home_of_nobody(folder: Path) -> str:
    return "~no-such-user/adapter"


def no_config(folder: Path) -> str:
    (folder / "adapter_config.json").unlink()
    return str(folder)


def full(folder: Path) -> str:
    for number in range(adapters.FILES_MAX):
        (folder / f"{number}.json").write_text("{}")
    return str(folder)


def circle(folder: Path) -> str:
    (folder / "adapter_model.bin").symlink_to("adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_config.json").unlink()
    return str(folder)


@pytest.mark.parametrize(
    "break_it", [no_folder, name_of_the_hub, home_of_nobody, no_config, full, circle]
)
def test_an_adapter_that_cannot_be_read_passes_by(folder, break_it, caplog):
    path = break_it(folder)
    engine = Engine()
    for _ in range(3):
        assert ask(engine, lora(path)) is None
    assert bypassed(engine, "unreadable_adapter") == 3
    assert caplog.text.count("cache=off") == 1


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read_pass_by(folder):
    (folder / "adapter_model.safetensors").chmod(0)
    engine = Engine()
    until(lambda: ask(engine, lora(folder)) or bypassed(engine, "unreadable_adapter"))
    assert not engine.client.asked


def test_so_many_adapters_are_told_apart_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "ADAPTERS_MAX", 2)
    folders = [write_adapter(tmp_path / str(seed), seed) for seed in range(3)]
    engine = Engine()
    for number, each in enumerate(folders[:2], 1):
        assert key_of(lora(each, each.name, number), engine)
    until(lambda: ask(engine, lora(folders[2], "2", 3)) or bypassed(engine, "unknown_adapter") > 9)
    assert ask(engine, lora(folders[2], "2", 3)) is None
    assert ask(engine, lora(folders[0], "0", 1)) is not None


# ---- images, sound and video ---------------------------------------------------------------------


def image(identifier: str, offset: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=4)
    return MultiModalFeatureSpec(None, "image", identifier, place, mm_hash=identifier)


@pytest.mark.parametrize("identifier", ["my-cat", "0" * 64], ids=["name", "like a hash"])
def test_blocks_that_an_image_reaches_have_no_key_whatever_it_is_called(identifier):
    """Two images under one name would be one: a caller may choose it, and the tokens are equal."""
    engine = Engine()
    engine.client.hit_blocks = 5
    images = [image(identifier, 17), image(identifier, 9)]
    request = make_request(22, mm_features=images)
    engine.side.on_new_request(request)
    before = 9 // BLOCK
    assert engine.client.asked[-1].keys == keys_of(make_request(22))[:before]
    assert engine.side.num_new_matched_tokens(request, 0) == (before * BLOCK, True)
    assert bypassed(engine, "multimodal") == 1


def test_only_blocks_before_an_image_are_saved():
    engine = Engine()
    request = make_request(22, mm_features=[image("cat", 9)])
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 0)
    engine.admit(request, TABLES)
    engine.step(new=[(request, TABLES, 22)])
    stored = saved(engine.step(cached=[(request, None, 1)]))
    assert stored == {(0, 0): 1, (0, 1): 2, (1, 0): 7, (1, 1): 8}
    engine.side.request_finished(request)
    assert saved(engine.step()) == {}
    assert not engine.side._ran


def test_a_prompt_that_begins_with_an_image_passes_by():
    engine = Engine()
    engine.client.hit_blocks = 5
    request = make_request(22, mm_features=[image("cat", 1)])
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    engine.admit(request, TABLES)
    engine.step(new=[(request, TABLES, 22)])
    assert saved(engine.step(cached=[(request, None, 1)])) == {}
    assert engine.client.asked == []
    assert bypassed(engine, "multimodal") == 1
