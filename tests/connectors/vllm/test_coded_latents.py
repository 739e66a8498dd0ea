"""Coded records of latent attention: of vLLM's back ends for the CPU, and the same on a GPU.

The kernels for the device run on the processor here.
"""

from __future__ import annotations

import ast
import importlib.util
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore import ConfigError, checksum  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from kvstore_kernels.codec import reference  # noqa: E402
from kvstore_kernels.codec.copies import Fine  # noqa: E402
from kvstore_kernels.codec.record import Form, Header  # noqa: E402
from kvstore_vllm.coded import CodedHostMemory  # noqa: E402
from kvstore_vllm.coded_device import CodedDeviceMemory, open_device_memory  # noqa: E402
from kvstore_vllm.opening import open_pages  # noqa: E402
from kvstore_vllm.packings import Latent, Packing  # noqa: E402
from kvstore_vllm.pages import DeviceMemory, HostMemory  # noqa: E402
from kvstore_vllm.side_by_side import LATENT_BACKENDS, shape_side_by_side  # noqa: E402
from tests.connectors.vllm.cpu_layers import engine_layers, import_vllm  # noqa: E402
from tests.connectors.vllm.device_layers import LAYOUTS, late_pages, on_host  # noqa: E402
from tests.connectors.vllm.latent_layers import (  # noqa: E402
    RANK,
    ROTARY,
    ROW,
    in_layout,
    latent_layers,
    latent_module,
    latent_packing,
    latent_spec,
    packing_of,
)
from tests.kernels.codec.test_forms import SPECIAL  # noqa: E402
from tests.kernels.late_device import LateDevice  # noqa: E402

BLOCKS = 6

pytestmark = pytest.mark.skipif(bool(native.reason()), reason=native.reason())


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_vllm()
    pytest.importorskip("vllm.v1.attention.backends.mla.amx_mla")


def opened(layers, packings, **how) -> CodedHostMemory:
    pages = open_pages([layers], BLOCKS, packings=[packings], **{"record": "auto", **how})
    assert isinstance(pages, CodedHostMemory)
    return pages


def bits(layer: torch.Tensor) -> torch.Tensor:
    return layer.view(torch.int16 if layer.element_size() == 2 else torch.int32)


def test_a_place_is_where_the_back_end_writes_it() -> None:
    layers, packings = latent_layers("AMX_MLA", torch.bfloat16, 32)
    (shape,) = opened(layers, packings).shapes
    rows = f'[["latent",1,32,{RANK},[[0],[{ROW}],[1]],0],["rope",1,32,{ROTARY},[[0],[{ROW}],[1]],'
    assert shape.text == f'["BF16",[{",".join([rows + f"{RANK}]]"] * 3)}]]'
    assert [int(kind) for kind in shape.tiles["kind"]] == [1, 0] * 3


@pytest.mark.parametrize(
    ("backend", "dtype", "tokens", "share"),
    [
        ("AMX_MLA", torch.bfloat16, 32, 0.74),
        ("AMX_MLA", torch.bfloat16, 128, 0.72),
        ("CPU_MLA", torch.bfloat16, 16, 0.76),
        ("CPU_MLA", torch.float32, 16, 0.88),
    ],
)
def test_blocks_come_back_bit_for_bit_in_fewer_bytes(backend, dtype, tokens, share) -> None:
    layers, packings = latent_layers(backend, dtype, tokens)
    before = [layer.clone() for layer in layers]
    pages = opened(layers, packings, record="l3")
    blocks = [4, 0, 3]
    records = [memoryview(bytes(each.base)) for each in pages.encode(0, blocks, None)]
    assert {Header.parse(record).form for record in records} == {Form.L3}
    assert sum(map(len, records)) < share * len(blocks) * pages.raw_nbytes[0]
    for layer in layers:
        layer.zero_()
    assert list(pages.write(0, blocks, records, None)) == [checksum(each) for each in records]
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[blocks], was[blocks])
        assert not layer[[1, 2, 5]].any()


