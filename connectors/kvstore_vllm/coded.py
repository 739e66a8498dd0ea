"""Pages in host memory whose records are coded: smaller, and the same bit for bit, or smaller still
and nearly the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from kvstore.model.checksum import checksum
from kvstore.model.errors import ConfigError
from kvstore_kernels import native
from kvstore_kernels.codec.coder import BASE_PLANES, FINE_PLANES, Coder, Encoded, Memory
from kvstore_kernels.codec.copies import CodedCopies, Decoded, Fine, Scratch
from kvstore_kernels.codec.places import Unplaced
from kvstore_kernels.codec.record import DType
from kvstore_kernels.host import HostPages
from kvstore_vllm.metadata import LossySizes
from kvstore_vllm.pages import HostMemory
from kvstore_vllm.places import shape_of

logger = logging.getLogger(__name__)

Record = Literal["auto", "l3", "raw"]
Fidelity = Literal["exact", "ep"]
FORM = "l3/1"
LOSSY_FORM = "ep/1 K{}V{}+K{}V{}".format(*BASE_PLANES, *FINE_PLANES)
"""With the planes of keys and values in a base part, and in a fine part."""


DO_WITHOUT = 'use "fidelity": "exact", which is the default'


class CodedHostMemory(HostMemory):
    """The KV cache of one worker in host memory, as coded records.

    shapes: of each group's records; part of what the KV is.
    """

    coded = True

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        isas: Sequence[Sequence[str]],
        *,
        lossy: bool = False,
    ) -> None:
        """lossy: by EP, in base and fine parts.

        Raise Unplaced where keys and values cannot be told apart in a block.
        """
        super().__init__(groups)
        self.shapes = [shape_of(layers, each) for layers, each in zip(groups, isas, strict=True)]
        if not lossy and any(shape.dtype is DType.FP16 for shape in self.shapes):
            raise Unplaced("float16 has too few bits of exponent to gain by")
        self._copies = [
            CodedCopies(
                Coder(shape, _memory(layers), HostPages(layers), checksum),
                checksum,
                Scratch(),
                lossy=lossy,
            )
            for shape, layers in zip(self.shapes, groups, strict=True)
        ]
        self.record_nbytes = [copies.record_nbytes for copies in self._copies]
        if lossy:
            self.lossy = [
                LossySizes(
                    base_nbytes=shape.ep_nbytes(BASE_PLANES, base=True),
                    fine_nbytes=shape.ep_nbytes(FINE_PLANES, base=False),
                )
                for shape in self.shapes
            ]

    @property
    def form(self) -> str:
        shapes = [f"{shape.digest:016x}" for shape in self.shapes]
        return " ".join([LOSSY_FORM if self.lossy else FORM, *shapes])

    def encode(
        self, group: int, blocks: Sequence[int], exact: Sequence[bool] = ()
    ) -> list[Encoded]:
        """Encode device blocks; the records are valid until the group's next call."""
        return self._copies[group].encode(blocks, exact)

    def write(
        self, group: int, blocks: Sequence[int], records: Sequence[memoryview], after: None
    ) -> Sequence[int | None]:
        return self._copies[group].decode(blocks, records)

    def refine(
        self,
        group: int,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[Fine | None],
    ) -> list[Decoded]:
        return self._copies[group].refine(blocks, records, fines)


def open_host_memory(
    groups: Sequence[Sequence[torch.Tensor]],
    isas: Sequence[Sequence[str]],
    record: Record,
    fidelity: Fidelity = "exact",
) -> HostMemory:
    """Return pages in host memory: coded if that is wanted and possible.

    Raises ConfigError if it was asked for by name and is not possible.
    """
    lossy = fidelity == "ep"
    if record == "raw" and not lossy:
        return HostMemory(groups)
    why = '"record" is "raw"' if record == "raw" else native.reason()
    if not why:
        try:
            return CodedHostMemory(groups, isas, lossy=lossy)
        except Unplaced as error:
            why = str(error)
        except Exception as error:  # the engine's own function, called in a way it may not know
            why = f"where values lie in a block cannot be found out: {error!r}"
    if lossy:
        raise ConfigError(f'"fidelity": "ep" is not possible here: {why}; {DO_WITHOUT}')
    if record == "l3":
        raise ConfigError(f'"record": "l3" is not possible here: {why}; use "auto" or "raw"')
    logger.warning("record=raw reason=%r", why)
    return HostMemory(groups)


def _memory(layers: Sequence[torch.Tensor]) -> list[Memory]:
    return [Memory(layer.data_ptr(), layer.stride(0) * layer.element_size()) for layer in layers]
