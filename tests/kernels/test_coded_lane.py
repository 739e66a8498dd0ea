"""Coded records travel between a device and slots, however late the device is."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvstore.model.checksum import checksum  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from kvstore_kernels.codec.coder import Memory  # noqa: E402
from kvstore_kernels.codec.copies import CodedCopies, Decoded, Fine, Scratch  # noqa: E402
from kvstore_kernels.codec.device_passes import OnDevice  # noqa: E402
from kvstore_kernels.codec.device_trial import open_coder  # noqa: E402
from kvstore_kernels.codec.record import DType, Form, Header  # noqa: E402
from kvstore_kernels.coded_lane import DecodingLane, EncodingLane, Load  # noqa: E402
from kvstore_kernels.device import open_device  # noqa: E402
from kvstore_kernels.packing import PagedKV  # noqa: E402
from kvstore_kernels.registration import Registration  # noqa: E402
from tests.kernels.codec.device import device_coder  # noqa: E402
from tests.kernels.codec.memory import Pages, made_up, pages, place  # noqa: E402
from tests.kernels.late_device import LateDevice  # noqa: E402

BLOCKS = 6
RAW = 4  # this block is not made smaller by anything


def filled() -> Pages:
    """Blocks 0..5 have values, blocks 6..11 are where they go."""
    layer = [place("K", 1, 16, 64), place("V", 1, 16, 64, first=1024)]
    page = pages([layer, layer], DType.BF16, blocks=2 * BLOCKS)
    for block in range(BLOCKS):
        page.fill(block, made_up(page.shape, block))
    noise = np.random.default_rng(1).integers(0, 256, page.memory[0][RAW].size, np.uint8)
    page.memory[0][RAW] = page.memory[1][RAW] = noise
    return page


class Slots:
    """Room for records in two extents, one after another, and where a device reaches them."""

    def __init__(self, device: LateDevice | None, reached: str) -> None:
        self.extents = {number: memoryview(mmap.mmap(-1, 1 << 18)) for number in (7, 8)}
        self._at = dict.fromkeys(self.extents, 0)
        self._turn = 7
        self.registration = None
        if device is not None:
            known = dict(list(self.extents.items())[: {"all": 2, "none": 0, "half": 1}[reached]])
            self.registration = Registration(device, lambda: known, lambda: None)
            self.registration._look()

    def new(self, nbytes: int) -> memoryview:
        self._turn = 15 - self._turn
        begin = self._at[self._turn]
        self._at[self._turn] = begin + -(-nbytes // 4096) * 4096
        return self.extents[self._turn][begin : begin + nbytes]


def reserve(slots: Slots, made: Sequence[OnDevice]) -> list[tuple[memoryview, memoryview | None]]:
    return [
        (slots.new(each.base.nbytes), slots.new(each.fine.nbytes) if each.fine else None)
        for each in made
    ]


def copies_of(made, views):
    for each, (base, fine) in zip(made, views, strict=True):
        yield each.base, base
        if fine is not None:
            yield each.fine, fine


def loads_of(made, views, blocks) -> list[Load]:
    return [
        Load(block, base, Fine(fine, each.fine.checksum) if fine is not None else None)
        for block, each, (base, fine) in zip(blocks, made, views, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True),
    lossy=st.booleans(),
    pieces=st.integers(1, 4),
    piece_nbytes=st.sampled_from([1, 3 * 8192, 1 << 20]),
    reached=st.sampled_from(["all", "none", "half"]),
)
def test_records_travel_out_and_back(
    *, codec_library, seed, blocks, lossy, pieces, piece_nbytes, reached
) -> None:
    device, page = LateDevice(seed), filled()
    slots = Slots(device, reached)
    coder = device_coder(page, codec_library, lossy=lossy)
    exact = [lossy and block == 0 for block in blocks] if lossy else []
    host = CodedCopies(page.coder(), checksum, Scratch(), lossy=lossy)
    right = [(bytes(e.base), bytes(e.fine or b"")) for e in host.encode(blocks, exact)]
    out = EncodingLane(device, slots.registration)
    out.encode(0, coder, blocks, device.mark(), exact)
    lane = DecodingLane(
        device, coder.room_nbytes(), slots.registration, pieces=pieces, piece_nbytes=piece_nbytes
    )
    # The engine computes the blocks late, too: encoding has to come after.
    values = [layer.copy() for layer in page.memory]
    for layer in page.memory:
        layer[:] = 0
    device.engine.run(lambda: [np.copyto(a, b) for a, b in zip(page.memory, values, strict=True)])
    made = out.encode(0, coder, blocks, device.mark(), exact)
    for layer in page.memory:
        layer[:BLOCKS] = 0x77  # the engine has the blocks back
    views = reserve(slots, made)
    out.copy_out(0, list(copies_of(made, views)))
    for each, (base, fine), (right_base, right_fine) in zip(made, views, right, strict=True):
        assert bytes(base) == right_base
        assert bytes(fine or b"") == right_fine
        assert each.base.checksum == checksum(base)
        assert each.fine is None or each.fine.checksum == checksum(fine)

    targets = [block + BLOCKS for block in blocks]
    device.engine.run(
        lambda: [layer[BLOCKS:].fill(0x55) for layer in page.memory]
    )  # nor is it done
    found = lane.decode(coder, loads_of(made, views, targets), device.mark())
    assert found == [Decoded(each.base.checksum, True if each.fine else None) for each in made]
    assert device.idle
    mine = [layer[targets].copy() for layer in page.memory]
    host.refine(
        targets,
        [base for base, _ in views],
        [each.fine for each in loads_of(made, views, targets)],
    )
    assert all(np.array_equal(a, b[targets]) for a, b in zip(mine, page.memory, strict=True))
    if reached != "half":
        assert (out.bounced_nbytes == lane.bounced_nbytes == 0) == (reached == "all")


def test_bad_records_are_told_and_the_others_are_decoded(codec_library) -> None:
    device, page = LateDevice(5), filled()
    slots, blocks = Slots(device, "half"), list(range(BLOCKS))
    coder = device_coder(page, codec_library, lossy=True)
    out = EncodingLane(device, slots.registration)
    made = out.encode(0, coder, blocks, device.mark())
    assert Header.parse(bytes(coder_bytes(out, made[RAW]))).form is Form.RAW
    views = reserve(slots, made)
    out.copy_out(0, list(copies_of(made, views)))
    loads = loads_of(made, views, [block + BLOCKS for block in blocks])
    views[0][0][70] ^= 1  # a changed slot: its checksum tells
    views[1][0][0] ^= 1  # no record at all
    loads[2] = loads[2]._replace(record=memoryview(bytes(coder.record_nbytes + 1)))
    views[3][1][40 + 64] ^= 1  # another fine part than was stored
    loads[5] = loads[5]._replace(fine=Fine(memoryview(bytes(1 << 20)), 1))
    lane = DecodingLane(device, coder.room_nbytes(), slots.registration, piece_nbytes=1)
    found = lane.decode(coder, loads, device.mark())
    assert found[0] == Decoded(checksum(views[0][0]), False)
    assert found[0].base != made[0].base.checksum
    assert found[1].base is None
    assert found[2] == Decoded(None)
    assert found[3] == Decoded(made[3].base.checksum, False)
    assert found[4] == Decoded(made[4].base.checksum)
    assert found[5] == Decoded(made[5].base.checksum, False)
    assert np.array_equal(page.memory[0][RAW + BLOCKS], page.memory[0][RAW])


def coder_bytes(lane: EncodingLane, made: OnDevice) -> bytes:
    begin, nbytes, _ = made.base
    return bytes(lane._memory[0].staged[begin : begin + nbytes].numpy())


def test_records_stay_until_their_groups_next_call(codec_library) -> None:
    device, page = LateDevice(2), filled()
    coder = device_coder(page, codec_library)
    lane = EncodingLane(device)
    first, other = (lane.encode(group, coder, [group], device.mark()) for group in (0, 1))
    for group, made in ((0, first), (1, other)):
        (record,) = made
        view = memoryview(bytearray(record.base.nbytes))
        lane.copy_out(group, [(record.base, view)])
        assert checksum(view) == record.base.checksum
    lane.encode(0, coder, range(BLOCKS), device.mark())
    with pytest.raises(ValueError, match="a slot of"):
        lane.copy_out(1, [(other[0].base, memoryview(bytearray(8)))])


def test_blocks_that_there_are_not_are_refused_before_anything_is_done(codec_library) -> None:
    device, page = LateDevice(0), filled()
    coder = device_coder(page, codec_library)
    before = [layer.copy() for layer in page.memory]
    with pytest.raises(ValueError, match="block id 12"):
        EncodingLane(device).encode(0, coder, [0, 12], device.mark())
    lane = DecodingLane(device, coder.room_nbytes(), piece_nbytes=1)
    record = memoryview(bytes(64))
    for loads, text in (
        ([Load(12, record)], "block id 12"),
        ([Load(1, record), Load(1, record)], "twice"),
    ):
        with pytest.raises(ValueError, match=text):
            lane.decode(coder, loads, device.mark())
    assert all(np.array_equal(a, b) for a, b in zip(page.memory, before, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_coded_records_travel_out_and_back() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if native.library() is None:
        pytest.skip(native.reason())
    pytest.importorskip("cupy")
    page, device = filled(), open_device(torch.device("cuda"))
    layers = [torch.from_numpy(each).cuda() for each in page.memory]
    memory = [Memory(each.data_ptr(), each.stride(0)) for each in layers]
    coder = open_coder(page.shape, memory, (PagedKV([layers]), 0), lossy=True)
    assert coder is not None
    blocks, slots = list(range(BLOCKS)), Slots(None, "none")
    out, lane = EncodingLane(device), DecodingLane(device, coder.room_nbytes())
    made = out.encode(0, coder, blocks, device.mark())
    right = page.coder().encode_lossy(blocks, [False] * BLOCKS, page.room(BLOCKS))
    views = reserve(slots, made)
    out.copy_out(0, list(copies_of(made, views)))
    for (base, fine), each in zip(views, right, strict=True):
        assert bytes(base) == bytes(each.base)
        assert bytes(fine or b"") == bytes(each.fine or b"")
    targets = [block + BLOCKS for block in blocks]
    found = lane.decode(coder, loads_of(made, views, targets), device.mark())
    assert [each.base for each in found] == [each.base.checksum for each in made]
    page.coder().decode(targets, [e.base for e in right], [e.fine for e in right])
    for layer, there in zip(page.memory, layers, strict=True):
        assert np.array_equal(there.cpu().numpy(), layer)
