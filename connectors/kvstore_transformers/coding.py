"""Records that are coded: smaller, and the same bit for bit, or lossy where that was asked for.

What they are is said here, and follows from the model alone: a GPU and a CPU make the same bytes.
`coded_host.py` and `coded_device.py` make them where the model is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvstore import Namespace
from kvstore_kernels.codec.coder import BASE_PLANES, FINE_PLANES
from kvstore_kernels.codec.copies import Decoded
from kvstore_kernels.codec.copies import Fine as FinePart
from kvstore_kernels.codec.places import Axis, Place, Shape, Unplaced
from kvstore_kernels.codec.record import DType
from kvstore_kernels.registration import Extents
from kvstore_transformers.cache import Pages
from kvstore_transformers.namespace import Fine, LayerGroup, Layout, build_namespace

FORM = "l3/1"
LOSSY_FORM = "ep/1"
_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32}


@dataclass(slots=True)
class FineParts:
    """How many fine parts loads have used, have not got, and have got wrong, so far."""

    used: int = 0
    missing: int = 0
    wrong: int = 0


class Sized(Protocol):
    """A record in memory of its copier's own."""

    @property
    def nbytes(self) -> int: ...


class Encoded(Protocol):
    """The records of one block. fine: of a lossy block. uncoded: the base is raw."""

    @property
    def base(self) -> Sized: ...

    @property
    def fine(self) -> Sized | None: ...

    @property
    def uncoded(self) -> bool: ...


class CodedCopier(ABC):
    """Copies coded records between a cache's pages and the arena's slots. Encoding and decoding may
    run at once, each in one thread at a time.

    encoded_nbytes_max: how much is to be encoded at once, in bytes as the model has them.
    bounced_nbytes: what went through a buffer, because the device does not reach the arena (yet).
    """

    encoded_nbytes_max: int

    def __init__(self, coding: Coding) -> None:
        self.coding = coding

    @property
    @abstractmethod
    def bounced_nbytes(self) -> int: ...

    @abstractmethod
    def enter_thread(self) -> None:
        """Called first in every thread that copies."""

    @abstractmethod
    def mark(self) -> Any:
        """Return the point the model has reached; what is coded `after` it sees that work done."""

    @abstractmethod
    def open(self, group: int, pages: Pages) -> Any:
        """Return pages of a group, wherever they lie, as the other methods want them."""

    @abstractmethod
    def encode(
        self, opened: Any, blocks: Sequence[int], exact: Sequence[bool], after: Any
    ) -> Sequence[Encoded]:
        """Encode blocks; done when this returns.

        The records stay as they are until the next call for pages of this group. exact: of lossy
        records, the blocks that are stored exactly all the same; none: no block is.
        """

    @abstractmethod
    def store(self, opened: Any, parts: Sequence[tuple[Sized, memoryview]]) -> Sequence[int]:
        """Copy records of the group's last `encode` into slots of their sizes; done when this
        returns. Returns the checksums of the records, as they were meant to be."""

    @abstractmethod
    def refine(
        self,
        opened: Any,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[FinePart | None],
        after: Any,
    ) -> list[Decoded]:
        """Decode records into blocks, with the fine parts that there are; done when this returns.

        What is summed up and decoded is a private copy: a slot that changes later changes nothing.
        """

    @abstractmethod
    def wait_reached(self, timeout_s: float) -> bool:
        """Wait until the device reaches all of the arena by itself. False: not yet, or never."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the arena; no copies after it."""


class Coding(ABC):
    """How the blocks of one model are coded.

    lossy: by EP, in a base and a fine part; the first block of a sequence exactly all the same.
    shapes: of each group's records. record_nbytes: the most that one has. base_nbytes, fine_nbytes:
    of lossy records, what each group's have. form: what models have to agree on to read each
    other's records.
    """

    def __init__(self, layout: Layout, block_tokens: int, *, lossy: bool) -> None:
        """Raise Unplaced for a model whose KV is not coded."""
        self.lossy = lossy
        self.fine_parts = FineParts()
        self.shapes = [_shape(group, block_tokens, lossy=lossy) for group in layout.groups]
        self.record_nbytes = [shape.record_nbytes for shape in self.shapes]
        self.base_nbytes = [shape.ep_nbytes(BASE_PLANES, base=True) for shape in self.shapes]
        self.fine_nbytes = [shape.ep_nbytes(FINE_PLANES, base=False) for shape in self.shapes]
        form = " ".join([LOSSY_FORM, *map(_planes, (BASE_PLANES, FINE_PLANES))]) if lossy else FORM
        self.form = " ".join([form, *(f"{shape.digest:016x}" for shape in self.shapes)])

    @abstractmethod
    def copier(self, extents: Extents) -> CodedCopier:
        """Return what copies such records. extents: `Client.extents`."""

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


def places_of(pages: Pages) -> list[list[Place]]:
    """Return where values lie in a block of each of a group's pages: keys, values, by layer."""
    return [[_place(kind, page)] for page, kind in zip(pages, "KV" * len(pages), strict=False)]


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
    block = [part.new_empty((1, part.shape[1], block_tokens, part.shape[3])) for part in parts]
    return Shape(places_of(block), dtype)


def _place(kind: str, pages: torch.Tensor) -> Place:
    """Describe one block of pages (blocks, heads, tokens, channels)."""
    _, heads, tokens, channels = (
        Axis(count, stride) for count, stride in zip(pages.shape, pages.stride(), strict=True)
    )
    return Place(kind, heads, tokens, channels)
