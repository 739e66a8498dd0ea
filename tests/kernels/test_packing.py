"""Whole batches: kernels and reference give the same bytes and checksums, whatever the layout.

The kernels run here as they are, compiled for the processor; on a machine with a GPU, there too.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import xxhash  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvstore import checksum  # noqa: E402
from kvstore_kernels import packing  # noqa: E402
from kvstore_kernels.layout import Layout  # noqa: E402
from kvstore_kernels.packing import PagedKV, kernels_work  # noqa: E402
from kvstore_kernels.reference import gather_reference, scatter_reference  # noqa: E402
from tests.kernels.host_kernels import compile_for_host, on_host  # noqa: E402
from tests.kernels.test_paged import LAYOUTS, make_layers, same_bytes  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32, torch.uint8]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return compile_for_host(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(
    params=["reference", "host", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def open_paged(request):
    """Return a function that makes layers and opens them by one of the implementations."""
    if request.param == "reference":
        return lambda groups: PagedKV([make_layers(*group) for group in groups])
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        pytest.importorskip("cupy")
        return lambda groups: PagedKV([make_layers(*group, "cuda") for group in groups])
    library = request.getfixturevalue("library")
    return lambda groups: on_host([make_layers(*group) for group in groups], library)


@st.composite
def kv(draw):
    """Return the arguments of `make_layers` for one to three groups with as many blocks."""
    blocks = draw(st.integers(1, 6))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        slots = draw(st.sampled_from([1, 3, 16, 32]))
        content = draw(st.sampled_from([1, 2, 5, 8, 64, 80, 128, 192, 256, 576]))
        shape = (layers, blocks, heads, slots, content)
        groups.append((draw(st.sampled_from(LAYOUTS)), shape, draw(st.sampled_from(DTYPES))))
    return groups


def pairs(data, groups):
    """Return some (group, block) pairs in any order, none twice."""
    every = [(g, b) for g, (_, shape, _) in enumerate(groups) for b in range(shape[1])]
    return data.draw(st.lists(st.sampled_from(every), unique=True, max_size=len(every)))


def staged_for(paged, batch, fill=0):
    size = paged.offsets(batch)[-1]
    return torch.full((size,), fill, dtype=torch.uint8, device=paged.device)


def check_gather(paged, groups, batch):
    staged = staged_for(paged, batch, fill=0xEE)
    sums = paged.gather(batch, staged).result()
    offsets = paged.offsets(batch)
    padding = torch.ones_like(staged, dtype=torch.bool)
    for (group, block), begin, found in zip(batch, offsets, sums, strict=False):
        (expected,) = gather_reference(groups[group], [block])
        record = staged[begin : begin + len(expected)].cpu()
        assert torch.equal(record, expected)
        assert found == checksum(memoryview(record.numpy()))
        padding[begin : begin + len(expected)] = False
    assert (staged[padding] == 0xEE).all(), "nothing else is touched"


def check_scatter(paged, groups, batch, seed=0):
    """groups: other tensors with the same content as `paged` has."""
    generator = torch.Generator().manual_seed(seed)
    staged = torch.randint(0, 256, (paged.offsets(batch)[-1],), generator=generator)
    staged = staged.to(torch.uint8)
    sums = paged.scatter(staged.to(paged.device), batch).result()
    for (group, block), begin, found in zip(batch, paged.offsets(batch), sums, strict=False):
        record = staged[begin : begin + paged.record_nbytes[group]]
        scatter_reference(record[None], groups[group], [block])
        assert found == checksum(memoryview(record.numpy()))
    for moved, expected in zip(paged._groups, groups, strict=True):
        assert all(same_bytes(a.cpu(), b) for a, b in zip(moved, expected, strict=True))


@given(kv(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_kernels_gather_what_the_reference_does(library, groups, data):
    layers = [make_layers(*group) for group in groups]
    check_gather(on_host(layers, library), layers, pairs(data, groups))


@given(kv(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_kernels_scatter_what_the_reference_does(library, groups, data):
    layers, same = ([make_layers(*group) for group in groups] for _ in range(2))
    check_scatter(on_host(layers, library), same, pairs(data, groups))


GROUPS = [("LBNHC", (3, 5, 2, 16, 128), torch.bfloat16), ("BHLNC", (2, 5, 3, 7, 5), torch.uint8)]


@pytest.mark.parametrize("more", [[], GROUPS[:1], GROUPS], ids=["one group", "two", "odd sizes"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_implementation_moves_large_records(layout, more, open_paged):
    """In words of 16 bytes, but for odd sizes."""
    groups = [(layout, (5, 6, 4, 16, 256), torch.bfloat16), *more]
    batch = [
        (0, 5),
        (0, 0),
        *((group + 1, block) for group in range(len(more)) for block in (4, 1)),
    ]
    layers, same = ([make_layers(*group) for group in groups] for _ in range(2))
    paged = open_paged(groups)
    check_gather(paged, layers, batch)
    check_scatter(paged, same, batch)


@pytest.mark.parametrize(("offset", "word"), [(0, 16), (16, 16), (4, 4), (2, 1), (1, 1)])
def test_layers_may_begin_anywhere_and_pages_may_be_padded(offset, word, library):
    """Two layers interleaved in one allocation, with a gap behind each page."""
    raw = torch.arange(offset + 4 * 2 * 2048, dtype=torch.int32).to(torch.uint8)
    whole = raw[offset:].view(4, 2, 2048)
    layers = [whole[:, index, :1536].unflatten(1, (2, 16, 48)) for index in range(2)]
    assert raw.data_ptr() % 16 == 0
    paged = on_host([layers], library)
    assert paged._layout.word == word
    check_gather(paged, [layers], [(0, 3), (0, 0)])


def test_blocks_of_several_kernel_blocks_are_described():
    """(blocks, H, kernel blocks, slots, C), as vLLM's hybrid caches are viewed."""
    for layout in LAYOUTS:
        (layer,) = make_layers(layout, (1, 12, 2, 16, 64), torch.bfloat16)
        Layout([[layer.unflatten(0, (3, 4)).transpose(1, 2)]])


