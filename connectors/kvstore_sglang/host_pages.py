"""The pages of one of SGLang's host pools, as memory that records are copied to and from.

A record holds a page in the order of SGLang's own flat pages (`get_data_page`). Where that order is
known of the places that a pool gives for zero copy, records go straight to and from its buffers;
elsewhere SGLang makes the flat page, with one copy more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvstore import ConfigError, Incompatible
from kvstore.client.pieces import Memory, Pieces

IN_PLACE = {
    "AsymmetricMHATokenToKVPoolHost",
    "DSAIndexerPoolHost",
    "DeepSeekV4PagedHostPool",
    "MHATokenToKOnlyPoolHost",
    "MHATokenToKVPoolHost",
    "MLATokenToKVPoolHost",
    "MambaPoolHost",
}
"""Pools whose places for zero copy make up the flat page, one behind the other."""
REPLICATED = {
    "DSAIndexerPoolHost",
    "DeepSeekV4PagedHostPool",
    "DeepSeekV4StateHostPool",
    "LogicalHostPool",
    "MLATokenToKVPoolHost",
}
"""Pools that hold the same on all ranks of an engine with latent attention."""
SHAPE = (
    "layout",
    "dtype",
    "page_size",
    "size_per_token",
    "storage_format_tag",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_group_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "item_bytes",
    "slot_page_size",
    "indexer_dtype",
    "num_mamba_layers",
    "temporal_dtype",
    "temporal_state_shape",
    "conv_dtype",
    "conv_state_shapes",
)
"""Attributes of pools that say what a page's bytes mean."""


OF_HEADS = ("head_num", "size_per_token")
"""Those of a part of the heads are a part of these."""


class _Buffer(NamedTuple):
    begin: int
    view: memoryview


class HostPages:
    """nbytes: of a record; 0 if the pool holds no bytes at all. cuts: records of each page, each
    with as many of its heads. shape: what they mean, as text."""

    def __init__(self, pool: Any, name: str, cuts: int = 1) -> None:
        """Raises Incompatible for a pool whose pages cannot be had, ConfigError for its layout."""
        self.name = name
        self.cuts = cuts
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self._pool = pool
        self._kind = type(pool).__name__
        self.replicated = self._kind in REPLICATED
        self._buffers: list[_Buffer] = []
        self._flat_dtype = torch.uint8
        self.in_place = False
        self.nbytes = 0
        if self._kind != "LogicalHostPool":
            self._buffers = _buffers(pool) if self._kind in IN_PLACE else []
            self.in_place, self.nbytes = self._measured()
        said = {each: getattr(pool, each) for each in SHAPE if hasattr(pool, each)}
        if cuts > 1:
            said.update({each: said[each] // cuts for each in OF_HEADS})
        said = {each: str(value) for each, value in said.items()}
        self.shape = json.dumps({"pool": self._kind, **said}, sort_keys=True)

    def to_save(self, indices: torch.Tensor) -> Sequence[Memory]:
        """Return the records of the pages at `indices`, `page_size` indices each."""
        if self.in_place:
            return self._places(indices)
        starts = indices[:: self.page_size].tolist()
        return [_bytes_of(self._pool.get_data_page(start, flat=True)) for start in starts]

    def to_load(self, indices: torch.Tensor) -> Sequence[Memory]:
        """Return memory to load records into; `loaded` has to be called when that is done."""
        if self.in_place:
            return self._places(indices)
        pages = len(indices) // self.page_size
        return [memoryview(bytearray(self.nbytes)) for _ in range(pages)]

    def loaded(self, indices: torch.Tensor, memory: Sequence[Memory], good: Sequence[bool]) -> None:
        """Put what was loaded where it belongs; nothing of what is not `good`."""
        if self.in_place:
            return
        starts = indices[:: self.page_size].tolist()
        for start, each, is_good in zip(starts, memory, good, strict=True):
            if is_good and isinstance(each, memoryview):
                flat = torch.frombuffer(each, dtype=torch.uint8)
                self._pool.set_from_flat_data_page(start, flat.view(self._flat_dtype))

    def of_flat(self, page: memoryview) -> list[Memory]:
        """Return the records of one of SGLang's flat pages."""
        if self.cuts == 1:
            return [page]
        keys, values = page[: len(page) // 2], page[len(page) // 2 :]
        step = len(keys) // self.cuts
        return [
            Pieces([keys[at : at + step], values[at : at + step]])
            for at in range(0, step * self.cuts, step)
        ]

    def fits(self, keys: Sequence[str], indices: torch.Tensor | None) -> bool:
        """Say whether there is a page for each key."""
        return indices is not None and indices.numel() == len(keys) * self.page_size

    def _measured(self) -> tuple[bool, int]:
        """Return whether pages are had in place, and how many bytes a record has."""
        first = torch.arange(self.page_size, dtype=torch.int64)
        if self._buffers:
            try:
                return True, self._places(first)[0].nbytes
            except (AssertionError, NotImplementedError, ValueError):
                pass  # not in this layout: SGLang's flat pages then
        if self.cuts > 1:
            raise ConfigError(
                f"pages of SGLang's pool {self.name} ({self._kind}, {self._pool.layout}) are not "
                f"cut in {self.cuts} by heads: leave tp_lcm_size out, or choose another"
            )
        try:
            page = self._pool.get_data_page(0, flat=True)
        except ValueError as error:
            raise ConfigError(
                f"kvstore cannot read pages of SGLang's pool {self.name} ({self._kind}): {error}; "
                "use --hicache-mem-layout page_first"
            ) from error
        except NotImplementedError as error:
            raise Incompatible(
                f"SGLang's pool {self.name} ({self._kind}) has no pages to store: {error}"
            ) from error
        self._flat_dtype = page.dtype
        return False, _bytes_of(page).nbytes

    def _places(self, indices: torch.Tensor) -> list[Memory]:
        records = len(indices) // self.page_size * self.cuts
        if self.cuts > 1:
            starts, sizes = self._pool.get_split_heads_page_buffer_meta(indices, self.cuts)
        else:
            starts, sizes = self._pool.get_page_buffer_meta(indices)
        if not records or len(starts) % records or len(starts) != len(sizes):
            raise ValueError(f"{len(starts)} places for {records} records")
        views = [self._view(start, size) for start, size in zip(starts, sizes, strict=True)]
        each = len(starts) // records
        return [self._page(views[at : at + each]) for at in range(0, len(views), each)]

    def _page(self, views: list[memoryview]) -> Memory:
        if len(views) == 1:
            return views[0]
        if self._pool.layout == "layer_first" and self._kind == "MHATokenToKVPoolHost":
            views = views[0::2] + views[1::2]  # keys and values take turns; all keys come first
        return Pieces(views)

    def _view(self, start: int, size: int) -> memoryview:
        for begin, whole in self._buffers:
            if begin <= start and start + size <= begin + len(whole):
                return whole[start - begin : start - begin + size]
        raise ValueError(f"a page of pool {self.name} lies outside its buffers")


def _buffers(pool: Any) -> list[_Buffer]:
    """Return the memory of a pool; nothing if it does not show all of it."""
    shown = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else None
    shown = pool.kv_buffer if shown is None else shown
    tensors = [shown] if isinstance(shown, torch.Tensor) else list(shown or [])
    whole = all(isinstance(each, torch.Tensor) and each.is_contiguous() for each in tensors)
    if not whole or any(each.device.type != "cpu" for each in tensors):
        return []
    return [_Buffer(each.data_ptr(), _bytes_of(each)) for each in tensors if each.numel()]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy()).cast("B")
