"""Where back ends on GPUs put keys and values, as vLLM itself says it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kvstore_kernels.codec.places import Unplaced  # noqa: E402
from kvstore_vllm.packings import Packing, packings_of  # noqa: E402
from kvstore_vllm.side_by_side import places_side_by_side, shape_side_by_side  # noqa: E402
from tests.connectors.vllm.cpu_layers import import_vllm  # noqa: E402
from tests.connectors.vllm.device_layers import by_block  # noqa: E402
from tests.connectors.vllm.latent_layers import (  # noqa: E402
    RANK,
    ROW,
    latent_packing,
    latent_spec,
)

BLOCKS, HEADS, TOKENS, CHANNELS, LAYERS = 5, 3, 32, 48, 2


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_vllm()


def spec_of(kind: str = "FullAttentionSpec", **changes):
    from vllm.v1 import kv_cache_interface

    fields = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": CHANNELS}
    fields |= {"dtype": torch.bfloat16, **changes}
    return getattr(kv_cache_interface, kind)(**fields)


def engine_views(layout, kernel_tokens: int, spec=None) -> list[torch.Tensor]:
    """Return what vLLM registers for a layout, all of its values different."""
    from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides
    from vllm.v1.kv_cache_interface import create_kv_cache_views as views

    spec = spec or spec_of()
    nbytes = LAYERS * BLOCKS * spec.page_size_bytes
    raw = torch.arange(nbytes // 2, dtype=torch.int16).view(torch.int8)
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    tensor = KVCacheTensor(nbytes, ["a", "b"], layer_stride=strides[0], block_stride=strides[1])
    return views(raw, spec, BLOCKS, layout, tensor, kernel_tokens)


@pytest.mark.parametrize("kernel_tokens", [TOKENS, TOKENS // 2])
@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_places_are_where_a_back_end_writes(name, kernel_tokens) -> None:
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout
    try:
        registered = engine_views(layouts[name], kernel_tokens)
    except (ImportError, TypeError):
        pytest.skip("this vLLM makes its views in another way")
    except ValueError:
        assert kernel_tokens != TOKENS
        pytest.skip("vLLM does not split blocks of this layout")
    layers = [by_block(layer, BLOCKS) for layer in registered]
    packings = [Packing("FLASH_ATTN")] * LAYERS
    assert shape_side_by_side(layers, packings).raw_nbytes == (
        sum(layer[0].numel() for layer in layers) * 2
    )
    for layer, seen, places in zip(
        registered, layers, places_side_by_side(layers, packings), strict=True
    ):
        memory = layer.as_strided((layer.untyped_storage().nbytes() // 2,), (1,), 0)
        # As flash_attn.py has it: (B, H, N, 2 * D) -> ((B, N, H, D), (B, N, H, D)).
        sides = layer.transpose(1, 2).split(CHANNELS, dim=-1)
        for place, side in zip(places, sides, strict=True):
            axes = (place.tokens, place.heads, place.channels)
            at = [torch.tensor([axis.at(i) for i in range(axis.count)]) for axis in axes]
            where = at[0][:, None, None] + at[1][None, :, None] + at[2]
            for block in range(BLOCKS):
                begin = layer.storage_offset() + block * seen.stride(0) + place.first
                written = side.reshape(BLOCKS, TOKENS, HEADS, CHANNELS)[block]
                assert torch.equal(
                    memory[begin + where].view(torch.int16), written.view(torch.int16)
                )


@pytest.mark.parametrize("kernel_tokens", [TOKENS, TOKENS // 2])
@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_latents_are_where_a_back_end_reads_them(name, kernel_tokens) -> None:
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout
    try:
        registered = engine_views(layouts[name], kernel_tokens, latent_spec())
    except (ImportError, TypeError):
        pytest.skip("this vLLM makes its views in another way")
    except ValueError:
        assert kernel_tokens != TOKENS
        pytest.skip("vLLM does not split blocks of this layout")
    layers = [by_block(layer, BLOCKS) for layer in registered]
    packings = [latent_packing("FLASHMLA")] * LAYERS
    assert shape_side_by_side(layers, packings).raw_nbytes == LAYERS * TOKENS * ROW * 2
    for layer, places in zip(registered, places_side_by_side(layers, packings), strict=True):
        memory = layer.as_strided((layer.untyped_storage().nbytes() // 2,), (1,), 0)
        # As mla_attention.py binds it, and as triton_mla.py and flashattn_mla.py split it.
        rows = layer.squeeze(1)
        sides = rows[..., :RANK], rows[..., RANK:]
        assert [place.kind for place in places] == ["latent", "rope"]
        for place, side in zip(places, sides, strict=True):
            at = [
                torch.tensor([axis.at(i) for i in range(axis.count)])
                for axis in (place.tokens, place.channels)
            ]
            where = at[0][:, None] + at[1]
            of_block = layer.stride(0) * (TOKENS // kernel_tokens)
            for block in range(BLOCKS):
                begin = layer.storage_offset() + block * of_block + place.first
                expected = side.reshape(BLOCKS, TOKENS, -1)[block]
                assert torch.equal(
                    memory[begin + where].view(torch.int16), expected.view(torch.int16)
                )


def test_the_text_of_a_shape_stays_what_it_was() -> None:
    """It is a part of the namespace: another text, and an engine finds none of its blocks."""
    plain = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CHANNELS, dtype=torch.bfloat16)
    assert shape_side_by_side([plain], [Packing("FLASH_ATTN")]).text == (
        '["BF16",[[["K",3,32,48,[[3072],[96],[1]],0],["V",3,32,48,[[3072],[96],[1]],48]]]]'
    )
    latents = torch.zeros(BLOCKS, 1, TOKENS, ROW, dtype=torch.bfloat16)
    assert shape_side_by_side([latents], [latent_packing("TRITON_MLA")]).text == (
        '["BF16",[[["latent",1,32,512,[[0],[576],[1]],0],["rope",1,32,64,[[0],[576],[1]],512]]]]'
    )


def test_only_back_ends_that_were_read_and_plain_blocks_count() -> None:
    def module(name: str):
        return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name))

    specs = [
        spec_of(),
        spec_of("SlidingWindowSpec", sliding_window=64),
        spec_of(head_size_v=2 * CHANNELS),
        spec_of("MLAAttentionSpec", num_kv_heads=1),
        SimpleNamespace(kv_cache_specs={"4": spec_of(), "5": spec_of(head_size_v=16)}),
        spec_of(),
    ]
    names = [["0"], ["1"], ["2"], ["3"], ["4", "5"], ["6"]]
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=group)
            for spec, group in zip(specs, names, strict=True)
        ]
    )
    found = packings_of({str(i): module("FLASH_ATTN") for i in range(6)}, config.kv_cache_groups)
    told = [["FLASH_ATTN"], ["FLASH_ATTN"], [""], [""], ["FLASH_ATTN", ""], ["unknown"]]
    assert found == [[Packing(name) for name in group] for group in told]
    layer = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CHANNELS, dtype=torch.bfloat16)
    for backend in ("", "unknown", "FLASH_ATTN_DIFFKV", "TRITON_MLA"):
        with pytest.raises(Unplaced, match=f"back ends .'{backend}'. put"):
            shape_side_by_side([layer, layer], [Packing("FLASHINFER"), Packing(backend)])