@given(st.integers(1, 300), st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_checksums_of_all_lengths_are_those_of_the_cpu(library, nbytes, leaves):
    """Leaves of 1 to 240 bytes, whose checksum is computed in other ways, and longer ones."""
    nbytes += 65536 * leaves
    generator = torch.Generator().manual_seed(nbytes)
    layer = torch.randint(0, 256, (1, nbytes), generator=generator).to(torch.uint8)
    paged = on_host([[layer]], library)
    (found,) = paged.gather([(0, 0)], staged_for(paged, [(0, 0)])).result()
    assert found == checksum(memoryview(layer[0].numpy()))


def test_the_checksum_is_of_leaves():
    data = bytes(range(256)) * 300
    leaves = [xxhash.xxh3_64_digest(data[at : at + 65536])[::-1] for at in (0, 65536)]
    assert checksum(data) == xxhash.xxh3_64_intdigest(b"".join(leaves))


def test_no_blocks_are_no_work(open_paged):
    paged = open_paged(GROUPS)
    assert paged.gather([], staged_for(paged, [])).result() == []
    assert paged.scatter(staged_for(paged, []), []).result() == []


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([(0, 5)], "block id 5 is out of"),
        ([(0, -1)], "block id -1 is out of"),
        ([(2, 0)], "group is out of"),
        ([(-1, 0)], "group is out of"),
    ],
)
def test_ids_out_of_range_are_refused(batch, message, open_paged):
    paged = open_paged(GROUPS)
    staged = torch.empty(1 << 20, dtype=torch.uint8, device=paged.device)
    for call in (lambda: paged.gather(batch, staged), lambda: paged.scatter(staged, batch)):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (lambda n: torch.empty(n - 1, dtype=torch.uint8), "cannot hold"),
        (lambda n: torch.empty(n // 4, dtype=torch.int32), "uint8"),
        (lambda n: torch.empty(2, n, dtype=torch.uint8), "uint8"),
        (lambda n: torch.empty(2 * n, dtype=torch.uint8)[::2], "contiguous"),
        (lambda n: torch.empty(n + 16, dtype=torch.uint8)[1:], "multiple of 16"),
        (lambda n: torch.empty(n, dtype=torch.uint8, device="meta"), "buffer is on meta"),
    ],
    ids=["too short", "dtype", "axes", "stride", "alignment", "device"],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer, message):
    paged = PagedKV([make_layers(*group) for group in GROUPS])
    staged = buffer(paged.offsets([(0, 0)])[-1])
    with pytest.raises(ValueError, match=message):
        paged.gather([(0, 0)], staged)


