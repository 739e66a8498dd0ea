"""Records that are coded: smaller, and the same bit for bit. Models in host memory only."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch

from kvstore import ConfigError, Namespace, checksum
from kvstore_kernels import native
from kvstore_kernels.codec.coder import Coder, Memory
from kvstore_kernels.codec.copies import CodedCopies, Scratch
from kvstore_kernels.codec.places import Axis, Place, Shape, Unplaced
from kvstore_kernels.codec.record import DType
from kvstore_kernels.host import HostPages
from kvstore_transformers.cache import Pages
from kvstore_transformers.namespace import LayerGroup, Layout, build_namespace

logger = logging.getLogger(__name__)

Record = Literal["auto", "l3", "raw"]
FORM = "l3/1"
_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32}


class Coding:
    """How the blocks of one model are coded.

    record_nbytes: the most of a record of each group. form: what models have to agree on to read
    each other's records.
    """

    def __init__(self, layout: Layout, block_tokens: int) -> None:
        """Raise Unplaced for a model whose KV is not coded."""
        if layout.device.type != "cpu":
            raise Unplaced("the model is on a GPU")
        self._shapes = [_shape(group, block_tokens) for group in layout.groups]
        self.record_nbytes = [shape.record_nbytes for shape in self._shapes]
        self.form = " ".join([FORM, *(f"{shape.digest:016x}" for shape in self._shapes)])
        self._scratch = [Scratch() for _ in self._shapes]

    def copies(self, group: int, pages: Pages) -> CodedCopies:
        """Return what codes these pages, wherever they lie."""
        layers = [Memory(page.data_ptr(), page.stride(0) * page.element_size()) for page in pages]
        places = [
            [_place(kind, page)] for page, kind in zip(pages, "KV" * len(pages), strict=False)
        ]
        coder = Coder(self._shapes[group], layers, HostPages(pages), checksum, places)
        return CodedCopies(coder, checksum, self._scratch[group])


def open_coding(layout: Layout, block_tokens: int, record: Record) -> Coding | None:
    """Return how a model's blocks are coded; None: they are stored as they are.

    Raises ConfigError if that was asked for by name and is not possible.
    """
    if record not in ("auto", "l3", "raw"):
        raise ConfigError(f"record={record!r}: auto, l3 and raw are known")
    if record == "raw":
        return None
    why = native.reason()
    if not why:
        try:
            return Coding(layout, block_tokens)
        except Unplaced as error:
            why = str(error)
    if record == "l3":
        raise ConfigError(f"record='l3' is not possible here: {why}; use 'auto' or 'raw'")
    logger.info("record=raw reason=%r", why)
    return None


def namespace_for(
    coding: Coding | None, model: Any, layout: Layout, block_tokens: int, weights: str
) -> Namespace:
    """Describe the KV of `model` as it is stored. weights: "" if they are not known yet."""
    if coding is None:
        return build_namespace(model, layout, block_tokens, weights)
    sizes = coding.record_nbytes
    return build_namespace(
        model, layout, block_tokens, weights, coded=coding.form, record_nbytes=sizes
    )


def _shape(group: LayerGroup, block_tokens: int) -> Shape:
    """Return the shape of a record: keys and values by layer, heads outermost."""
    parts = [part for pair in zip(group.keys, group.values, strict=True) for part in pair]
    dtypes = {_DTYPES.get(part.dtype) for part in parts}
    dtype = dtypes.pop()
    if dtypes or dtype is None or dtype is DType.FP16:
        raise Unplaced("the KV is neither bfloat16 nor float32")
    return Shape(
        [
            [_place(kind, part.new_empty((1, part.shape[1], block_tokens, part.shape[3])))]
            for part, kind in zip(parts, "KV" * len(parts), strict=False)
        ],
        dtype,
    )


def _place(kind: str, pages: torch.Tensor) -> Place:
    """Describe one block of pages (blocks, heads, tokens, channels)."""
    _, heads, tokens, channels = (
        Axis(count, stride) for count, stride in zip(pages.shape, pages.stride(), strict=True)
    )
    return Place(kind, heads, tokens, channels)
