"""How daemons start; in which order files of tests begin, where `make test` runs several; what
kernels for GPUs run on."""

from __future__ import annotations

import ctypes
import os

import pytest

from kvstore.testing.daemon import Daemon
from tests.forks import Forks

if os.environ.get("KVSTORE_TEST_FORKS") != "0":
    Daemon.launch = Forks().launch

# Files that take a minute or more: what begins last must be short, or one core waits for it.
LONG = ("test_clean_environment.py", "test_namespaces.py", "test_torture.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with engines first, then other long ones. `--dist loadfile` runs a file whole, so
    what is made for a file is made once."""
    engines = {item.path for item in items if item.get_closest_marker("vllm")}

    def begins(item: pytest.Item) -> int:
        if item.path in engines:
            return 0
        return 1 if item.path.name in LONG else 2

    items.sort(key=begins)


@pytest.fixture(scope="session")
def codec_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The codec's CUDA kernels, compiled for the processor."""
    pytest.importorskip("torch")
    from tests.kernels.codec.device import compile_codec

    return compile_codec(tmp_path_factory.mktemp("codec"))
