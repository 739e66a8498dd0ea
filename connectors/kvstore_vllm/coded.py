"""Pages in host memory whose records are coded: smaller, and the same bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from kvstore.model.checksum import checksum
from kvstore.model.errors import ConfigError
from kvstore_kernels import native
from kvstore_kernels.codec.coder import Coder, Memory
from kvstore_kernels.codec.copies import CodedCopies, Scratch
from kvstore_kernels.codec.places import Unplaced
from kvstore_kernels.codec.record import DType
from kvstore_kernels.host import HostPages
from kvstore_vllm.pages import HostMemory
from kvstore_vllm.places import shape_of

logger = logging.getLogger(__name__)

Record = Literal["auto", "l3", "raw"]
FORM = "l3/1"


class CodedHostMemory(HostMemory):
    """The KV cache of one worker in host memory, as coded records.

    shapes: of each group's records; part of what the KV is.
    """

    coded = True

    def __init__(
        self, groups: Sequence[Sequence[torch.Tensor]], isas: Sequence[Sequence[str]]
    ) -> None:
        """Raise Unplaced where keys and values cannot be told apart in a block."""
        super().__init__(groups)
        self.shapes = [shape_of(layers, each) for layers, each in zip(groups, isas, strict=True)]
        if any(shape.dtype is DType.FP16 for shape in self.shapes):
            raise Unplaced("float16 has too few bits of exponent to gain by")
        self._copies = [
            CodedCopies(
                Coder(shape, _memory(layers), HostPages(layers), checksum), checksum, Scratch()
            )
            for shape, layers in zip(self.shapes, groups, strict=True)
        ]
        self.raw_nbytes = self.record_nbytes
        self.record_nbytes = [copies.record_nbytes for copies in self._copies]

    @property
    def form(self) -> str:
        shapes = " ".join(f"{shape.digest:016x}" for shape in self.shapes)
        return f"{FORM} {shapes}"

    def encode(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        """Encode device blocks; the records are valid until the group's next call."""
        return [each.base for each in self._copies[group].encode(blocks)]

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: None
    ) -> Sequence[int | None]:
        return self._copies[group].decode(blocks, records)


def open_host_memory(
    groups: Sequence[Sequence[torch.Tensor]], isas: Sequence[Sequence[str]], record: Record
) -> HostMemory:
    """Return pages in host memory: coded if that is wanted and possible.

    Raises ConfigError if it was asked for by name and is not possible.
    """
    if record == "raw":
        return HostMemory(groups)
    why = native.reason()
    if not why:
        try:
            return CodedHostMemory(groups, isas)
        except Unplaced as error:
            why = str(error)
        except Exception as error:  # the engine's own function, called in a way it may not know
            why = f"where values lie in a block cannot be found out: {error!r}"
    if record == "l3":
        raise ConfigError(f'"record": "l3" is not possible here: {why}; use "auto" or "raw"')
    logger.warning("record=raw reason=%r", why)
    return HostMemory(groups)


def _memory(layers: Sequence[torch.Tensor]) -> list[Memory]:
    return [Memory(layer.data_ptr(), layer.stride(0) * layer.element_size()) for layer in layers]
