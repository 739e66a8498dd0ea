"""Coded records of blocks in device memory: encoded into staging memory there, decoded from there.

The kernels of `cuda/codec.cu` write the bytes that `Coder` writes on the host. Records and their
checksums are made in one go; their sizes come back with the checksums, so a slot can be reserved
before a record leaves the device. What the kernels do not take (values EP cannot hold, records that
L3 does not make smaller) is done in further passes, each only when it is needed: EP, L3, raw.

Everything is put on torch's current stream. Nothing waits but `left` and `finish`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_kernels.codec.coder import BASE_PLANES, OF_SHAPE, Memory
from kvstore_kernels.codec.device_passes import Arrived, Batch, Decoding, Encoding, padded
from kvstore_kernels.codec.device_tables import (
    ITEMS,
    OF_MEMORY,
    OF_RECORDS,
    RESULT,
    Table,
    Tables,
)
from kvstore_kernels.codec.places import Place, Shape, tiles_of
from kvstore_kernels.codec.record import HEADER_NBYTES, Form
from kvstore_kernels.layout import LEAF_NBYTES
from kvstore_kernels.packing import PagedKV

WARPS = 8
GROUPS_A_CTA = 32
RECORDS_MAX = 65535  # the second axis of a CUDA grid


class Launcher(Protocol):
    """The kernels of `codec.cu` on one device, compiled for one kind of values and one width."""

    def place(self, table: npt.NDArray[np.generic]) -> Tensor:
        """Return a copy in device memory, uint8, in the order of the current stream."""
        ...

    def keep(self, table: npt.NDArray[np.generic]) -> Tensor:
        """Return a copy in device memory for any stream: it is there when this returns."""
        ...

    def launch(self, name: str, grid: tuple[int, int], addresses: Sequence[int]) -> None:
        """Launch a kernel on the current stream: plan, records, results, leaves."""
        ...


class LauncherOf(Protocol):
    """Opens the kernels of a device for values of 1 bfloat16, 2 float16, 4 float32, and a width."""

    def __call__(self, device: torch.device, item: int, width: int) -> Launcher: ...


class DeviceCoder:
    """Codes the blocks of one group of pages, whose memory is `layers`.

    shape, layers, places, base_planes: as `Coder` takes them; addresses are the device's.
    lossy: blocks are encoded by EP, in a base and a fine part.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[Memory],
        pages: tuple[PagedKV, int],
        open_launcher: LauncherOf,
        places: Sequence[Sequence[Place]] = (),
        *,
        lossy: bool = False,
        base_planes: tuple[int, int] = BASE_PLANES,
    ) -> None:
        """pages: and which of its groups.

        Raise ValueError for pages of another size, and whatever `open_launcher` raises."""
        tiles = _tiles_of(shape, pages, places)
        tables = Tables(shape, tiles, layers, base_planes, lossy=lossy)
        self.shape = shape
        self.lossy = lossy
        self.record_nbytes = shape.record_nbytes
        """The most a base part has: raw behind a header."""
        self.fine_nbytes = int(tables.plan["fine_nbytes"])
        self._values = shape.raw_nbytes // shape.dtype.nbytes
        self.width = tables.width
        """Which of the kernels for EP's values it uses."""
        item = ITEMS[shape.dtype]
        self._launcher = open_launcher(pages[0].device, item, tables.width)
        self._kept = {name: self._launcher.keep(getattr(tables, name)) for name in OF_RECORDS}
        self._use(tables, pages)
        self._item, self._both = str(item), f"{item}_{tables.width}"
        groups, parts = len(tables.groups), len(tables.parts)
        leaves = -(-self.record_nbytes // LEAF_NBYTES)
        fine_leaves = -(-self.fine_nbytes // LEAF_NBYTES) if lossy else 0
        self._leaves, self._fine_leaves = _even(leaves), _even(fine_leaves)
        self._widths = {
            "l3_encode": -(-groups // WARPS),
            "l3_tail": -(-groups // GROUPS_A_CTA),
            "l3_decode": -(-groups // GROUPS_A_CTA),
            "ep_encode": -(-parts // WARPS),
            "ep_decode": -(-parts // WARPS),
            "sums": leaves,
            "fine_sums": fine_leaves,
            "record_sums": 2 * max(leaves, fine_leaves),
        }

    def moved(
        self,
        layers: Sequence[Memory],
        pages: tuple[PagedKV, int],
        places: Sequence[Sequence[Place]] = (),
    ) -> DeviceCoder:
        """Return a coder of the same records whose values lie elsewhere on this device.

        It costs three small copies to the device: what follows from the shape is shared. Raises
        ValueError for pages and places that do not fit the shape.
        """
        other = copy.copy(self)
        other._use(self._tables.moved(_tiles_of(self.shape, pages, places), layers), pages)
        return other

    def _use(self, tables: Tables, pages: tuple[PagedKV, int]) -> None:
        """Have the kernels find values where `tables` says."""
        self._tables = tables
        self._paged, self._group = pages
        where = {name: self._launcher.keep(getattr(tables, name)) for name in OF_MEMORY}
        self._kept = {**self._kept, **where}
        addresses = {name: table.data_ptr() for name, table in self._kept.items()}
        self._plan = self._launcher.keep(tables.placed(addresses))

    def room_nbytes(self) -> int:
        """Return how much staging memory `encode` wants for each block."""
        return padded(self.record_nbytes) + (padded(self.fine_nbytes) if self.lossy else 0)

    def encode(
        self, blocks: Sequence[int], staged: Tensor, at: int = 0, exact: Sequence[bool] = ()
    ) -> Encoding:
        """Begin to encode blocks into `staged`, from byte `at` on, `room_nbytes` for each.

        staged: (n,) uint8 on the device, beginning at a multiple of 16 bytes; as `at` is. exact: of
        a lossy coder, the blocks that are stored exactly all the same; none: no block is.
        Raises ValueError for blocks and memory that do not fit.
        """
        return Encoding(self, blocks, staged, at, exact or [not self.lossy] * len(blocks))

    def decode(self, blocks: Sequence[int], staged: Tensor, arrived: Sequence[Arrived]) -> Decoding:
        """Begin to decode records that lie in `staged` into blocks.

        Nobody else writes to `staged` meanwhile: what is summed up is what is decoded. Raises
        ValueError for blocks and records that do not fit, and for a block given twice.
        """
        return Decoding(self, blocks, staged, arrived)

    # What encodings and decodings do with it ------------------------------------------------------

    def check(self, blocks: Sequence[int], staged: Tensor) -> None:
        """Raise ValueError for blocks that there are not, and staging memory of another kind."""
        if len(blocks) > RECORDS_MAX:
            raise ValueError(f"{len(blocks)} blocks at once; at most {RECORDS_MAX}")
        self._paged.check_blocks([(self._group, block) for block in blocks])
        if staged.device != self._paged.device or staged.dtype != torch.uint8:
            raise ValueError(f"staging memory is uint8 on {self._paged.device}")
        if staged.dim() != 1 or not staged.is_contiguous() or staged.data_ptr() % 16:
            raise ValueError("staging memory is (n,), contiguous, from a multiple of 16 bytes on")

    def run(self, names: Sequence[str], batch: Batch) -> None:
        """Launch kernels, one after another, over all records of a batch."""
        for name in names:
            suffix = {"l3": f"_{self._item}", "ep": f"_{self._both}"}.get(name[:2], "")
            if name == "l3_tail":
                suffix = ""
            width = self._widths.get(name, 1)
            if width and batch.size:
                self._launcher.launch(
                    name + suffix,
                    (width, batch.size),
                    [each.data_ptr() for each in (self._plan, *batch.tensors)],
                )

    def batch(self, records: Table, results: Table | None = None) -> Batch:
        """Place the tables of some records on the device, with room for what they need there."""
        count = len(records)
        each = self._leaves + self._fine_leaves
        records["first_leaf"] = np.arange(count) * each
        records["fine_leaf"] = records["first_leaf"] + self._leaves
        leaves = torch.empty(count * each, dtype=torch.int64, device=self._paged.device)
        empty = np.zeros(count, RESULT) if results is None else results
        placed = [self._launcher.place(table) for table in (records, empty)]
        return Batch(count, (placed[0], placed[1], leaves))

    def scratch(self, records: Table) -> Tensor:
        """Give each record room for its escapes; the caller keeps the memory."""
        nbytes = -(-self._values // 16) * 16
        memory = torch.empty(len(records) * nbytes, dtype=torch.uint8, device=self._paged.device)
        records["scratch"] = memory.data_ptr() + np.arange(len(records)) * nbytes
        return memory

    def gather_raw(self, blocks: Sequence[int], staged: Tensor, begins: Sequence[int]) -> None:
        """Write raw records."""
        first = Form.RAW * HEADER_NBYTES
        header = self._kept["headers"][first : first + HEADER_NBYTES].clone()
        nbytes = np.array([self.record_nbytes], "<u4").view(np.uint8)
        header[36:40] = self._launcher.place(nbytes)
        for begin in begins:
            staged[begin : begin + HEADER_NBYTES] = header
        batch = [(self._group, block) for block in blocks]
        self._paged.gather(batch, staged, [begin + HEADER_NBYTES for begin in begins])

    def scatter_raw(self, blocks: Sequence[int], staged: Tensor, begins: Sequence[int]) -> None:
        """Write what is behind the headers of raw records into blocks."""
        batch = [(self._group, block) for block in blocks]
        self._paged.scatter(staged, batch, [begin + HEADER_NBYTES for begin in begins])


def _tiles_of(shape: Shape, pages: tuple[PagedKV, int], places: Sequence[Sequence[Place]]) -> Table:
    """Return the tiles of a shape where `places` say, by default where itself does.

    Raises ValueError for pages and places of another shape."""
    paged, group = pages
    if paged.record_nbytes[group] != shape.raw_nbytes:
        raise ValueError(
            f"a block has {paged.record_nbytes[group]:,} bytes, its places {shape.raw_nbytes:,}"
        )
    tiles = tiles_of(places, shape.dtype) if places else shape.tiles
    if not np.array_equal(tiles[OF_SHAPE], shape.tiles[OF_SHAPE]):
        raise ValueError("these places have other heads, tokens or channels than the shape")
    return tiles


def _even(count: int) -> int:
    return count + count % 2
