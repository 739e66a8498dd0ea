"""The kernels of CUDA write and read the host's bytes, whatever the values and the layout.

They run here as they are, compiled for the processor.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvstore.model.checksum import checksum  # noqa: E402
from kvstore_kernels.codec.coder import Memory  # noqa: E402
from kvstore_kernels.codec.copies import Decoded  # noqa: E402
from kvstore_kernels.codec.device_coder import DeviceCoder  # noqa: E402
from kvstore_kernels.codec.device_passes import Arrived, OnDevice, Staged  # noqa: E402
from kvstore_kernels.codec.record import HEADER_NBYTES, DType, Form, Header  # noqa: E402
from kvstore_kernels.packing import PagedKV  # noqa: E402
from tests.kernels.codec.device import device_coder, open_on_host, room  # noqa: E402
from tests.kernels.codec.memory import Pages, made_up, pages, place, wide  # noqa: E402
from tests.kernels.codec.test_forms import SPECIAL  # noqa: E402


def bytes_of(staged: torch.Tensor, part: Staged) -> bytes:
    return bytes(staged[part.begin : part.begin + part.nbytes].numpy())


def arrived(made: OnDevice, *, fine: bool = True) -> Arrived:
    if made.fine is None or not fine:
        return Arrived(made.base.begin, made.base.nbytes)
    return Arrived(*made.base[:2], *made.fine)


def same_as_host(page: Pages, codec_library: ctypes.CDLL, block: int = 1, into: int = 2) -> None:
    """Code `block` in every way: both give the same records, checksums and values."""
    host = page.coder()
    for lossy in (False, True):
        coder = device_coder(page, codec_library, lossy=lossy)
        staged = room(coder, 1)
        (made,) = coder.encode([block], staged).finish()
        if lossy:
            (right,) = host.encode_lossy([block], [False], page.room(1))
        else:
            (right,) = host.encode_exact([block], page.room(1))
        pairs = [(made.base, right.base), (made.fine, right.fine)]
        for mine, theirs in pairs:
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert bytes_of(staged, mine) == bytes(theirs)
                assert mine.checksum == checksum(theirs)
        for refined in {False, right.fine is not None}:
            page.memory[0][into] = 0
            (wrong,) = host.decode([into], [right.base], [right.fine] if refined else ())
            assert wrong is None
            expected = page.memory[0][into].tobytes()
            page.memory[0][into] = 0
            (found,) = coder.decode([into], staged, [arrived(made, fine=refined)]).finish()
            assert found == Decoded(made.base.checksum, True if refined else None)
            assert page.memory[0][into].tobytes() == expected


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP32], ids=lambda d: d.name)
@pytest.mark.parametrize("channels", [64, 80, 96, 128, 256, 576])
@pytest.mark.parametrize("tokens", [8, 16, 24, 64, 128, 256])
def test_a_device_computes_what_the_host_computes(tokens, channels, dtype, codec_library) -> None:
    for order in ("htc", "thc", "hct", "p", "a"):
        keys = place("K", 2, tokens, channels, order=order)
        values = place("V", 2, tokens, channels, first=2 * tokens * channels, order=order)
        page = pages([[keys, values]], dtype)
        page.fill(1, made_up(page.shape, tokens * channels))
        same_as_host(page, codec_library)


@pytest.mark.parametrize("channels", [16, 32, 48, 112, 320, 512, 1024])
def test_other_numbers_of_channels(channels, codec_library) -> None:
    keys, values = place("K", 1, 16, channels), place("V", 1, 16, channels, first=16 * channels)
    page = pages([[keys, values]], DType.BF16)
    page.fill(1, made_up(page.shape, channels))
    same_as_host(page, codec_library)


@pytest.mark.parametrize("kind", ["K", "V"])
def test_a_stripe_that_is_too_wide(kind, codec_library) -> None:
    for size in (2000.0, 5000.0, 8000.0, 30000.0, 31000.0, 40000.0, 60000.0):
        for channels in (64, 128, 576):
            same_as_host(wide(kind, size, DType.BF16, channels), codec_library)


@pytest.mark.parametrize("name", SPECIAL)
def test_whatever_the_bits(name, codec_library) -> None:
    page = pages([[place("K", 2, 16, 96), place("V", 2, 16, 96, first=2 * 16 * 96)]], DType.BF16)
    page.memory[0][1].view(np.uint16)[:] = SPECIAL[name](page.memory[0][1].size // 2)
    same_as_host(page, codec_library)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([DType.BF16, DType.FP16, DType.FP32]))
def test_random_bits_with_few_exponents(codec_library, seed, dtype) -> None:
    """From compressible to not at all: L3, L3 with many escapes, raw; EP and its refusals."""
    rng = np.random.default_rng(seed)
    page = pages([[place("K", 1, 8, 80), place("V", 1, 8, 80, first=8 * 80)]], dtype)
    bits = np.uint16 if dtype.nbytes == 2 else np.uint32
    values = rng.integers(0, 1 << 8 * dtype.nbytes, page.memory[0][1].size // dtype.nbytes)
    keep = int(rng.integers(0, 1 << 8 * dtype.nbytes)) | (
        0x807F if dtype.nbytes == 2 else 0x807FFFFF
    )
    page.memory[0][1].view(bits)[:] = (values & keep).astype(bits)
    same_as_host(page, codec_library)


def test_escapes_without_end_make_a_raw_record(codec_library) -> None:
    page = pages([[place("K", 1, 16, 128)]], DType.BF16)
    page.memory[0][1][:] = np.random.default_rng(3).integers(0, 256, page.memory[0][1].size)
    coder = device_coder(page, codec_library)
    staged = room(coder, 1)
    encoding = coder.encode([1], staged)
    (made,) = encoding.finish()
    assert encoding.passes == 2
    assert Header.parse(bytes_of(staged, made.base)).form is Form.RAW
    assert made.uncoded
    same_as_host(page, codec_library)


def filled(blocks: int = 9, layers: int = 3) -> Pages:
    page = pages(
        [[place("K", 2, 16, 64), place("V", 2, 16, 64, first=2048)]] * layers,
        DType.BF16,
        blocks=2 * blocks,
    )
    for block in range(blocks):
        page.fill(block, made_up(page.shape, block))
    return page


def test_a_batch_is_its_blocks_whatever_form_each_has(codec_library) -> None:
    page = filled()
    page.memory[1][3].view(np.uint16)[::3] = 0x7F80  # no EP: exact
    page.memory[0][5] = np.random.default_rng(1).integers(0, 256, page.memory[0][5].size)
    page.memory[1][5] = page.memory[2][5] = page.memory[0][5]  # nor L3: raw
    blocks, exact = [3, 1, 8, 0, 5, 7], [False, False, True, False, False, True]
    coder = device_coder(page, codec_library, lossy=True)
    staged = room(coder, len(blocks))
    encoding = coder.encode(blocks, staged, 0, exact)
    made = encoding.finish()
    assert encoding.passes == 3
    right = page.coder().encode_lossy(blocks, exact, page.room(len(blocks)))
    for mine, theirs in zip(made, right, strict=True):
        assert bytes_of(staged, mine.base) == bytes(theirs.base)
        assert (mine.fine is None) == (theirs.fine is None)
        assert mine.uncoded == theirs.uncoded
        if mine.fine is not None:
            assert bytes_of(staged, mine.fine) == bytes(theirs.fine)
            assert mine.fine.checksum == checksum(theirs.fine)
    assert [each.uncoded for each in made] == [block == 5 for block in blocks]
    forms = {Header.parse(bytes(each.base)).form for each in right}
    assert forms == {Form.EP_BASE, Form.L3, Form.RAW}
    targets = [block + 9 for block in blocks]
    before = [layer.copy() for layer in page.memory]
    page.coder().decode(targets, [e.base for e in right], [e.fine for e in right])
    expected = [layer.copy() for layer in page.memory]
    for layer, was in zip(page.memory, before, strict=True):
        layer[:] = was
    done = coder.decode(targets, staged, [arrived(each) for each in made]).finish()
    assert [each.base for each in done] == [checksum(each.base) for each in right]
    assert all(np.array_equal(a, b) for a, b in zip(page.memory, expected, strict=True))


def test_records_of_many_leaves_and_groups(codec_library) -> None:
    page = pages([[place("K", 8, 16, 128), place("V", 8, 16, 128, first=16384)]] * 9, DType.BF16)
    page.fill(1, made_up(page.shape, 4))
    assert page.shape.record_nbytes > 8 * 65536
    same_as_host(page, codec_library)


@pytest.fixture(scope="module")
def stored(codec_library):
    """A block's records, exact and lossy, between guards; block 1 is what they decode to."""
    page = pages([[place("K", 1, 16, 80), place("V", 1, 16, 80, first=16 * 80)]], DType.BF16)
    page.fill(1, made_up(page.shape, 1))
    coder = device_coder(page, codec_library, lossy=True)
    exact, lossy = page.coder().encode_lossy([1, 1], [True, False], page.room(2))
    page.memory[0][[0, 2]] = 0xA5
    return page, coder, bytes(exact.base), bytes(lossy.base), bytes(lossy.fine)