@pytest.mark.parametrize("fidelity", ["exact", "ep"])
@pytest.mark.parametrize("name", ["any bits", "denormals", "one NaN", "one infinity"])
def test_whatever_the_bits_a_record_is_the_same_on_a_device(name, fidelity, codec_library) -> None:
    layers, packings = latent_layers("AMX_MLA", torch.bfloat16, 32, count=2)
    for layer in layers:
        if name in SPECIAL:
            values = SPECIAL[name](layer[1].numel()).astype(np.int16, casting="unsafe")
            bits(layer)[1] = torch.from_numpy(values).view_as(layer[1])
    if name not in SPECIAL:
        layers[1][1, 0, 7, RANK + 5] = float(name.removeprefix("one ").removesuffix("inity"))
    before = [bits(layer).clone() for layer in layers]
    pages = opened(layers, packings, record="auto", fidelity=fidelity)
    (made,) = pages.encode(0, [1], None, [False] if pages.lossy else ())
    record, fine = bytes(made.base), bytes(made.fine or b"")
    there = in_layout("BLHNC", layers)
    known = [[latent_packing("FLASHMLA")] * 2]
    device = late_pages([there], codec_library, LateDevice(3), fidelity=fidelity, packings=known)
    assert stored_by(device, [1], [False] if pages.lossy else ()) == [(record, fine)]
    assert device.form == pages.form
    if fine:
        device.close()
        assert name == "denormals"
        return
    for kept in (layers, there):
        for layer in kept:
            bits(layer)[1] = 7
    assert list(pages.write(0, [1], [memoryview(record)], None)) == [checksum(record)]
    assert list(device.write(0, [1], [memoryview(bytearray(record))], device.mark())) == [
        checksum(record)
    ]
    device.close()
    for layer, other, was in zip(layers, there, before, strict=True):
        assert torch.equal(bits(layer), was)
        assert torch.equal(bits(other.contiguous()), was)


def stored_by(pages: CodedDeviceMemory, blocks, exact=()) -> list[tuple[bytes, bytes]]:
    """Return the base and fine parts of blocks, as they come from the device."""
    made = pages.encode(0, blocks, pages.mark(), exact)
    parts = [part for each in made for part in (each.base, each.fine) if part is not None]
    views = [memoryview(bytearray(part.nbytes)) for part in parts]
    pages.store(0, list(zip(parts, views, strict=True)))
    left = iter(views)
    return [(bytes(next(left)), bytes(next(left)) if each.fine else b"") for each in made]


@pytest.mark.parametrize("fidelity", ["exact", "ep"])
@pytest.mark.parametrize(
    ("layout", "backend"), list(zip(LAYOUTS, cycle(sorted(LATENT_BACKENDS)), strict=False))
)
def test_records_of_a_device_are_those_of_a_processor(
    layout, backend, fidelity, codec_library
) -> None:
    layers, packings = latent_layers("AMX_MLA", torch.bfloat16, 32, count=2)
    pages = opened(layers, packings, fidelity=fidelity)
    blocks, exact = [4, 0, 3], [True, False, False] if pages.lossy else ()
    right = [
        (bytes(each.base), bytes(each.fine or b"")) for each in pages.encode(0, blocks, None, exact)
    ]
    there = [layer_by_block(each) for each in in_layout(layout, layers)]
    known = [[latent_packing(backend)] * 2]
    device = late_pages([there], codec_library, LateDevice(5), fidelity=fidelity, packings=known)
    assert stored_by(device, blocks, exact) == right
    targets = [1, 2, 5]
    bases = [memoryview(bytearray(base)) for base, _ in right]
    fines = [
        Fine(memoryview(bytearray(fine)), checksum(fine)) if fine else None for _, fine in right
    ]
    if pages.lossy:
        found = device.refine(0, targets, bases, fines, device.mark())
        assert [each.refined for each in found] == [None, True, True]
        pages.refine(0, targets, bases, fines, None)
    else:
        assert None not in device.write(0, targets, bases, device.mark())
        pages.write(0, targets, bases, None)
    device.close()
    for mine, theirs in zip(there, layers, strict=True):
        assert torch.equal(mine.reshape(theirs.shape), theirs)


