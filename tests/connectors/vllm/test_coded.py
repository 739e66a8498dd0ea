"""Records that are coded, in the pages of vLLM's CPU back end and in a whole engine."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvstore import ConfigError, checksum  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from kvstore_kernels.codec.copies import Fine  # noqa: E402
from kvstore_kernels.codec.places import Unplaced  # noqa: E402
from kvstore_kernels.codec.record import Form, Header  # noqa: E402
from kvstore_vllm import coded, places  # noqa: E402
from kvstore_vllm.coded import CodedHostMemory  # noqa: E402
from kvstore_vllm.metadata import SaveOrder, SaveSpan, pieces  # noqa: E402
from kvstore_vllm.opening import open_pages  # noqa: E402
from kvstore_vllm.packings import Packing  # noqa: E402
from kvstore_vllm.pages import HostMemory  # noqa: E402
from tests.connectors.vllm.cpu_layers import BLOCKS, engine_layers, import_vllm  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_vllm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "head"), [(16, 64), (32, 128), (16, 80), (128, 64)])
def test_blocks_come_back_bit_for_bit_in_fewer_bytes(dtype, tokens, head) -> None:
    layers, packings = engine_layers(dtype, tokens, head)
    before = [layer.clone() for layer in layers]
    pages = open_pages([layers], BLOCKS, record="l3", packings=[packings])
    assert isinstance(pages, CodedHostMemory)
    blocks = [4, 0, 3]
    records = [memoryview(bytes(each.base)) for each in pages.encode(0, blocks, None)]
    assert {Header.parse(record).form for record in records} == {Form.L3}
    raw = open_pages([layers], BLOCKS).record_nbytes[0]
    share = sum(map(len, records)) / len(records) / raw
    assert share < (0.8 if dtype is torch.bfloat16 else 0.9)
    for layer in layers:
        layer.zero_()
    sums = pages.write(0, blocks, records, None)
    assert list(sums) == [checksum(record) for record in records]
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[blocks], was[blocks])
        assert not layer[[1, 2, 5]].any()


def test_what_is_no_record_has_no_checksum() -> None:
    layers, packings = engine_layers(torch.bfloat16, 16, 64)
    pages = open_pages([layers], BLOCKS, record="l3", packings=[packings])
    (record,) = pages.encode(0, [1], None)
    good, wrong = bytes(record.base), bytearray(record.base)
    wrong[4] = 9
    for bad in (bytes(wrong), good[:100], b"", good + bytes(1 << 20)):
        sums = pages.write(0, [2, 3], [memoryview(bad), memoryview(good)], None)
        assert list(sums) == [None, checksum(good)]


@pytest.mark.parametrize(
    ("why", "isa"), [("packed as ''", ""), ("cannot be found out", "no such set")]
)
def test_where_places_are_not_known_records_are_raw(why, isa, caplog) -> None:
    layers, _ = engine_layers(torch.bfloat16, 16, 64, count=1)
    packings = [[Packing(isa=isa)]]
    pages = open_pages([layers], BLOCKS, record="auto", packings=packings)
    assert type(pages) is HostMemory
    assert "record=raw" in caplog.text
    with pytest.raises(ConfigError, match=why):
        open_pages([layers], BLOCKS, record="l3", packings=packings)


def test_without_the_native_library_records_are_raw(monkeypatch, caplog) -> None:
    layers, packings = engine_layers(torch.bfloat16, 16, 64)
    monkeypatch.setattr(native, "_loaded", lambda: (None, "there is no library"))
    assert type(open_pages([layers], BLOCKS, record="auto", packings=[packings])) is HostMemory
    assert "there is no library" in caplog.text
    with pytest.raises(ConfigError, match="there is no library"):
        open_pages([layers], BLOCKS, record="l3", packings=[packings])


def lossy(layers, packings, **changes):
    return open_pages(
        [layers], BLOCKS, fidelity="ep", packings=[packings], **{"record": "auto", **changes}
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lossy_blocks_come_back_nearly_and_the_first_one_exactly(dtype) -> None:
    layers, packings = engine_layers(dtype, 16, 64)
    before = [layer.clone() for layer in layers]
    pages = lossy(layers, packings)
    assert pages.form.startswith("ep/1 K5V4+K3V4 ")
    blocks, (sizes,) = [4, 0, 3], pages.lossy
    encoded = [
        (bytes(each.base), each.fine and bytes(each.fine))
        for each in pages.encode(0, blocks, None, [True, False, False])
    ]
    assert encoded[0][1] is None
    assert len(encoded[0][0]) != sizes.base_nbytes
    assert {len(base) for base, _ in encoded[1:]} == {sizes.base_nbytes}
    assert {len(fine) for _, fine in encoded[1:]} == {sizes.fine_nbytes}
    errors = []
    for with_fine in (False, True):
        for layer in layers:
            layer.zero_()
        fines = [
            Fine(memoryview(fine), checksum(fine)) if with_fine and fine else None
            for _, fine in encoded
        ]
        found = pages.refine(0, blocks, [memoryview(base) for base, _ in encoded], fines, None)
        assert [each.base for each in found] == [checksum(base) for base, _ in encoded]
        assert [each.refined for each in found] == [None, *[with_fine or None] * 2]
        differences = [(now.float() - was.float()) for now, was in zip(layers, before, strict=True)]
        assert not any(each[4].any() for each in differences)
        errors.append(max(float(each[[0, 3]].square().mean().sqrt()) for each in differences))
    assert 0 < errors[1] < errors[0] / 3 < 0.1


def test_lossy_and_exact_pages_have_different_forms() -> None:
    layers, packings = engine_layers(torch.bfloat16, 16, 64)
    exact = open_pages([layers], BLOCKS, record="l3", packings=[packings])
    assert not exact.lossy
    assert exact.form.split()[-1] == lossy(layers, packings).form.split()[-1]  # of the same shape
    assert exact.form != lossy(layers, packings).form


def test_where_lossy_records_are_impossible_the_engine_does_not_start(monkeypatch) -> None:
    layers, packings = engine_layers(torch.bfloat16, 16, 64)
    do = '"fidelity": "exact"'
    with pytest.raises(ConfigError, match=f'"record" is "raw"; use {do}'):
        lossy(layers, packings, record="raw")
    with pytest.raises(ConfigError, match=f"packed as ''; use {do}"):
        lossy(layers, [Packing()] * len(layers))
    with pytest.raises(ConfigError, match=f"not bfloat16, float16 or float32; use {do}"):
        lossy([layer.to(torch.float8_e4m3fn) for layer in layers], packings)
    monkeypatch.setattr(native, "_loaded", lambda: (None, "there is no library"))
    with pytest.raises(ConfigError, match=f"there is no library; use {do}"):
        lossy(layers, packings)


def test_a_function_that_scatters_otherwise_is_noticed(monkeypatch) -> None:
    """Whatever the engine does with a block, a table of strides is only believed if it fits."""
    layers, packings = engine_layers(torch.bfloat16, 16, 64)
    written = places._written

    def shuffled(layer, packing, marks):
        keys, values = written(layer, packing, marks)
        keys[[3, 4]] = keys[[4, 3]]
        return [keys, values]

    monkeypatch.setattr(places, "_written", shuffled)
    with pytest.raises(Unplaced, match="table of strides"):
        coded.shape_of(layers, packings)


def test_an_order_is_cut_into_consecutive_ones() -> None:
    keys = tuple(bytes([i]) * 32 for i in range(10))
    order = SaveOrder(
        keys, 5, b"p" * 32, (SaveSpan(0, 0, tuple(range(10))), SaveSpan(1, 7, (70, 80, 90)))
    )
    cut = pieces(order, [100, 50], 450)
    assert [(each.first_block, len(each.keys)) for each in cut] == [
        (5, 3),
        (8, 3),
        (11, 3),
        (14, 1),
    ]
    assert [each.parent for each in cut] == [b"p" * 32, keys[2], keys[5], keys[8]]
    assert [[(s.group, s.begin, s.device_blocks) for s in each.spans] for each in cut] == [
        [(0, 0, (0, 1, 2))],
        [(0, 0, (3, 4, 5))],
        [(0, 0, (6, 7, 8)), (1, 1, (70, 80))],
        [(0, 0, (9,)), (1, 0, (90,))],
    ]
    assert pieces(order, [100, 50], 10_000) == [order]
    assert len(pieces(order, [100, 50], 1)) == 10