def decoded(stored, base: bytes, fine: bytes = b"", fine_sum: int | None = None) -> Decoded:
    page, coder, *_ = stored
    base, fine = base[: coder.record_nbytes], fine[: coder.fine_nbytes]
    staged = torch.full((2 * coder.room_nbytes(),), 0xA5, dtype=torch.uint8)
    split = -(-coder.record_nbytes // 256) * 256
    staged[: len(base)] = torch.frombuffer(bytearray(base or b"\0"), dtype=torch.uint8)[: len(base)]
    staged[split : split + len(fine)] = torch.frombuffer(
        bytearray(fine or b"\0"), dtype=torch.uint8
    )[: len(fine)]
    before = staged.clone()
    sum_ = checksum(memoryview(fine)) if fine and fine_sum is None else fine_sum or 0
    (found,) = coder.decode([1], staged, [Arrived(0, len(base), split, len(fine), sum_)]).finish()
    assert (page.memory[0][[0, 2]] == 0xA5).all(), "written outside the block"
    assert torch.equal(staged, before), "a record was written to"
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_record_harms_nothing(stored, data) -> None:
    page, _, exact, base, fine = stored
    record = bytearray(data.draw(st.sampled_from([exact, base])))
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(0, len(record) - 1) | st.integers(0, 200))
        record[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(record)) | st.just(len(record)))
    sent = bytes(record[:cut])
    found = decoded(stored, sent, data.draw(st.sampled_from([b"", fine, exact])))
    (wrong,) = page.coder().decode([1], [memoryview(sent)])
    assert (found.base is None) == (wrong is not None)
    if found.base is not None:
        assert found.base == checksum(memoryview(sent))