def layer_by_block(layer: torch.Tensor) -> torch.Tensor:
    from kvstore_vllm.pages import by_block

    return by_block(layer, BLOCKS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lossy_blocks_are_as_near_as_their_steps_and_the_first_one_is_exact(dtype) -> None:
    backend, tokens = ("AMX_MLA", 32) if dtype is torch.bfloat16 else ("CPU_MLA", 16)
    layers, packings = latent_layers(backend, dtype, tokens)
    before = [layer.clone() for layer in layers]
    pages = opened(layers, packings, fidelity="ep")
    assert pages.form.startswith("ep/1 K5V4+K3V4 ")
    (sizes,) = pages.lossy
    blocks = [4, 0, 3]
    encoded = [
        (memoryview(bytes(each.base)), each.fine and memoryview(bytes(each.fine)))
        for each in pages.encode(0, blocks, None, [True, False, False])
    ]
    assert encoded[0][1] is None
    assert {len(base) for base, _ in encoded[1:]} == {sizes.base_nbytes}
    assert sizes.base_nbytes < 0.4 * pages.raw_nbytes[0]
    assert {len(fine) for _, fine in encoded[1:]} == {sizes.fine_nbytes}
    for planes in ((5, 4), (8, 8)):
        for layer in layers:
            layer.zero_()
        fines = [
            Fine(fine, checksum(fine)) if fine and planes == (8, 8) else None for _, fine in encoded
        ]
        pages.refine(0, blocks, [base for base, _ in encoded], fines, None)
        for layer, was in zip(layers, before, strict=True):
            assert torch.equal(layer[4], was[4])
            for block in (0, 3):
                near_enough(layer[block, 0], was[block, 0], planes)


def near_enough(now: torch.Tensor, was: torch.Tensor, planes: tuple[int, int]) -> None:
    """The rotary part is near by the range of a channel; the latent, rotated, by that of a token.

    Beside that, values are rounded to their dtype, and a step to 3 bits of mantissa.
    """
    rotary = [each[:, RANK:].float().numpy() for each in (now, was)]
    latents = [
        reference._rotate(each[:, :RANK].float().numpy() * reference._signs(RANK))
        for each in (now, was)
    ]
    rounding = 2.0**-8 * np.linalg.norm(was.float().numpy(), axis=1, keepdims=True)
    for (mine, theirs), axis, kept in ((rotary, 0, planes[0]), (latents, 1, planes[1])):
        low, high = (limit(theirs, axis=axis, keepdims=True) for limit in (np.min, np.max))
        step = 1.13 * (high - low + 2.0**-9 * np.abs(low)) / 255
        error = np.abs(mine - theirs)
        assert (error <= step * 2 ** (8 - kept) / 2 + rounding).all()
        assert error.max() > 0


def moved(latents, rotated, cache, slots) -> None:
    """An engine that writes every token one slot further, and the last one first."""
    cache.flatten(0, 1)[slots.roll(-1)] = torch.cat([latents, rotated[:, 0]], dim=-1)


def crossed(latents, rotated, cache, slots) -> None:
    """An engine that crosses the latents of tokens 3 and 4, and nothing else."""
    latents = latents.clone()
    latents[[3, 4]] = latents[[4, 3]]
    cache.flatten(0, 1)[slots] = torch.cat([latents, rotated[:, 0]], dim=-1)


def turned(latents, rotated, cache, slots) -> None:
    """An engine that has the rotary part first."""
    cache.flatten(0, 1)[slots] = torch.cat([rotated[:, 0], latents], dim=-1)


def test_where_the_engine_writes_otherwise_places_are_there() -> None:
    layers, _ = latent_layers("AMX_MLA", torch.bfloat16, 32)
    (shape,) = opened(layers, [Packing("", "", Latent(RANK, ROTARY, turned))] * 3).shapes
    assert shape.text.startswith(f'["BF16",[[["latent",1,32,{RANK},[[0],[{ROW}],[1]],{ROTARY}]')


NOT_LATENTS = {
    "too few": ({"kv_lora_rank": 448}, "are not what 1 heads of 576 channels hold"),
    "too many": ({"qk_rope_head_dim": 128}, "are not what 1 heads of 576 channels hold"),
    "none": ({"kv_lora_rank": 0, "qk_rope_head_dim": ROW}, "are not what 1 heads of 576"),
    "no multiple of 16": (
        {"kv_lora_rank": 568, "qk_rope_head_dim": 8},
        "channels: a multiple of 16",
    ),
}


@pytest.mark.parametrize("name", NOT_LATENTS)
def test_what_is_not_known_is_stored_raw(name, codec_library, caplog) -> None:
    change, why = NOT_LATENTS[name]
    layers, _ = latent_layers("AMX_MLA", torch.bfloat16, 32, count=1)
    packings = [[latent_packing("AMX_MLA", **change)]]
    assert type(open_pages([layers], BLOCKS, record="auto", packings=packings)) is HostMemory
    assert caplog.text.count("record=raw reason=") == len(caplog.records) == 1
    for wanted in ({"record": "l3"}, {"record": "auto", "fidelity": "ep"}):
        with pytest.raises(ConfigError, match=why):
            open_pages([layers], BLOCKS, packings=packings, **wanted)
    caplog.clear()
    packings = [[latent_packing("FLASHMLA", **change)]]
    how = {"opened": on_host(codec_library), "device": LateDevice(0)}
    pages = open_device_memory([layers], packings, dict, "auto", **how)
    assert type(pages) is DeviceMemory
    pages.close()
    assert caplog.text.count("record=raw reason=") == len(caplog.records) == 1
    for wanted in (("l3", "exact"), ("auto", "ep")):
        with pytest.raises(ConfigError, match=why):
            open_device_memory([layers], packings, dict, *wanted, **how)


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (moved, "a run of tokens"),
        (crossed, "table of strides"),
        (lambda *_: None, "0 of 16384 values were found again"),
        (None, "cannot be found out"),
    ],
)
def test_an_engine_that_scatters_its_tokens_is_noticed(write, why) -> None:
    layers, _ = latent_layers("AMX_MLA", torch.bfloat16, 32, count=1)
    packings = [[Packing("AMX_MLA", latent=Latent(RANK, ROTARY, write))]]
    with pytest.raises(ConfigError, match=why):
        open_pages([layers], BLOCKS, record="l3", packings=packings)


