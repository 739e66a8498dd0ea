"""SGLang's own tests of its storage in files, with our storage in their place.

They are read from a checkout of SGLang, whose folder `test` KVSTORE_SGLANG_TESTS names: see
`test_theirs.py`. What is replaced is what makes a storage and what puts a page of a further pool
into it: theirs write files for that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.sglang.inside.engine import config_of

UNIT = "registered/unit/mem_cache/test_hicache_storage_unit.py"
PREFIX = "registered/unit/mem_cache/test_hicache_file_prefix.py"
POOLS = (PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER, "dsa")
FLOATS = 4  # of a page


def theirs(name: str) -> Any:
    path = Path(os.environ["KVSTORE_SGLANG_TESTS"]) / name
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


unit, prefix = theirs(UNIT), theirs(PREFIX)


class FlatPool:
    """A host pool of pages of four numbers."""

    page_size = 1
    layout = "page_first"

    def __init__(self) -> None:
        self._pages = torch.zeros(16, FLOATS)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self._pages[index]

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self._pages[index] = page


class Stores:
    """Storages of one test, and the daemon below them. Each name is another model's."""

    target = ""
    opened: list[Any] = []  # noqa: RUF012 - of this process

    @classmethod
    def open(cls, name: str) -> Any:
        pool = FlatPool()
        config = config_of(cls.target, weights=name)
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        cls.opened.append(storage)
        storage.register_mem_pool_host(pool)
        for each in POOLS:
            storage.register_mem_host_pool_v2(FlatPool(), each)
        until(lambda: storage._mover._client.instance)
        return storage


def put(storage: Any, pool: str, keys: list[str]) -> None:
    """Store pages of a pool."""
    at = torch.zeros(len(keys), dtype=torch.int64)
    done = storage.batch_set_v2([PoolTransfer(name=pool, keys=keys, host_indices=at)])
    assert done == {pool: [True] * len(keys)}


@pytest.fixture(autouse=True)
def _ours(daemon: Daemon) -> Iterator[None]:
    Stores.target = daemon.target
    yield
    while Stores.opened:
        Stores.opened.pop().close()


unit._make_storage = lambda directory, **_: Stores.open(directory)


class TestIO(unit.TestHiCacheFileIO):  # type: ignore[misc, name-defined]
    def _random_tensor(self, shape: object = None) -> torch.Tensor:
        return torch.randn(FLOATS)  # our pages have one size


class TestExists(unit.TestBatchExistsV2):  # type: ignore[misc, name-defined]
    # What 0.5.23 says of it, its own files included, is in `test_disjoint_checkpoints`.
    test_multiple_pool_transfers_final_pages_is_minimum = None

    def _write_component(self, key: str, pool_name: str) -> None:
        put(self.storage, pool_name, [key])


class TestBatches(unit.TestHiCacheFileBatchV1):  # type: ignore[misc, name-defined]
    test_batch_set_returns_false_on_write_failure = None  # replaces a method of its own files'


class TestPools(unit.TestHiCacheFileBatchV2IO):  # type: ignore[misc, name-defined]
    pass


class TestPrefixes(prefix.TestHiCacheFilePrefix):  # type: ignore[misc, name-defined]
    def check_prefix(
        self, kv_pages: set[int], pools: Any, expected: list[int], num_pages: int = 3
    ) -> None:
        """As theirs, on pages that are put."""
        keys = [f"page{at}" for at in range(1, num_pages + 1)]
        for backwards in (False, True):
            number = len(Stores.opened)
            storage = Stores.open(f"{self.id()} {number}")
            for name, pages in [(PoolName.KV, kv_pages), *(each[:2] for each in pools)]:
                if pages:
                    put(storage, name, [keys[page - 1] for page in sorted(pages)])
            wanted = [
                PoolTransfer(name=name, keys=keys[-window:], hit_policy=policy)
                for name, _, policy, window in pools
            ]
            found = storage.batch_exists_v2(keys, wanted[::-1] if backwards else wanted)
            assert found.kv_hit_pages == max(expected, default=0)
            assert found.restorable_prefix_pages == expected