def test_a_fine_part_is_used_only_with_its_own_base(stored) -> None:
    page, _, exact, base, fine = stored
    whole = Decoded(checksum(memoryview(base)), True)
    coarse = Decoded(checksum(memoryview(base)), False)
    assert decoded(stored, base, fine) == whole
    refined = page.memory[0][1].tobytes()
    other = bytearray(fine)
    other[24] ^= 1
    for each, sum_ in ((bytes(other), None), (fine, 5), (fine[:-1], None), (base, None)):
        assert decoded(stored, base, each, sum_) == coarse
        assert page.memory[0][1].tobytes() != refined
    assert decoded(stored, exact, fine) == Decoded(checksum(memoryview(exact)), False)
    assert decoded(stored, fine) == Decoded(None)


@pytest.mark.parametrize("at", range(HEADER_NBYTES))
def test_every_byte_of_the_header_counts(at, stored) -> None:
    for record in stored[2:4]:
        wrong = bytearray(record)
        wrong[at] ^= 1
        assert decoded(stored, bytes(wrong)).base is None


def test_nothing_outside_the_records_room_is_written(codec_library) -> None:
    page = filled()
    for lossy in (False, True):
        coder = device_coder(page, codec_library, lossy=lossy)
        staged = room(coder, 4, guard=4096)
        made = coder.encode([1, 2], staged, coder.room_nbytes()).finish()
        begin, end = coder.room_nbytes(), 3 * coder.room_nbytes()
        assert (staged[:begin] == 0xAA).all()
        assert (staged[end:] == 0xAA).all()
        assert [each.base.begin for each in made] == [begin, 2 * begin]


