"""Copies through the ring give the right bytes and sums, however late the device is."""

from __future__ import annotations

import mmap
import threading

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvstore import checksum  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels import registration  # noqa: E402
from kvstore_kernels.device import open_device  # noqa: E402
from kvstore_kernels.lane import Lane, Transfer  # noqa: E402
from kvstore_kernels.packing import PagedKV, checksum_of_leaves, open_paged  # noqa: E402
from kvstore_kernels.reference import gather_reference  # noqa: E402
from kvstore_kernels.registration import Registration  # noqa: E402
from tests.kernels.late_device import LateDevice  # noqa: E402
from tests.kernels.test_paged import make_layers, same_bytes  # noqa: E402

BLOCKS = 9
SHAPES = [(2, BLOCKS, 2, 16, 64), (1, BLOCKS, 1, 7, 5)]  # records of 8192 and 70 bytes
BATCH = [(0, 8), (1, 3), (0, 0), (0, 5), (1, 8), (1, 0), (0, 2)]
SIZES = [8192, 70]


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(registration, "LOOK_S", 0.01)


@pytest.fixture
def extents():
    """Two extents, as a client has mapped them."""
    return {number: memoryview(mmap.mmap(-1, 1 << 16)) for number in (7, 8)}


def groups(device="cpu"):
    return [make_layers("LBNHC", shape, torch.bfloat16, device) for shape in SHAPES]


def slots(extents, batch, gap=0):
    """Return room for the records of a batch, side by side, across the extents."""
    views, found, at = list(extents.values()), [], 0
    for group, _ in batch:
        size = SIZES[group]
        if at + size > len(views[0]) or len(found) == len(batch) // 2:
            views, at = views[1:] + views[:1], 0
        found.append(views[0][at : at + size + 3])
        at += size + gap
    return found


def started(device, extents) -> Registration:
    found = Registration(device, lambda: extents, lambda: None)
    found.start()
    until(lambda: found.failure or found.registered_nbytes == 1 << 17, 5)
    return found


def lane_for(device, registered, piece_nbytes=3 * 8192):
    return Lane(device, max(SIZES), registered, piece_nbytes=piece_nbytes)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.lists(st.sampled_from(BATCH), min_size=1, max_size=7, unique=True),
    pieces=st.integers(1, 4),
    piece_nbytes=st.sampled_from([1, 3 * 8192, 1 << 20]),
    reached=st.sampled_from(["all", "none", "half"]),
    gap=st.sampled_from([0, 58, 4096]),
    sums=st.booleans(),
)
def test_blocks_travel_out_and_back(*, seed, batch, pieces, piece_nbytes, reached, gap, sums):
    device = LateDevice(seed)
    extents = {number: memoryview(mmap.mmap(-1, 1 << 17)) for number in (7, 8)}
    known = dict(list(extents.items())[: {"all": 2, "none": 0, "half": 1}[reached]])
    registered = Registration(device, lambda: known, lambda: None)
    registered._look()
    kv, empty = groups(), [[torch.zeros_like(layer) for layer in group] for group in groups()]
    records = slots(extents, batch, gap)
    expected = [gather_reference(kv[group], [block])[0] for group, block in batch]
    ring = {"pieces": pieces, "piece_nbytes": piece_nbytes}

    out = Lane(device, max(SIZES), registered, **ring)
    # The engine computes the blocks late, too: the copy has to come after.
    late = [[layer.clone() for layer in group] for group in kv]
    for group in kv:
        for layer in group:
            layer.zero_()
    device.engine.run(lambda: [a.copy_(b) for x, y in zip(kv, late, strict=True)
                               for a, b in zip(x, y, strict=True)])  # fmt: skip
    half = len(batch) // 2
    parts = [slice(0, half), slice(half, None)]
    paged = PagedKV(kv, kernels=sums)
    transfers = [Transfer(paged, batch[part], records[part]) for part in parts]
    found = list(out.read(transfers, device.mark()))
    assert [len(leaves) for leaves in found] == [half, len(batch) - half]
    for record, right in zip(records, expected, strict=True):
        assert bytes(record[: len(right)]) == bytes(right.numpy())
        assert not any(record[len(right) :]) or gap == 0
    wanted = [checksum(memoryview(right.numpy())) for right in expected]
    assert [checksum_of_leaves(each) for leaves in found for each in leaves] == wanted

    back = Lane(device, max(SIZES), registered, **ring)
    paged = PagedKV(empty, kernels=sums)
    transfers = [Transfer(paged, batch[part], records[part]) for part in parts]
    found = list(back.write(transfers, device.mark()))
    assert [checksum_of_leaves(each) for leaves in found for each in leaves] == wanted
    for group, (old, new) in enumerate(zip(kv, empty, strict=True)):
        blocks = [block for at, block in batch if at == group]
        for before, after in zip(old, new, strict=True):
            right = torch.zeros_like(before)
            right[blocks] = before[blocks]
            assert same_bytes(after, right)
    direct = {"all": True, "none": False}.get(reached)
    if direct is not None:
        assert (out.bounced_nbytes == back.bounced_nbytes == 0) == direct


def test_a_transfer_is_told_when_it_is_done_and_not_after_all_of_them(extents):
    device = LateDevice(3)
    kv = PagedKV(groups())
    batch = [(0, block) for block in range(6)]
    records = slots(extents, batch)
    lane = Lane(device, 8192, None, pieces=1, piece_nbytes=1)
    first, *_ = lane.read([Transfer(kv, batch[:1], records[:1])] * 3, device.mark())
    assert len(first) == 1
    lane = Lane(device, 8192, None, pieces=2, piece_nbytes=1)
    copying = lane.read(
        [Transfer(kv, batch[:2], records[:2]), Transfer(kv, batch[2:], records[2:])], device.mark()
    )
    next(copying)
    assert any(records[0])
    assert not any(records[5])
    copying.close()  # given up: what is in flight comes to its end first
    assert device.idle


