"""What tests of the codec's kernels share."""

from __future__ import annotations

import ctypes

import pytest


@pytest.fixture(scope="session")
def codec_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The codec's CUDA kernels, compiled for the processor."""
    pytest.importorskip("torch")
    from tests.kernels.codec.device import compile_codec

    return compile_codec(tmp_path_factory.mktemp("codec"))