def test_a_repeated_target_is_refused():
    paged = PagedKV([make_layers(*group) for group in GROUPS])
    batch = [(0, 1), (0, 1)]
    with pytest.raises(ValueError, match="twice"):
        paged.scatter(staged_for(paged, batch), batch)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (torch.zeros(4, 8, 2)[:, :, :1].transpose(1, 2), "C contiguous"),
        (torch.zeros(4), "C contiguous"),
        (torch.zeros(4, 1, 8).expand(4, 3, 8), "one place"),
        (torch.zeros(2, 3, 5, 7, 9, 11)[:, ::2, ::2, ::2, ::2], "axes of runs"),
    ],
)
def test_layers_that_cannot_be_addressed_are_refused(layer, message):
    with pytest.raises(ValueError, match=message):
        PagedKV([[layer]])


def test_layers_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="several devices"):
        PagedKV([[torch.zeros(2, 4), torch.zeros(2, 4, device="meta")]])


@pytest.mark.parametrize("how", ["reference", "torch", "kernels"])
def test_records_go_where_they_are_told(how, library):
    """As to and from the slots of a pool: in any order, with anything between them."""
    layers = make_layers(*GROUPS[0])
    other = [torch.zeros_like(layer) for layer in layers]
    size = 3 * 2 * 16 * 128 * 2
    batch, offsets = [(0, 4), (0, 1), (0, 0), (0, 3)], [size + 4096, 0, 4 * size, 3 * size]
    memory = torch.zeros(6 * size, dtype=torch.uint8)
    out, back = (
        on_host([kv], library) if how == "kernels" else PagedKV([kv], kernels=how != "torch")
        for kv in (layers, other)
    )
    out.gather(batch, memory, offsets)
    for (_, block), begin in zip(batch, offsets, strict=True):
        (expected,) = gather_reference(layers, [block])
        assert torch.equal(memory[begin : begin + size], expected)
    back.scatter(memory, batch, offsets)
    for _, block in batch:
        assert all(same_bytes(a[block], b[block]) for a, b in zip(layers, other, strict=True))
    for wrong in ([8, 0, size, 2 * size], [-16, 0, 0, 0], [0], [6 * size, 0, 0, 0]):
        with pytest.raises(ValueError, match=r"offset|hold"):
            out.gather(batch, memory, wrong)


def test_kernels_that_give_one_wrong_byte_are_not_used(monkeypatch, caplog):
    """Tried in the place of a GPU's, where the reference stands on both sides."""
    kernels_work.cache_clear()
    assert kernels_work(torch.device("cpu"))
    kernels_work.cache_clear()
    gather = PagedKV.gather
    seen = []

    def off_by_one(self, batch, staged, offsets=None):
        sums = gather(self, batch, staged, offsets)
        seen.append(staged)
        if len(seen) == 1:
            staged[7] += 1
        return sums

    monkeypatch.setattr(PagedKV, "gather", off_by_one)
    assert not kernels_work(torch.device("cpu"))
    assert "kernels=off" in caplog.text
    kernels_work.cache_clear()


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_tried_and_used():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("cupy")
    assert kernels_work(torch.device("cuda", 0))
    assert packing.open_paged([make_layers(*GROUPS[0], "cuda")]).sums


@pytest.mark.gpu
def test_on_a_gpu_without_cupy_torch_copies(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(packing, "kernels_work", lambda device: False)
    layers, other = (make_layers(*GROUPS[0], "cuda") for _ in range(2))
    for layer in other:
        layer.zero_()
    out, back = packing.open_paged([layers]), packing.open_paged([other])
    batch = [(0, 4), (0, 0)]
    staged = torch.zeros(out.offsets(batch)[-1], dtype=torch.uint8, device="cuda")
    assert out.gather(batch, staged) is back.scatter(staged, batch) is None
    for _, block in batch:
        assert all(same_bytes(a[block], b[block]) for a, b in zip(layers, other, strict=True))
