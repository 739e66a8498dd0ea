"""Packed records equal the plain reference, whatever the layout, dtype and shape."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvstore_kernels.host import HostPages  # noqa: E402
from kvstore_kernels.paged import gather_blocks, record_nbytes, scatter_blocks  # noqa: E402
from kvstore_kernels.reference import gather_reference, scatter_reference  # noqa: E402

LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BHLNC", "LHBNC", "BLNHC"]
SHAPES = [  # layers, blocks, heads, slots, content
    (3, 7, 2, 16, 64),
    (1, 1, 1, 1, 1),
    (5, 11, 3, 7, 5),
    (2, 4, 1, 32, 576),
]
DTYPES = [torch.bfloat16, torch.float32, torch.uint8]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_layers(layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"):
    """Return the layers as (B, H, N, C) views of one random allocation laid out as `layout`."""
    sizes = dict(zip("LBHNC", shape, strict=True))
    itemsize = dtype.itemsize
    count = torch.Size(shape).numel() * itemsize
    generator = torch.Generator().manual_seed(sum(map(ord, layout)) + count)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    physical = raw.to(device).view(dtype).view([sizes[axis] for axis in layout])
    logical = physical.permute([layout.index(axis) for axis in "LBHNC"])
    return list(logical.unbind(0))


def some_blocks(num_blocks: int) -> list[int]:
    return list(range(num_blocks))[::-2]


def same_bytes(left, right) -> bool:
    """NaNs included."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_equals_the_reference(layout, shape, dtype, device):
    layers = make_layers(layout, shape, dtype, device)
    blocks = some_blocks(shape[1])
    records = torch.zeros(len(blocks), record_nbytes(layers), dtype=torch.uint8, device=device)
    gather_blocks(layers, blocks, records)
    assert torch.equal(records, gather_reference(layers, blocks))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scatter_equals_the_reference_and_touches_nothing_else(layout, shape, dtype, device):
    layers = make_layers(layout, shape, dtype, device)
    expected = make_layers(layout, shape, dtype, device)
    blocks = some_blocks(shape[1])
    records = torch.randint(0, 256, (len(blocks), record_nbytes(layers)), dtype=torch.uint8)
    records = records.to(device)
    scatter_blocks(records, layers, blocks)
    scatter_reference(records, expected, blocks)
    assert all(map(same_bytes, layers, expected))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_copies_equal_the_reference(layout, shape):
    layers = make_layers(layout, shape, torch.bfloat16)
    pages = HostPages(layers)
    blocks = some_blocks(shape[1])
    expected = gather_reference(layers, blocks)
    for block, record in zip(blocks, expected, strict=True):
        copy = bytearray(pages.record_nbytes + 9)
        pages.read(block, memoryview(copy))
        assert copy == record.numpy().tobytes() + bytes(9)

    targets = make_layers(layout, shape, torch.bfloat16)
    fresh = torch.randint(0, 256, expected.shape, dtype=torch.uint8)
    scatter_reference(fresh, targets, blocks)
    for block, record in zip(blocks, fresh, strict=True):
        pages.write(block, memoryview(record.numpy()))
    assert all(map(same_bytes, layers, targets))


def test_records_of_one_layout_are_read_under_another(device):
    shape = (3, 6, 2, 8, 16)
    source = make_layers("LBNHC", shape, torch.float32, device)
    target = make_layers("BHLNC", shape, torch.float32, device)
    records = torch.empty(6, record_nbytes(source), dtype=torch.uint8, device=device)
    gather_blocks(source, range(6), records)
    scatter_blocks(records, target, [3, 1, 5, 0, 2, 4])
    for before, after in zip(source, target, strict=True):
        assert same_bytes(before, after[[3, 1, 5, 0, 2, 4]])


def test_rows_may_be_padded_and_layers_may_differ_in_size(device):
    layers = [
        *make_layers("LBHNC", (2, 5, 2, 4, 6), torch.float32, device),
        *make_layers("BLHNC", (1, 5, 1, 4, 3), torch.uint8, device),
    ]
    padded = torch.zeros(2, record_nbytes(layers) + 13, dtype=torch.uint8, device=device)
    gather_blocks(layers, [4, 0], padded)
    assert torch.equal(padded[:, :-13], gather_reference(layers, [4, 0]))
    assert not padded[:, -13:].any()


def test_no_blocks_is_no_work():
    layers = make_layers("LBHNC", (2, 3, 1, 2, 4), torch.float32)
    gather_blocks(layers, [], torch.empty(0, record_nbytes(layers), dtype=torch.uint8))


@pytest.mark.parametrize(
    ("blocks", "rows", "nbytes"),
    [([3], 1, 64), ([-1], 1, 64), ([0, 1], 1, 64), ([0], 1, 63)],
    ids=["past the end", "negative", "too few rows", "rows too short"],
)
def test_what_does_not_fit_is_refused(blocks, rows, nbytes):
    layers = make_layers("LBHNC", (2, 3, 1, 2, 4), torch.float32)
    records = torch.empty(rows, nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"block id|cannot hold"):
        gather_blocks(layers, blocks, records)


def test_a_repeated_target_block_is_refused():
    layers = make_layers("LBHNC", (2, 3, 1, 2, 4), torch.float32)
    records = torch.empty(2, record_nbytes(layers), dtype=torch.uint8)
    with pytest.raises(ValueError, match="twice"):
        scatter_blocks(records, layers, [1, 1])
