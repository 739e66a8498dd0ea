"""What the kernels of `cuda/codec.cu` read and write: `cuda/tiles.h` as numpy tables."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore_kernels.codec.coder import Memory, header_of, step_nbytes
from kvstore_kernels.codec.places import CHANNELS_MAX, GROUP_CHANNELS, Shape
from kvstore_kernels.codec.record import HEADER_NBYTES, DType, Form
from kvstore_kernels.codec.reference import splitmix64

Table: TypeAlias = npt.NDArray[np.void]
ITEMS = {DType.BF16: 1, DType.FP16: 2, DType.FP32: 4}
WIDTHS = (1, 2, 4, 8, 16)
"""Of EP's values, how many pairs of channels a lane holds: kernels are compiled for one of them."""
TOKENS_A_PART = 8

LAYER = np.dtype([("address", "<u8"), ("stride", "<i8")])
WORK = np.dtype([("tile", "<u4"), ("first", "<u4"), ("at", "<u8"), ("more", "<u8")])
PLAN = np.dtype(
    [
        *((name, "<u8") for name in ("layers", "tiles", "groups", "parts", "signs", "headers")),
        *((name, "<u8") for name in ("body_at", "tail_at", "raw_nbytes")),
        *((name, "<u8") for name in ("base_nbytes", "fine_nbytes", "step")),
        *((name, "<u4") for name in ("group_count", "part_count", "pairs")),
        ("planes", "<u4", (4,)),
        ("unused", "<u4"),
    ]
)
RECORD = np.dtype(
    [
        ("block", "<i8"),
        *((name, "<u8") for name in ("base", "fine", "scratch", "nbytes", "fine_nbytes")),
        *((name, "<u8") for name in ("fine_sum", "first_leaf", "fine_leaf")),
    ]
)
RESULT = np.dtype(
    [
        *((name, "<u8") for name in ("sum", "fine_sum", "nbytes", "stored")),
        *((name, "<u4") for name in ("form", "wrong", "refined", "unused")),
    ]
)


OF_RECORDS = ("groups", "parts", "signs", "headers")
"""Tables that follow from the shape of records."""
OF_MEMORY = ("layers", "tiles")
"""Tables that say where values lie."""


class Tables:
    """Everything that kernels know of the records of one shape, before it is on a device.

    planes: of keys and values in EP's base part. lossy: whether EP's records are taken at all.
    """

    def __init__(
        self,
        shape: Shape,
        tiles: Table,
        layers: Sequence[Memory],
        planes: tuple[int, int],
        *,
        lossy: bool,
    ) -> None:
        fine = (8 - planes[0], 8 - planes[1])
        self.groups = _groups(shape)
        self.parts = _parts(shape, planes, fine)
        signs = 1 - 2 * (splitmix64(CHANNELS_MAX) & np.uint64(1)).astype(np.int64)
        self.signs = signs.astype("<f4")
        self.headers = _headers(shape, planes, fine, lossy=lossy)
        values = tiles["kind"] == 1
        wanted = -(-int(tiles["channels"][values].max(initial=1)) // GROUP_CHANNELS)
        self.width = next(width for width in WIDTHS if width >= wanted)
        self.plan = np.zeros((), PLAN)
        self.plan["body_at"], self.plan["tail_at"] = shape.l3_body_at, shape.l3_tail_at
        self.plan["raw_nbytes"] = shape.record_nbytes
        self.plan["base_nbytes"] = shape.ep_nbytes(planes, base=True)
        self.plan["fine_nbytes"] = shape.ep_nbytes(fine, base=False)
        self.plan["step"] = step_nbytes(shape)
        self.plan["group_count"], self.plan["part_count"] = len(self.groups), len(self.parts)
        self.plan["planes"] = (*planes, *fine)
        self._item = shape.dtype.nbytes
        self._lie(tiles, layers)

    def moved(self, tiles: Table, layers: Sequence[Memory]) -> Tables:
        """Return the tables of the same records in other memory."""
        other = copy.copy(self)
        other.plan = self.plan.copy()
        other._lie(tiles, layers)
        return other

    def _lie(self, tiles: Table, layers: Sequence[Memory]) -> None:
        self.layers = np.array(layers, LAYER)
        self.tiles = tiles
        self.plan["pairs"] = _in_pairs(tiles, self.layers, self._item)

    def placed(self, addresses: Mapping[str, int]) -> Table:
        """Return the plan. addresses: where the other tables are, by name."""
        plan = self.plan.copy()
        for name in (*OF_RECORDS, *OF_MEMORY):
            plan[name] = addresses[name]
        return plan.reshape(1)


def _groups(shape: Shape) -> Table:
    """Return L3's groups of channels in the order of a record."""
    rows, at, scratch = [], shape.l3_body_at, 0
    for index, (tile, nbytes) in enumerate(zip(shape.tiles, shape.l3_tiles, strict=True)):
        tokens, channels = int(tile["tokens"]), int(tile["channels"])
        for first in range(0, channels, GROUP_CHANNELS):
            rows.append((index, first, at, scratch + tokens * first))
        scratch += tokens * channels
        at += int(nbytes)
    return np.array(rows, WORK)


def _parts(shape: Shape, planes: tuple[int, int], fine: tuple[int, int]) -> Table:
    """Return what a warp of EP's kernels does: 64 channels of keys, or 8 tokens of values."""
    rows, at, fine_at = [], HEADER_NBYTES, HEADER_NBYTES
    sizes = zip(shape.ep_tiles(planes, base=True), shape.ep_tiles(fine, base=False), strict=True)
    for index, (tile, (nbytes, fine_nbytes)) in enumerate(zip(shape.tiles, sizes, strict=True)):
        firsts = (
            range(0, int(tile["tokens"]), TOKENS_A_PART)
            if tile["kind"]
            else range(0, int(tile["channels"]), GROUP_CHANNELS)
        )
        rows += [(index, first, at, fine_at) for first in firsts]
        at, fine_at = at + int(nbytes), fine_at + int(fine_nbytes)
    return np.array(rows, WORK)


def _headers(
    shape: Shape, planes: tuple[int, int], fine: tuple[int, int], *, lossy: bool
) -> npt.NDArray[np.uint8]:
    """Return the headers by form; zeros for a form that these records do not have."""
    headers = np.zeros((max(Form) + 1, HEADER_NBYTES), np.uint8)
    forms = [Form.RAW]
    forms += [Form.L3] if shape.dtype is not DType.FP16 else []
    forms += [Form.EP_BASE, Form.EP_FINE] if lossy else []
    for form in forms:
        headers[form] = np.frombuffer(header_of(form, shape, planes, fine), np.uint8)
    return headers


def _in_pairs(tiles: Table, layers: Table, item: int) -> bool:
    """Say whether channels 2i and 2i + 1 are always one aligned access."""
    near = (tiles["channel"] == item) & (tiles["channel_run"] % 2 == 0)
    distances = [tiles[name] for name in ("first", "token", "token_far", "channel_far")]
    distances += [layers[name].astype(np.int64) for name in ("address", "stride")]
    return bool(near.all()) and not any((each % (2 * item)).any() for each in distances)
