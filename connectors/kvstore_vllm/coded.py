"""Pages in host memory whose records are coded: smaller, and the same bit for bit, or smaller still
and nearly the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch

from kvstore.model.checksum import checksum, copies_in
from kvstore.model.errors import ConfigError
from kvstore_kernels import native
from kvstore_kernels.codec.coder import BASE_PLANES, FINE_PLANES, Coder, Memory
from kvstore_kernels.codec.copies import CodedCopies, Decoded, Fine, Scratch
from kvstore_kernels.codec.places import Shape, Unplaced
from kvstore_kernels.codec.record import DType
from kvstore_kernels.host import HostPages
from kvstore_vllm.metadata import LossySizes
from kvstore_vllm.packings import Packing
from kvstore_vllm.pages import Encoded, HostMemory, Sized
from kvstore_vllm.places import shape_of

logger = logging.getLogger(__name__)

Record = Literal["auto", "l3", "raw"]
Fidelity = Literal["exact", "ep"]
FORM = "l3/1"
LOSSY_FORM = "ep/1 K{}V{}+K{}V{}".format(*BASE_PLANES, *FINE_PLANES)
"""With the planes of keys and values in a base part, and in a fine part."""


RAW_WANTED = '"record" is "raw"'
DO_WITHOUT = 'use "fidelity": "exact", which is the default'


class CodedHostMemory(HostMemory):
    """The KV cache of one worker in host memory, as coded records.

    shapes: of each group's records; part of what the KV is.
    """

    coded = True

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        packings: Sequence[Sequence[Packing]],
        *,
        lossy: bool = False,
        shards: int = 1,
    ) -> None:
        """packings: of each layer of each group. lossy: by EP, in base and fine parts. shards: how
        many of `groups`, one after another, are shards of one group of the engine.

        Raise Unplaced where it is not known what lies where in a block.
        """
        super().__init__(groups)
        self.shapes = [shape_of(*each) for each in zip(groups, packings, strict=True)]
        check_gain(self.shapes, lossy=lossy)
        self._form = form_of(self.shapes[::shards], lossy=lossy)
        self._copies = [
            CodedCopies(
                Coder(shape, Memory.of(layers), HostPages(layers), checksum),
                checksum,
                Scratch(),
                lossy=lossy,
            )
            for shape, layers in zip(self.shapes, groups, strict=True)
        ]
        self.record_nbytes = [copies.record_nbytes for copies in self._copies]
        if lossy:
            self.lossy = lossy_sizes(self.shapes)

    @property
    def form(self) -> str:
        return self._form

    def encode(
        self, group: int, blocks: Sequence[int], after: None, exact: Sequence[bool] = ()
    ) -> list[Encoded]:
        """Encode device blocks; the records are valid until the group's next call."""
        return [Encoded(*each) for each in self._copies[group].encode(blocks, exact)]

    def store(self, group: int, parts: Sequence[tuple[Sized, memoryview]]) -> Sequence[int]:
        records = [cast(memoryview, record) for record, _ in parts]
        return copies_in(records, [view for _, view in parts])

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
        after: Any,
    ) -> list[Decoded]:
        return self._copies[group].refine(blocks, records, fines)


def check_gain(shapes: Sequence[Shape], *, lossy: bool) -> None:
    """Raise Unplaced for shapes whose exact records would be no smaller than blocks are."""
    if not lossy and any(shape.dtype is DType.FP16 for shape in shapes):
        raise Unplaced("float16 has too few bits of exponent to gain by")


def lossy_sizes(shapes: Sequence[Shape]) -> list[LossySizes]:
    """Return the sizes of lossy records, by group."""
    return [
        LossySizes(
            base_nbytes=shape.ep_nbytes(BASE_PLANES, base=True),
            fine_nbytes=shape.ep_nbytes(FINE_PLANES, base=False),
        )
        for shape in shapes
    ]


def form_of(shapes: Sequence[Shape], *, lossy: bool) -> str:
    """Return what engines have to agree on: the form of records, and the shape of each group's."""
    digests = [f"{shape.digest:016x}" for shape in shapes]
    return " ".join([LOSSY_FORM if lossy else FORM, *digests])


def open_host_memory(
    groups: Sequence[Sequence[torch.Tensor]],
    packings: Sequence[Sequence[Packing]],
    record: Record,
    fidelity: Fidelity = "exact",
    *,
    shards: int = 1,
) -> HostMemory:
    """Return pages in host memory: coded if that is wanted and possible.

    packings: of each layer of each group. shards: how many of `groups` are shards of one group of
    the engine. Raises ConfigError if coding was asked for by name and is not possible.
    """
    lossy = fidelity == "ep"
    if record == "raw" and not lossy:
        return HostMemory(groups)
    why = RAW_WANTED if record == "raw" else native.reason()
    if not why:
        try:
            return CodedHostMemory(groups, packings, lossy=lossy, shards=shards)
        except Unplaced as error:
            why = str(error)
        except Exception as error:  # the engine's own function, called in a way it may not know
            why = f"where values lie in a block cannot be found out: {error!r}"
    settle_for_raw(why, record, fidelity)
    return HostMemory(groups)


def settle_for_raw(why: str, record: Record, fidelity: Fidelity) -> None:
    """Say in the log why records are not coded. Raises ConfigError if that was asked for by name.

    why: the reason.
    """
    if fidelity == "ep":
        raise ConfigError(f'"fidelity": "ep" is not possible here: {why}; {DO_WITHOUT}')
    if record == "l3":
        raise ConfigError(f'"record": "l3" is not possible here: {why}; use "auto" or "raw"')
    logger.warning("record=raw reason=%r", why)
