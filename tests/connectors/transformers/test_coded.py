"""Records that are coded: smaller, the same tokens, and never taken for another kind."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from kvstore import Client, ConfigError, Part, Span, checksum  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from kvstore_transformers import Prefixes  # noqa: E402
from kvstore_transformers.compat import in_forward  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
WINDOW = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}


def make(dtype: torch.dtype, *, windowed: bool = False):
    torch.manual_seed(1)
    shape = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 500}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    if windowed:
        model = Qwen2ForCausalLM(Qwen2Config(**shape, **heads, **WINDOW))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads))
    return model.to(dtype).eval()


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 499, (1, count), generator=torch.Generator().manual_seed(seed))


@dataclass
class Kept:
    tokens: torch.Tensor
    layers: list[torch.Tensor]


def restored(prefixes: Prefixes, prompt: torch.Tensor) -> Kept:
    cache = prefixes.load(prompt)
    layers = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    return Kept(torch.tensor(cache.restored_tokens), layers if cache.restored_blocks else [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "windowed"])
def test_what_comes_back_is_what_was_kept_bit_for_bit(dtype, windowed) -> None:
    model, prompt = make(dtype, windowed=windowed), ids(300)
    with Daemon() as daemon:
        target = daemon.start().target
        with Prefixes(model, target, block_tokens=16) as prefixes, torch.inference_mode():
            assert prefixes.wait_ready(30)
            cache = prefixes.load(prompt)
            model(input_ids=prompt, **in_forward(model, cache), use_cache=True)
            prefixes.save(cache, prompt)
            assert prefixes.flush()
            kept = restored(prefixes, prompt)
            assert kept.tokens == 288
            for layer, keys, values in zip(
                cache.layers, kept.layers[::2], kept.layers[1::2], strict=True
            ):
                for was, now in ((layer.keys, keys), (layer.values, values)):
                    begin = 288 - now.shape[2]
                    assert torch.equal(was[:, :, begin:288].contiguous(), now)


def used(client: Client) -> int:
    return int(sum(item.nbytes for item in client.admin.scan()))


def test_records_are_smaller() -> None:
    model, prompt = make(torch.bfloat16), ids(640)
    sizes = {}
    for record in ("raw", "l3", "auto"):
        with Daemon() as daemon, Prefixes(model, daemon.start().target, record=record) as prefixes:
            assert prefixes.wait_ready(30)
            prefixes.generate(prompt, max_new_tokens=1, do_sample=False)
            assert prefixes.flush()
            with Client(daemon.target) as client:
                sizes[record] = used(client)
    assert sizes["raw"] / sizes["l3"] > 1.2
    assert sizes["auto"] == sizes["l3"]


def test_records_that_are_no_smaller_are_stored_raw_and_counted() -> None:
    """Three blocks of random bits among four."""
    model, prompt = make(torch.bfloat16), ids(129)
    with (
        Daemon() as daemon,
        Client(daemon.start().target) as client,
        Prefixes(model, daemon.target) as prefixes,
    ):
        assert prefixes.wait_ready(30)
        cache = prefixes.load(prompt)
        with torch.inference_mode():
            model(input_ids=prompt, **in_forward(model, cache), use_cache=True)
            for layer in cache.layers:
                for part in (layer.keys, layer.values):
                    bits = torch.randint(-(1 << 15), 1 << 15, part[:, :, 32:128].shape)
                    part[:, :, 32:128] = bits.to(torch.int16).view(torch.bfloat16)
        for _ in range(2):  # what the daemon has is not counted again
            prefixes.save(cache, prompt)
            assert prefixes.flush()
            assert prefixes.saved_uncoded_blocks == 3 * len(prefixes._layout.groups)
        assert prefixes.saved_blocks == 4 * len(prefixes._layout.groups)
        assert used(client) > 3 * sum(prefixes._coding.record_nbytes)
        kept = prefixes.load(prompt)
        assert kept.restored_blocks == 4
        for was, now in zip(cache.layers, kept.layers, strict=True):
            assert torch.equal(was.keys[:, :, :128].view(torch.int16), now.keys.view(torch.int16))


def test_coded_and_raw_share_nothing() -> None:
    model, prompt = make(torch.bfloat16), ids(128)
    with Daemon() as daemon:
        target = daemon.start().target
        with Prefixes(model, target, record="raw") as raw:
            assert raw.wait_ready(30)
            raw.generate(prompt, max_new_tokens=1, do_sample=False)
            assert raw.flush()
        with Prefixes(model, target, record="l3") as coded:
            assert coded.wait_ready(30)
            assert coded.load(prompt).restored_blocks == 0


@pytest.mark.parametrize("off", ["native", "float16"])
def test_what_is_not_possible_is_told_by_name_and_passed_over_by_auto(off, monkeypatch) -> None:
    model = make(torch.float16 if off == "float16" else torch.bfloat16)
    if off == "native":
        monkeypatch.setattr(native, "_loaded", lambda: (None, "there is no library"))
    with Daemon() as daemon:
        target = daemon.start().target
        with pytest.raises(ConfigError, match="'l3' is not possible here"):
            Prefixes(model, target, record="l3")
        with Prefixes(model, target) as prefixes:
            assert prefixes.wait_ready(30)
            prompt = ids(100)
            prefixes.generate(prompt, max_new_tokens=1, do_sample=False)
            assert prefixes.flush()
            assert prefixes.load(prompt).restored_blocks == 3
    with pytest.raises(ConfigError, match="are known"):
        Prefixes(model, target, record="zip")  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [0, 12, 40, 70, 3000, -1], ids=str)
def test_a_changed_record_fails_its_load_and_is_dropped(at: int) -> None:
    model, prompt = make(torch.bfloat16), ids(300)
    with (
        Daemon() as daemon,
        Client(daemon.start().target) as client,
        Prefixes(model, daemon.target, block_tokens=16) as prefixes,
    ):
        assert prefixes.wait_ready(30)
        answer = prefixes.generate(prompt, max_new_tokens=8, do_sample=False)
        assert prefixes.flush()
        assert prefixes.load(prompt).restored_blocks == 18
        keys = prefixes._keys(prompt[0].tolist())
        client.register(prefixes._namespace)
        grant = client.acquire(prefixes._namespace_id, keys)
        record = client.view(grant.slots[5])
        record[at] ^= 1
        client.release(grant.lease_id)
        again = prefixes.generate(prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(answer, again)
        assert prefixes.loads_failed == 1
        assert prefixes.flush()
        until(lambda: prefixes.load(prompt).restored_blocks == 18)  # saved again


def test_a_record_of_another_form_is_no_record_whatever_its_checksum() -> None:
    """A writer that is wrong: its checksum is right, what it wrote is not of this shape."""
    model, prompt = make(torch.bfloat16), ids(64)
    with (
        Daemon() as daemon,
        Client(daemon.start().target) as client,
        Prefixes(model, daemon.target, block_tokens=16) as prefixes,
    ):
        assert prefixes.wait_ready(30)
        keys = prefixes._keys(prompt[0].tolist())[:3]
        namespace_id = client.register(prefixes._namespace)
        grant = client.reserve(
            namespace_id,
            keys,
            first_block=0,
            parent=None,
            spans=[Span(Part(0, 0), 0, 3)],
            sizes=[500, 64, 10],
        )
        for slot in grant.slots:
            client.view(slot)[:] = b"KVR1"[: len(client.view(slot))] + bytes(slot.nbytes - 4)
        sums = [checksum(client.view(slot)) for slot in grant.slots]
        assert client.commit(grant.lease_id, sums).committed == 3
        assert prefixes.load(prompt).restored_blocks == 0
        assert prefixes.loads_failed == 1