def test_raw_is_raw(caplog) -> None:
    layers, packings = latent_layers("AMX_MLA", torch.bfloat16, 32)
    pages = open_pages([layers], BLOCKS, record="raw", packings=[packings])
    assert type(pages) is HostMemory
    assert pages.form == ""
    assert not caplog.text


def test_without_rotary_parts_a_layer_has_latents_alone() -> None:
    layers = [torch.zeros(BLOCKS, 1, 32, RANK, dtype=torch.bfloat16)]
    shape = shape_side_by_side(layers, [latent_packing("TRITON_MLA", qk_rope_head_dim=0)])
    assert shape.text == f'["BF16",[[["latent",1,32,{RANK},[[0],[{RANK}],[1]],0]]]]'
    packings = [[latent_packing("AMX_MLA", qk_rope_head_dim=0)]]
    with pytest.raises(ConfigError, match="with rotary parts of 0 channels"):
        open_pages([layers], BLOCKS, record="l3", packings=packings)


def test_kernel_blocks_on_a_processor_are_not_known() -> None:
    layers, packings = latent_layers("AMX_MLA", torch.bfloat16, 32, count=1)
    halves = [layer.reshape(2 * BLOCKS, 1, 16, ROW) for layer in layers]
    with pytest.raises(ConfigError, match=r"shape \(6, 1, 2, 16, 576\) with rotary parts of 64"):
        open_pages([halves], BLOCKS, record="l3", packings=[packings])


@pytest.mark.parametrize("backend", ["FLASHMLA_SPARSE", "FLASH_ATTN", "AMX_MLA", "TOKENSPEED_MLA"])
def test_other_back_ends_on_a_gpu_are_not_known(backend, codec_library) -> None:
    layers, _ = latent_layers("AMX_MLA", torch.bfloat16, 64, count=1)
    how = {"opened": on_host(codec_library), "device": LateDevice(0)}
    with pytest.raises(ConfigError, match=f"back ends .'{backend}'. put"):
        open_device_memory([layers], [[latent_packing(backend)]], dict, "l3", **how)