@pytest.mark.parametrize(
    ("blocks", "nbytes", "text"),
    [([18], 1, "block id 18 is out of"), ([-1], 1, "block id -1"), ([0, 1], 1, "need")],
)
def test_what_does_not_fit_is_refused(blocks, nbytes, text, codec_library) -> None:
    coder = device_coder(filled(), codec_library)
    staged = room(coder, nbytes)
    with pytest.raises(ValueError, match=text):
        coder.encode(blocks, staged)


def test_places_of_another_shape_are_refused(codec_library) -> None:
    page = pages([[place("K", 1, 16, 64)]], DType.BF16)
    paged = PagedKV([[torch.from_numpy(page.memory[0])]])
    layers = [Memory(page.memory[0].ctypes.data, page.memory[0].strides[0])]
    opened = open_on_host(codec_library)
    for other in (place("V", 1, 16, 64), place("K", 2, 8, 64)):
        with pytest.raises(ValueError, match="other heads, tokens or channels"):
            DeviceCoder(page.shape, layers, (paged, 0), opened, [[other]])


def test_places_of_arrived_records_are_checked(codec_library) -> None:
    coder = device_coder(filled(), codec_library)
    staged = room(coder, 1)
    for each in (Arrived(8, 64), Arrived(-16, 64), Arrived(0, 1 << 30), Arrived(16, len(staged))):
        with pytest.raises(ValueError, match="a record of"):
            coder.decode([0], staged, [each])
    with pytest.raises(ValueError, match="2 records for 1 blocks"):
        coder.decode([0, 0], staged, [Arrived(0, 64)] * 2)
    assert coder.encode([], staged).finish() == coder.decode([], staged, []).finish() == []


@pytest.mark.parametrize("lossy", [False, True], ids=["l3", "ep"])
@pytest.mark.parametrize("order", ["htc", "thc", "hct", "p"])
def test_a_coder_that_has_moved_makes_the_same_records_of_other_memory(
    lossy, order, codec_library
) -> None:
    def places(order: str) -> list[list]:
        values = place("V", 2, 16, 80, first=2 * 16 * 80, order=order)
        return [[place("K", 2, 16, 80, order=order), values] for _ in range(2)]

    here, there = pages(places("htc"), DType.BF16), pages(places(order), DType.BF16, blocks=5)
    for page, block in ((here, 1), (there, 4)):
        page.fill(block, made_up(page.shape, 7))
    noise = np.random.default_rng(1).integers(0, 256, here.memory[0][2].size, np.uint8)
    for layer in there.memory:
        layer[3] = noise
    first = device_coder(here, codec_library, lossy=lossy)
    layers = [Memory(each.ctypes.data, each.strides[0]) for each in there.memory]
    paged = PagedKV([[torch.from_numpy(each) for each in there.memory]])
    second = first.moved(layers, (paged, 0), places(order))
    staged = {coder: room(coder, 2) for coder in (first, second)}
    ((mine,), (theirs, raw)) = (
        coder.encode(blocks, staged[coder]).finish()
        for coder, blocks in ((first, [1]), (second, [4, 3]))
    )
    for part, other in ((mine.base, theirs.base), (mine.fine, theirs.fine)):
        assert (part is None) == (other is None)
        if part is not None:
            assert bytes_of(staged[first], part) == bytes_of(staged[second], other)
    assert raw.uncoded
    second.decode([0], staged[first], [arrived(mine)]).finish()
    first.decode([0], staged[second], [arrived(theirs)]).finish()
    for mine_tile, their_tile in zip(here.tiles(0), there.tiles(0), strict=True):
        assert np.array_equal(mine_tile, their_tile)
    second.decode([2], staged[second], [arrived(raw)]).finish()
    assert all(np.array_equal(layer[2], noise) for layer in there.memory)


def test_a_coder_moves_to_no_memory_of_another_shape(codec_library) -> None:
    coder = device_coder(pages([[place("K", 2, 16, 64)]], DType.BF16), codec_library)
    wider, other = place("K", 2, 16, 80), place("K", 1, 32, 64)
    for moved, told in ((wider, "bytes, its places"), (other, "other heads, tokens or channels")):
        page = pages([[moved]], DType.BF16)
        paged = PagedKV([[torch.from_numpy(page.memory[0])]])
        layers = [Memory(page.memory[0].ctypes.data, page.memory[0].strides[0])]
        with pytest.raises(ValueError, match=told):
            coder.moved(layers, (paged, 0), [[moved]])
