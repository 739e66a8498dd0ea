"""Views of the arena as tensors: without a copy, without a warning, mapped while they are used."""

from __future__ import annotations

import mmap
import warnings

import pytest

torch = pytest.importorskip("torch")
from kvstore_kernels.views import tensor_of  # noqa: E402


@pytest.mark.parametrize("access", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
def test_a_view_is_shown_where_it_is(access: int) -> None:
    with open("/usr/bin/env", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, access)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_of(memoryview(mapped)[1:101])
    assert bytes(tensor.numpy()) == mapped[1:101]
    with pytest.raises(BufferError):  # the tensor keeps it
        mapped.close()
    del tensor
    mapped.close()
