"""Kernels that give one wrong byte are not used."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")

from kvstore_kernels import native  # noqa: E402
from kvstore_kernels.codec.coder import Memory  # noqa: E402
from kvstore_kernels.codec.device_passes import Arrived  # noqa: E402
from kvstore_kernels.codec.device_tables import WIDTHS  # noqa: E402
from kvstore_kernels.codec.device_trial import coder_works, open_coder  # noqa: E402
from kvstore_kernels.codec.record import DType  # noqa: E402
from kvstore_kernels.packing import PagedKV  # noqa: E402
from tests.kernels.codec.device import HostLauncher, open_on_host  # noqa: E402
from tests.kernels.codec.memory import made_up, pages, place  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP32], ids=lambda d: d.name)
def test_right_kernels_are_used(dtype, width, codec_library, caplog) -> None:
    caplog.set_level("INFO")
    assert coder_works(CPU, dtype, width, open_on_host(codec_library))
    assert "codec=on" in caplog.text


@pytest.mark.parametrize("name", ["l3_encode_1", "l3_tail", "l3_decode_1", "ep_encode_1_2", "seal",
                                  "ep_decode_1_2", "inspect"])  # fmt: skip
def test_a_kernel_that_does_not_run_is_noticed(name, codec_library, caplog) -> None:
    class Broken(HostLauncher):
        def launch(self, launched, grid, addresses) -> None:
            if launched != name:
                super().launch(launched, grid, addresses)

    def opened(device, item, width):
        return Broken(codec_library)

    assert not coder_works(CPU, DType.BF16, 2, opened)
    assert "codec=off" in caplog.text


def test_a_spoiled_byte_is_noticed(codec_library, caplog) -> None:
    class Spoiled(HostLauncher):
        def launch(self, launched, grid, addresses) -> None:
            super().launch(launched, grid, addresses)
            if launched == "ep_encode_1_2":
                base = ctypes.cast(addresses[1] + 8, ctypes.POINTER(ctypes.c_uint64))[0]
                ctypes.cast(base + 100, ctypes.POINTER(ctypes.c_uint8))[0] ^= 1

    assert not coder_works(CPU, DType.BF16, 2, lambda device, item, width: Spoiled(codec_library))
    assert "wrong records" in caplog.text


def test_without_a_gpu_there_is_no_coder(caplog) -> None:
    page = pages([[place("K", 1, 16, 64)]], DType.BF16)
    paged = PagedKV([[torch.from_numpy(page.memory[0])]])
    memory = [Memory(page.memory[0].ctypes.data, page.memory[0].strides[0])]
    assert open_coder(page.shape, memory, (paged, 0)) is None
    assert "codec=off device=cpu" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP32], ids=lambda d: d.name)
@pytest.mark.parametrize("width", WIDTHS)
def test_on_a_gpu_the_kernels_are_the_reference(dtype, width) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("cupy")
    from kvstore_kernels.cuda.launch import CodecKernels

    assert coder_works(torch.device("cuda", 0), dtype, width, CodecKernels)


@pytest.mark.gpu
def test_on_a_gpu_records_are_the_hosts() -> None:
    """A batch of blocks of several layers, coded there and here; each decodes the other's."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if native.library() is None:
        pytest.skip(native.reason())
    pytest.importorskip("cupy")
    page = pages([[place("K", 8, 16, 128), place("V", 8, 16, 128, first=16384)]] * 9, DType.BF16,
                 blocks=32)  # fmt: skip
    for block in range(16):
        page.fill(block, made_up(page.shape, block))
    layers = [torch.from_numpy(each).cuda() for each in page.memory]
    memory = [Memory(each.data_ptr(), each.stride(0)) for each in layers]
    blocks, targets = list(range(16)), list(range(16, 32))
    exact = [block % 3 == 0 for block in blocks]
    coder = open_coder(page.shape, memory, (PagedKV([layers]), 0), lossy=True)
    assert coder is not None
    staged = torch.zeros(16 * coder.room_nbytes(), dtype=torch.uint8, device="cuda")
    made = coder.encode(blocks, staged, 0, exact).finish()
    right = page.coder().encode_lossy(blocks, exact, page.room(16))
    for mine, theirs in zip(made, right, strict=True):
        for part, record in ((mine.base, theirs.base), (mine.fine, theirs.fine)):
            assert (part is None) == (record is None)
            if part is not None:
                found = staged[part.begin : part.begin + part.nbytes].cpu().numpy()
                assert found.tobytes() == bytes(record)
    arrived = [Arrived(*each.base[:2], *(each.fine or ())) for each in made]
    done = coder.decode(targets, staged, arrived).finish()
    assert [each.base for each in done] == [each.base.checksum for each in made]
    page.coder().decode(targets, [e.base for e in right], [e.fine for e in right])
    torch.cuda.synchronize()
    for layer, there in zip(page.memory, layers, strict=True):
        assert there.cpu().numpy().tobytes() == layer.tobytes()