def test_memory_that_cannot_be_registered_is_reported_and_copied_all_the_same(extents, caplog):
    device = LateDevice(1, registers=False)
    registered = started(device, extents)
    assert "limit of locked memory" in registered.failure
    assert caplog.text.count("register=failed") == 1
    assert registered.waiting_nbytes == 1 << 17
    lane = lane_for(device, registered)
    records = slots(extents, BATCH)
    list(lane.read([Transfer(PagedKV(groups()), BATCH, records)], device.mark()))
    for (group, block), record in zip(BATCH, records, strict=True):
        (expected,) = gather_reference(groups()[group], [block])
        assert bytes(record[: SIZES[group]]) == bytes(expected.numpy())
    assert lane.bounced_nbytes == sum(SIZES[group] for group, _ in BATCH)
    registered.close(5)


def test_an_extent_that_left_is_unmapped_when_its_last_copy_has_ended(extents):
    device = LateDevice(1)
    mapped = extents[7].obj
    registered = started(device, extents)
    with registered.held([torch.frombuffer(extents[7], dtype=torch.uint8)]) as reached:
        assert reached[0] is not None
        del extents[7]
        until(lambda: registered.registered_nbytes == 1 << 16, 5)  # not lent any more
        assert len(device.registered) == 2
        with pytest.raises(BufferError):
            mapped.close()
        del reached
    until(lambda: len(device.registered) == 1, 5)
    until(lambda: closes(mapped), 5)
    registered.close(5)
    assert not device.registered


def closes(mapped) -> bool:
    try:
        mapped.close()
    except BufferError:
        return False
    return True


def test_extents_are_registered_as_they_come(extents):
    device = LateDevice(1)
    registered = started(device, extents)
    extents[9] = memoryview(mmap.mmap(-1, 1 << 16))
    until(lambda: registered.registered_nbytes == 3 << 16, 5)
    registered.close(5)


def test_the_thread_that_registers_is_entered_and_ends(extents):
    entered = []
    registered = Registration(
        LateDevice(0), lambda: extents, lambda: entered.append(threading.current_thread().name)
    )
    registered.start()
    until(lambda: entered == ["kvstore-register"], 5)
    registered.close(5)
    assert "kvstore-register" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("batch", "cut", "text"),
    [
        ([(0, BLOCKS)], 0, "block id 9 is out of 0..8"),
        ([(0, -1)], 0, "block id -1"),
        ([(0, 1)], 8, "a record of 8187 bytes; 8192 are wanted"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_copied(extents, batch, cut, text):
    device = LateDevice(0)
    lane = lane_for(device, None)
    records = [each[: len(each) - cut] for each in slots(extents, batch)]
    for copy in (lane.read, lane.write):
        with pytest.raises(ValueError, match=text):
            list(copy([Transfer(PagedKV(groups()), batch, records)], device.mark()))
    assert not any(any(view) for view in extents.values())
    with pytest.raises(ValueError, match="2 records for 1 blocks"):
        list(lane.read([Transfer(PagedKV(groups()), batch, records * 2)], device.mark()))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_lanes_and_pages_made_under_inference_mode_are_used_by_any_thread(extents, where, kernels):
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = open_device(torch.device(where))
    with torch.inference_mode():
        out, back = lane_for(device, None), lane_for(device, None)
        kv, empty = groups(where), [[torch.zeros_like(x) for x in g] for g in groups(where)]
    source, target = (
        open_paged(made) if kernels else PagedKV(made, kernels=False) for made in (kv, empty)
    )
    records = slots(extents, BATCH)
    list(out.read([Transfer(source, BATCH, records)], device.mark()))
    list(back.write([Transfer(target, BATCH, records)], device.mark()))
    for group, block in BATCH:
        for old, new in zip(kv[group], empty[group], strict=True):
            assert same_bytes(old[block], new[block])


def test_devices_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="CUDA or the CPU"):
        open_device(torch.device("meta"))


@pytest.mark.gpu
def test_on_a_gpu_extents_are_registered_and_nothing_bounces():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    extents = {7: memoryview(mmap.mmap(-1, 1 << 16)), 8: memoryview(mmap.mmap(-1, 1 << 16))}
    device = open_device(torch.device("cuda"))
    registered = started(device, extents)
    assert not registered.failure
    for lender, bounced in ((registered, False), (None, True)):
        kv, empty = groups("cuda"), [[torch.zeros_like(x) for x in g] for g in groups("cuda")]
        records = slots(extents, BATCH)
        out, back = lane_for(device, lender), lane_for(device, lender)
        (leaves,) = out.read([Transfer(open_paged(kv), BATCH, records)], device.mark())
        for (group, block), record, sums in zip(BATCH, records, leaves, strict=True):
            (expected,) = gather_reference(kv[group], [block])
            assert bytes(record[: SIZES[group]]) == bytes(expected.cpu().numpy())
            assert checksum_of_leaves(sums) == checksum(record[: SIZES[group]])
        assert list(back.write([Transfer(open_paged(empty), BATCH, records)], device.mark())) == [
            leaves
        ]
        for group, block in BATCH:
            for old, new in zip(kv[group], empty[group], strict=True):
                assert same_bytes(old[block], new[block])
        assert bool(out.bounced_nbytes and back.bounced_nbytes) == bounced
    registered.close(5)