def test_what_is_packed_or_of_no_latent_attention_is_not_known() -> None:
    module = latent_module("FLASHMLA")
    assert packing_of(module).latent == Latent(RANK, ROTARY, moved)
    packed = latent_spec(state_content_bytes=656, cache_dtype_str="fp8_ds_mla", dtype=torch.uint8)
    assert packing_of(module, packed) == Packing()
    del module.kv_lora_rank  # as of the cache of a sparse indexer
    assert packing_of(module, latent_spec(head_size=132, dtype=torch.uint8)) == Packing()


@pytest.mark.parametrize("name", sorted(LATENT_BACKENDS))
def test_back_ends_that_were_read_write_as_all_do(name) -> None:
    """Read, because not all can be imported without a GPU."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Known

    module, _, backend = Known[name].get_path().rpartition(".")
    spec = importlib.util.find_spec(module)
    source = Path(str(spec and spec.origin)).read_text()
    bases = {
        node.name: [ast.unparse(base).partition("[")[0] for base in node.bases]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    assert bases[backend] == ["MLACommonBackend"]
    assert bases[backend.replace("Backend", "Impl")] == ["MLACommonImpl"]
    assert f'return "{name}"' in source
    assert "def do_kv_cache_update" not in source


@pytest.mark.parametrize("fidelity", ["exact", "ep"])
def test_a_draft_with_keys_and_values_is_beside_latents(fidelity, codec_library) -> None:
    """In a group of its own, and in the same."""
    latents, of_latents = latent_layers("AMX_MLA", torch.bfloat16, 32, count=2)
    plain, of_plain = engine_layers(torch.bfloat16, 32, 64, count=1)
    groups = [latents, plain, [*latents, *plain]]
    packings = [of_latents, of_plain, [*of_latents, *of_plain]]
    pages = open_pages(groups, BLOCKS, record="auto", fidelity=fidelity, packings=packings)
    assert isinstance(pages, CodedHostMemory)
    assert len(pages.form.split()) == (4 if fidelity == "exact" else 5)
    for group, layers in enumerate(groups):
        before = [layer.clone() for layer in layers]
        made = pages.encode(group, [2, 3], None, [True, True] if pages.lossy else ())
        records = [memoryview(bytes(each.base)) for each in made]
        assert sum(map(len, records)) < 0.78 * 2 * pages.raw_nbytes[group]
        for layer in layers:
            layer.zero_()
        if pages.lossy:
            pages.refine(group, [2, 3], records, [None, None], None)
        else:
            pages.write(group, [2, 3], records, None)
        for layer, was in zip(layers, before, strict=True):
            assert torch.equal(layer[[2, 3]], was[[2, 3]])
            layer.copy_(was)
    wrong = [of_latents, of_plain, [*of_latents, Packing()]]
    assert type(open_pages(groups, BLOCKS, record="auto", packings=wrong)) is HostMemory

    there = [in_layout("LBHNC", latents), in_layout("LBNHC", plain)]
    known = [[latent_packing("FLASHMLA")] * 2, [Packing("FLASH_ATTN")]]
    device = late_pages(there, codec_library, LateDevice(1), fidelity=fidelity, packings=known)
    assert device.form.split()[-2] == pages.form.split()[-3]
    device.close()


def test_the_form_of_records_is_that_of_latents() -> None:
    """Else a namespace would be one of keys and values that are as large."""
    layers, packings = latent_layers("AMX_MLA", torch.bfloat16, 32)
    plain, of_plain = engine_layers(torch.bfloat16, 32, 64)
    exact, lossy = opened(layers, packings), opened(layers, packings, fidelity="ep")
    others = [exact.form, lossy.form, opened(plain, of_plain).form]
    others += [opened(layers[:2], packings[:2]).form]
    assert len(set(others)) == len(others)
    assert exact.form.startswith("l3/1 ")
    assert exact.form.split()[-1] == lossy.form.split()[-1]
