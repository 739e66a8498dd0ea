"""Files read into tensors, by whatever way the machine has."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvstore_kernels.storage import FileReader  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def test_parts_of_a_file_come_as_they_are(tmp_path, device):
    path = tmp_path / "segment"
    data = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    path.write_bytes(bytes(data.numpy()))
    reader = FileReader(device)
    assert reader.how in (("host",) if device.type == "cpu" else ("host", "compat", "gds"))
    for offset, nbytes in ((0, 3 << 20), (4096, 1 << 20), (5, 7)):
        target = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        reader.read(path, offset, target)
        assert torch.equal(target.cpu(), data[offset : offset + nbytes])


def test_short_files_and_wrong_tensors_are_refused(tmp_path, device):
    path = tmp_path / "segment"
    path.write_bytes(b"1234")
    reader = FileReader(device)
    with pytest.raises(EOFError, match="2 of 8 bytes from 2"):
        reader.read(path, 2, torch.zeros(8, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match="uint8"):
        reader.read(path, 0, torch.zeros(4, device=device))
    with pytest.raises(OSError, match="absent"):
        reader.read(tmp_path / "absent", 0, torch.zeros(4, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match="CUDA or the CPU"):
        FileReader(torch.device("meta"))
