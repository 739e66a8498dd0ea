"""The copies that let vLLM's own offloading run on a CPU."""

from typing import Any

import pytest

# What torch and vLLM warn about while they are imported is theirs to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PAGE_NBYTES = 64


def test_blocks_come_back_from_host_rows_as_they_went() -> None:
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from kvstore_bench.demo.native_spec import HostWorker

    def rows(fill: int) -> Any:
        return torch.full((8, PAGE_NBYTES // 4), fill, dtype=torch.float32)

    tensors = [rows(0), rows(100)]
    for tensor in tensors:
        tensor.add_(torch.arange(8)[:, None])
    before = [tensor.clone() for tensor in tensors]
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor, PAGE_NBYTES) for tensor in tensors],
        group_data_refs=[
            [CanonicalKVCacheRef(0, PAGE_NBYTES)],
            [CanonicalKVCacheRef(1, PAGE_NBYTES)],
        ],
    )
    worker = HostWorker(caches, chunks=4)
    # Two blocks of the first group and one of the second, into chunks 3, 0 and 1.
    blocks = GPULoadStoreSpec([5, 2, 7], group_sizes=(2, 1), block_indices=(0, 0))
    chunks = CPULoadStoreSpec([3, 0, 1])
    try:
        assert worker.submit_store(1, blocks, chunks)
        worker.wait({1})
        for tensor in tensors:
            tensor.zero_()
        assert worker.submit_load(2, chunks, blocks)
        worker.wait({2})
        results = worker.get_finished()
    finally:
        worker.shutdown()
    assert [(each.job_id, each.success, each.transfer_size) for each in results] == [
        (1, True, 3 * PAGE_NBYTES),
        (2, True, 3 * PAGE_NBYTES),
    ]
    assert torch.equal(tensors[0][[5, 2]], before[0][[5, 2]])
    assert torch.equal(tensors[1][7], before[1][7])
    assert not tensors[0][[0, 1, 3, 4, 6, 7]].any()
