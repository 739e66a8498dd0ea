"""Records that are coded: smaller, and the same bit for bit, or lossy where that was asked for.
Models in host memory only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvstore import ConfigError, Namespace, checksum
from kvstore_kernels import native
from kvstore_kernels.codec.coder import BASE_PLANES, FINE_PLANES, Coder, Memory
from kvstore_kernels.codec.copies import CodedCopies, Decoded, Scratch
from kvstore_kernels.codec.places import Axis, Place, Shape, Unplaced
from kvstore_kernels.codec.record import DType
from kvstore_kernels.host import HostPages
from kvstore_transformers.cache import Pages
from kvstore_transformers.namespace import Fine, LayerGroup, Layout, build_namespace

logger = logging.getLogger(__name__)

Record = Literal["auto", "l3", "raw"]
Fidelity = Literal["exact", "ep"]
FORM = "l3/1"
LOSSY_FORM = "ep/1"
_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32}


@dataclass(slots=True)
class FineParts:
    """How many fine parts loads have used, have not got, and have got wrong, so far."""

    used: int = 0
    missing: int = 0
    wrong: int = 0


class Coding:
    """How the blocks of one model are coded.

    lossy: by EP, in a base and a fine part; the first block of a sequence exactly all the same.
    record_nbytes: the most of a record of each group. base_nbytes, fine_nbytes: of lossy records,
    what each group's have. form: what models have to agree on to read each other's records.
    """

    def __init__(self, layout: Layout, block_tokens: int, *, lossy: bool = False) -> None:
        """Raise Unplaced for a model whose KV is not coded."""
        if layout.device.type != "cpu":
            raise Unplaced("the model is on a GPU")
        self.lossy = lossy
        self.fine_parts = FineParts()
        self._shapes = [_shape(group, block_tokens, lossy=lossy) for group in layout.groups]
        self.record_nbytes = [shape.record_nbytes for shape in self._shapes]
        self.base_nbytes = [shape.ep_nbytes(BASE_PLANES, base=True) for shape in self._shapes]
        self.fine_nbytes = [shape.ep_nbytes(FINE_PLANES, base=False) for shape in self._shapes]
        form = " ".join([LOSSY_FORM, *map(_planes, (BASE_PLANES, FINE_PLANES))]) if lossy else FORM
        self.form = " ".join([form, *(f"{shape.digest:016x}" for shape in self._shapes)])
        self._scratch = [Scratch() for _ in self._shapes]

    def copies(self, group: int, pages: Pages) -> CodedCopies:
        """Return what codes these pages, wherever they lie."""
        layers = [Memory(page.data_ptr(), page.stride(0) * page.element_size()) for page in pages]
        places = [
            [_place(kind, page)] for page, kind in zip(pages, "KV" * len(pages), strict=False)
        ]
        coder = Coder(self._shapes[group], layers, HostPages(pages), checksum, places)
        return CodedCopies(coder, checksum, self._scratch[group], lossy=self.lossy)

    def note_fines(self, group: int, sizes: Sequence[int], decoded: Sequence[Decoded]) -> int:
        """Count the fine parts of decoded blocks; return how many were missing.

        sizes: of the base records, in bytes: exact ones have no fine part.
        """
        refined = [each.refined for each in decoded]
        lossy = [self.lossy and nbytes == self.base_nbytes[group] for nbytes in sizes]
        missing = sum(mine and got is None for mine, got in zip(lossy, refined, strict=True))
        self.fine_parts.used += refined.count(True)
        self.fine_parts.wrong += refined.count(False)
        self.fine_parts.missing += missing
        return missing


def open_coding(
    layout: Layout, block_tokens: int, record: Record, fidelity: Fidelity = "exact"
) -> Coding | None:
    """Return how a model's blocks are coded; None: they are stored as they are.

    Raises ConfigError if that was asked for by name and is not possible.
    """
    if record not in ("auto", "l3", "raw"):
        raise ConfigError(f"record={record!r}: auto, l3 and raw are known")
    if fidelity not in ("exact", "ep"):
        raise ConfigError(f"fidelity={fidelity!r}: exact and ep are known")
    if record == "raw":
        if fidelity == "ep":
            raise ConfigError(
                "fidelity='ep' stores coded records: leave out record='raw' and "
                "direct_storage='always', or use fidelity='exact'"
            )
        return None
    why = native.reason()
    if not why:
        try:
            return Coding(layout, block_tokens, lossy=fidelity == "ep")
        except Unplaced as error:
            why = str(error)
    if fidelity == "ep":
        raise ConfigError(f"fidelity='ep' is not possible here: {why}; use fidelity='exact'")
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
    fine = [Fine(*each) for each in zip(coding.fine_nbytes, coding.base_nbytes, strict=True)]
    return build_namespace(
        model,
        layout,
        block_tokens,
        weights,
        coded=coding.form,
        record_nbytes=coding.record_nbytes,
        fine=fine if coding.lossy else (),
    )


def _planes(planes: tuple[int, int]) -> str:
    keys, values = planes
    return f"k{keys}v{values}"


def _shape(group: LayerGroup, block_tokens: int, *, lossy: bool) -> Shape:
    """Return the shape of a record: keys and values by layer, heads outermost."""
    parts = [part for pair in zip(group.keys, group.values, strict=True) for part in pair]
    dtypes = {_DTYPES.get(part.dtype) for part in parts}
    dtype = dtypes.pop()
    if dtypes or dtype is None:
        raise Unplaced("the KV is neither bfloat16, float16 nor float32")
    if dtype is DType.FP16 and not lossy:
        raise Unplaced("float16 is not coded exactly: the KV is neither bfloat16 nor float32")
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
