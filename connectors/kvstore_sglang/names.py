"""SGLang's page hashes become namespaces and keys of ours.

A pool of host memory has a namespace of its own: what a page of it holds follows from the weights,
from how SGLang computes and keeps KV, from the pool's layout, and from which rank's part it is. If
ranks cut their pages by heads, each part has one.

A page's hash is SGLang's SHA-256 over all tokens up to its end, adapters and salts included. Its
key:

    SHA-256("kvstore.sglang.v1" | namespace id | u32 length | the hash as text)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore import BlockKey, Group, Incompatible, Namespace
from kvstore.client.pages import Place
from kvstore.model.names import model_name
from kvstore_sglang.host_pages import HostPages

KEY_CHARS_MAX = 4096
_TAG = b"kvstore.sglang.v1"


def check_config(config: Any) -> None:
    """Raise Incompatible for an engine whose pages cannot be told apart, or not be shared."""
    if getattr(config, "dcp_size", 1) > 1:
        raise Incompatible("kvstore does not support decode context parallelism (DCP) of SGLang")


def cuts_of(config: Any) -> int:
    """Return in how many parts a rank cuts the heads of its KV pages, so that engines of another
    degree of tensor parallelism find them."""
    if not getattr(config, "should_split_heads", False):
        return 1
    return int(config.tp_lcm_size) // int(config.tp_size)


def part_of(config: Any, pages: HostPages, cut: int) -> dict[str, str]:
    """Return which part of a model's KV a record of this rank holds, as fields of an identity."""
    part = {
        "pipeline": f"{config.pp_rank} of {config.pp_size}",
        "context": f"{config.attn_cp_rank} of {config.attn_cp_size}",
        "tensor": f"{config.tp_rank * pages.cuts + cut} of {config.tp_size * pages.cuts}",
    }
    if config.is_mla_model and pages.replicated:
        part["tensor"] = "replicated"  # the same on all ranks of every degree: stored once
    return part


class Names:
    """Names the pages of one SGLang. version: SGLang's. values: what decides its KV."""

    def __init__(self, config: Any, version: str, values: Mapping[str, str]) -> None:
        self._config = config
        self._common = {**values, "engine": f"sglang {version}"}
        self._weights: Mapping[str, str] = {}
        self._spaces: dict[tuple[str, int], tuple[Namespace, bytes]] = {}

    def places(
        self,
        pages: HostPages,
        keys: Sequence[str | None],
        weights: Mapping[str, str],
        block_tokens: int,
    ) -> list[Place | None]:
        """Return where the records of pages are stored, `pages.cuts` of each page; None for what is
        no key. block_tokens: per page of KV."""
        spaces = [self._space(pages, cut, weights, block_tokens) for cut in range(pages.cuts)]
        return [
            Place(namespace, _key(root, key))
            if isinstance(key, str) and 0 < len(key) <= KEY_CHARS_MAX
            else None
            for key in keys
            for namespace, root in spaces
        ]

    def namespaces(
        self, pages: HostPages, weights: Mapping[str, str], block_tokens: int
    ) -> list[Namespace]:
        """Return the namespaces of a pool."""
        cuts = range(pages.cuts)
        return [self._space(pages, cut, weights, block_tokens)[0] for cut in cuts]

    def _space(
        self, pages: HostPages, cut: int, weights: Mapping[str, str], block_tokens: int
    ) -> tuple[Namespace, bytes]:
        """Return the namespace of records, and what all their keys begin with."""
        if weights != self._weights:
            self._weights, self._spaces = dict(weights), {}
        known = self._spaces.get((pages.name, cut))
        if known is None:
            identity = {
                **self._common,
                **weights,
                **part_of(self._config, pages, cut),
                "pool": pages.name,
                "page": pages.shape,
            }
            namespace = Namespace(
                block_tokens=block_tokens,
                groups=(Group(pages.name, pages.nbytes),),
                identity=tuple(sorted(identity.items())),
                name=model_name(str(self._config.model_name or "")),
            )
            known = self._spaces[pages.name, cut] = namespace, _TAG + namespace.id
        return known


def _key(root: bytes, key: str) -> BlockKey:
    text = key.encode("utf-8", "surrogatepass")
    return BlockKey(hashlib.sha256(root + struct.pack("<I", len(text)) + text).digest())
