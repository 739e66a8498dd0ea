"""Latent attention on a processor without AMX: vLLM's back end for AMX, over kernels in torch.

vLLM has two back ends for latent attention on the CPU. The one that goes on from a cached prefix
calls kernels for AMX. Here the same back end, cache and scheduler run, and four of its kernels are
torch, in float32 and one request after the other, so that no answer depends on a batch.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

TORCH_KERNELS = "KVSTORE_TEST_LATENT_KERNELS"
"""The variable whose "1" has an engine use these kernels."""


def install() -> None:
    """Replace the kernels in this process, and have the platform choose their back end."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl

    ops.amx_mla_concat_and_cache = _write
    ops.bmm_cpu = _multiply
    ops.cpu_mla_decode = _decode
    ops.cpu_mla_extend = _extend
    platform = type(current_platform)
    for name in ("get_attn_backend_cls", "check_and_update_config"):
        setattr(platform, name, staticmethod(_as_with_tiles(getattr(platform, name))))
    packs = AMXMLAImpl.process_weights_after_loading

    def process(self: Any, act_dtype: torch.dtype) -> None:
        with mock.patch.object(torch.ops._C, "convert_weight_packed", lambda weight: weight):
            packs(self, act_dtype)

    AMXMLAImpl.process_weights_after_loading = process


def _as_with_tiles(asked: Any) -> Any:
    """Return a method that finds AMX while it runs."""

    def method(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True):
            return asked(*args, **kwargs)

    return method


def _write(
    latent: torch.Tensor, rotated: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write tokens (n, 512) and (n, 64) to their rows of the cache; a slot below 0 is padding."""
    used = slots >= 0
    rows = torch.cat([latent, rotated], dim=-1)[used]
    cache.view(-1, cache.shape[-1])[slots[used].long()] = rows.to(cache.dtype)


def _multiply(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    is_vnni: bool,
    scale: torch.Tensor | None = None,
) -> None:
    """out[b] = left[b] @ right[b].T; left: (b, m, k), right: (b, n, k), as it came."""
    assert scale is None, "only weights of 16 bits"
    out.copy_(left.float() @ right.float().transpose(1, 2))


def _decode(*arguments: Any) -> None:
    """Attend with one query of each request; arguments as of vLLM's `cpu_mla_decode`."""
    query, keys, values, out, _, _, _, _, rows_of, requests, seq_lens, scale = arguments[:12]
    for at, (request, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        rows = rows_of[request, :length].long()
        out[at] = _attend(query[at : at + 1], keys[rows], values[rows], scale)[0]


def _extend(*arguments: Any) -> None:
    """Attend with the new tokens of each request, which the cache holds already; arguments as of
    vLLM's `cpu_mla_extend`."""
    query, _, _, out, keys, values, rows_of, requests, seq_lens = arguments[:9]
    new_lens, starts, _, scale = arguments[9:13]
    each = torch.stack([requests, seq_lens, new_lens, starts], dim=1).tolist()
    for request, length, new, start in each:
        rows = rows_of[request, :length].long()
        queries = query[start : start + new]
        out[start : start + new] = _attend(queries, keys[rows], values[rows], scale)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the outputs (n, heads, v) of the last n of s tokens. query: (n, heads, k); keys:
    (s, 1, k); values: (s, 1, v)."""
    new, length = query.shape[0], keys.shape[0]
    scores = torch.einsum("nhk,sk->nhs", query.float(), keys[:, 0].float()) * scale
    at = torch.arange(length)
    later = at[None, :] > at[length - new :, None]
    scores.masked_fill_(later[:, None, :], float("-inf"))
    return torch.einsum("nhs,sv->nhv", scores.softmax(-1), values[:, 0].float()).to(query.dtype)
