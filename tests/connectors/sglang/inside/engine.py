"""One rank of SGLang as far as its host memory and its storage go: real pools, real factory.

The device is the CPU. What a GPU would copy to host memory is put there by the tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE_TOKENS, LAYERS, HEADS, DIM, TOKENS = 4, 3, 2, 16, 256


def publish(**fields: Any) -> None:
    """Publish SGLang's configuration, as its scheduler does; then what it has found out since."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    if fields:
        get_context().override("tests", **fields)


def mha(
    layout: str = "page_first",
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_tokens: int = PAGE_TOKENS,
    v_dim: int = DIM,
    heads: int = HEADS,
) -> Any:
    """Return a host pool of ordinary attention."""
    device = MHATokenToKVPool(
        size=TOKENS,
        page_size=page_tokens,
        dtype=dtype,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=v_dim,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    kind = MHATokenToKVPoolHost if v_dim == DIM else AsymmetricMHATokenToKVPoolHost
    return _host(kind, device, layout, page_tokens)


def mla(layout: str = "page_first", *, page_tokens: int = PAGE_TOKENS) -> Any:
    """Return a host pool of latent attention."""
    device = MLATokenToKVPool(
        size=TOKENS,
        page_size=page_tokens,
        dtype=torch.bfloat16,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return _host(MLATokenToKVPoolHost, device, layout, page_tokens, target_layer_num=LAYERS)


def mamba(layout: str = "page_first", *, side_states: bool = False) -> Any:
    """Return a host pool of the states of Mamba layers."""
    slots = 32
    info = MambaStateBufferInfo(
        temporal=torch.zeros((LAYERS, slots, 2, 8), dtype=torch.float32),
        conv=(torch.zeros((LAYERS, slots, 6, 3), dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros((slots, 5)),) if side_states else (),
    )
    with host_memory_budget_scope(1 << 30):
        return MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout=layout)


def _host(kind: Any, device: Any, layout: str, page_tokens: int, **more: Any) -> Any:
    with host_memory_budget_scope(1 << 30):
        return kind(
            device.get_device_pool_infos()[0].buffer_info,
            2.0,
            0,
            page_tokens,
            layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=LAYERS,
            **more,
        )


def config_of(target: str, *, model: str = "org/model", **changes: Any) -> HiCacheStorageConfig:
    """Return what SGLang's controller says of a rank. changes: fields of it, or of its extra
    config."""
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "dcp_size": 1,
        "dcp_rank": 0,
        "logical_page_size": None,
        "should_split_heads": False,
        "tp_lcm_size": None,
    }
    fields.update({name: changes.pop(name) for name in list(changes) if name in fields})
    extra = {
        "backend_name": "kvstore",
        "module_path": "kvstore_sglang",
        "class_name": "Storage",
        "interface_v1": 1,
        "target": target,
        "weights": "the tests' own",
        "lookup_deadline_s": 10,  # deadlines are a matter of other tests, and machines are busy
        **changes,
    }
    return HiCacheStorageConfig(model_name=model, extra_config=extra, **fields)


class Rank:
    """A rank's host pool and its storage, which SGLang's own factory has made."""

    def __init__(self, target: str, pool: Any | None = None, **changes: Any) -> None:
        self.pool = mha() if pool is None else pool
        config = config_of(target, **changes)
        self.storage: Any = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()

    def add(self, pool: Any, name: Any) -> Rank:
        self.storage.register_mem_host_pool_v2(pool, name)
        return self

    def fill(self, seed: int) -> Rank:
        fill(self.pool, seed)
        return self

    def save(self, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        done: list[bool] = self.storage.batch_set_v1(list(keys), indices_of(self.pool, pages))
        return done

    def load(self, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        done: list[bool] = self.storage.batch_get_v1(list(keys), indices_of(self.pool, pages))
        return done

    def page(self, number: int) -> bytes:
        return page_of(self.pool, number)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *error: object) -> None:
        self.storage.close()


def fill(pool: Any, seed: int) -> Any:
    """Fill a pool with bytes of its own."""
    generator = torch.Generator().manual_seed(seed)
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, list | tuple) else [pool.kv_buffer]
    for buffer in buffers:
        flat = buffer.reshape(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))
    return pool


def page_of(pool: Any, number: int) -> bytes:
    """Return a page in SGLang's own order of bytes."""
    start = number * pool.page_size
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):  # it has no flat pages
        rows = slice(start, start + pool.page_size)
        parts = [pool.k_buffer[rows], pool.v_buffer[rows]]
        return b"".join(part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)
    flat = pool.get_data_page(start, flat=True).contiguous().view(torch.uint8)
    return bytes(flat.numpy().tobytes())


def indices_of(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """Return the host indices of whole pages."""
    size = pool.page_size
    return torch.tensor(
        [page * size + at for page in pages for at in range(size)], dtype=torch.int64
    )


def hashes(prefix: str, count: int) -> list[str]:
    """Return page hashes as SGLang has them: a chain of SHA-256."""
    chain = [hashlib.sha256(prefix.encode()).hexdigest()]
    while len(chain) < count:
        chain.append(hashlib.sha256(bytes.fromhex(chain[-1])).hexdigest())
    return chain[:count]
