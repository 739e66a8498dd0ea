"""Records encoded from, and decoded into, an engine's memory by the native library.

A call takes a batch of blocks, so that a thread gives the interpreter's lock up once and not for
every block. Safe from several threads at once, as long as they write different blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore_kernels import native
from kvstore_kernels.codec.loader import Loader, whole
from kvstore_kernels.codec.places import CHANNELS_MAX, Place, Shape, tiles_of
from kvstore_kernels.codec.record import (
    HEADER_NBYTES,
    BadRecord,
    DType,
    Form,
    Header,
    put_nbytes,
    put_pair,
    same_but_for_sizes,
)
from kvstore_kernels.codec.reference import splitmix64
from kvstore_kernels.native.sums import sums_of

BASE_PLANES = (5, 4)
"""Of keys and values in EP's base part, as the connectors store it."""
FINE_PLANES = (3, 4)
"""And in its fine part: together all 8 of both."""
PAGE_NBYTES = 4096
"""Of the arena."""
_PLANES = 8
OF_SHAPE = ["layer", "tokens", "channels", "kind"]
_LAYER = np.dtype([("address", "<u8"), ("stride", "<i8")])


class RawPages(Protocol):
    """The engine's memory as plain bytes, for records that are not coded (`host.HostPages`)."""

    @property
    def record_nbytes(self) -> int: ...

    def read(self, block: int, record: memoryview) -> None: ...

    def write(self, block: int, record: memoryview) -> None: ...


class Memory(NamedTuple):
    """One layer: the address of its block 0, and the bytes from a block to the next one."""

    address: int
    stride: int

    @classmethod
    def of(cls, layers: Sequence[Any]) -> list[Memory]:
        """Return where the blocks of each layer are: a tensor (B, ...), which the caller keeps."""
        return [cls(each.data_ptr(), each.stride(0) * each.element_size()) for each in layers]


class Encoded(NamedTuple):
    """One block's records, in memory that the next batch overwrites. fine: of a lossy block.
    uncoded: the base is raw, because coding made it no smaller."""

    base: memoryview
    fine: memoryview | None = None
    uncoded: bool = False


class _Plan(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("tiles_count", ctypes.c_uint32),
        ("item", ctypes.c_uint32),
        ("table_at", ctypes.c_uint64),
        ("body_at", ctypes.c_uint64),
        ("tail_at", ctypes.c_uint64),
    )


class Coder:
    """Codes the blocks of one group of layers.

    shape: what records of it look like. layers: where its memory is. raw: the same memory as bytes.
    checksum: of a record; a fine part names its base's. places: where the values lie now, if not
    where `shape` says, as in a cache that grows; shape is then that of the records. The caller
    keeps the memory alive and in place.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[Memory],
        raw: RawPages,
        checksum: Callable[[memoryview], int],
        places: Sequence[Sequence[Place]] = (),
        *,
        base_planes: tuple[int, int] = BASE_PLANES,
    ) -> None:
        """base_planes: of keys and values in EP's base part; the fine part has the rest of 8.

        Raise RuntimeError without a native library, ValueError for a size that differs."""
        library = native.library()
        if library is None:
            raise RuntimeError(native.reason())
        if raw.record_nbytes != shape.raw_nbytes:
            raise ValueError(
                f"a block has {raw.record_nbytes:,} bytes, its places {shape.raw_nbytes:,}"
            )
        self.shape = shape
        self.record_nbytes = shape.record_nbytes
        """The most a base part has: raw behind a header."""
        keys, values = base_planes
        fine_planes = (_PLANES - keys, _PLANES - values)
        self.fine_nbytes = shape.ep_nbytes(fine_planes, base=False)
        self._library = library
        self._raw = raw
        self._checksum = checksum
        self._base_nbytes = shape.ep_nbytes(base_planes, base=True)
        self._headers = {form: header_of(form, shape, base_planes, fine_planes) for form in Form}
        self._layers = np.array(layers, _LAYER)
        self._tiles = tiles_of(places, shape.dtype) if places else shape.tiles
        if not np.array_equal(self._tiles[OF_SHAPE], shape.tiles[OF_SHAPE]):
            raise ValueError("these places have other heads, tokens or channels than the shape")
        signs = 1 - 2 * (splitmix64(CHANNELS_MAX) & np.uint64(1)).astype(np.int64)
        self._signs = signs.astype(np.float32)
        self._planes = np.array([*base_planes, *fine_planes], np.uint8)
        self._plan = _Plan(
            self._layers.ctypes.data,
            self._tiles.ctypes.data,
            self._signs.ctypes.data,
            len(self._tiles),
            {DType.BF16: 1, DType.FP16: 2, DType.FP32: 4}[shape.dtype],
            HEADER_NBYTES,
            shape.l3_body_at,
            shape.l3_tail_at,
        )
        coded = (Form.L3, Form.EP_BASE, Form.EP_FINE)
        self.loader = Loader(
            library,
            ctypes.addressof(self._plan),
            b"".join(self._headers[form] for form in coded),
            self._planes,
            (self.record_nbytes, self._base_nbytes, self.fine_nbytes),
        )

    # Encoding -------------------------------------------------------------------------------------

    def room_nbytes(self, *, lossy: bool = False) -> int:
        """Return how many bytes `encode` wants for each block."""
        return self.loader.room_nbytes if lossy else whole(self.record_nbytes)

    def encode_exact(self, blocks: Sequence[int], room: npt.NDArray[np.uint8]) -> list[Encoded]:
        """Encode blocks by L3; those it does not make smaller are stored raw.

        room: uint8, at least `room_nbytes()` for each block; the records lie in it.
        """
        spaces = self._spaces(room, len(blocks), self.room_nbytes())
        sizes = np.zeros(len(blocks), np.uint64)
        if self.shape.dtype is not DType.FP16 and blocks:
            ids, starts = np.array(blocks, np.int64), _addresses(spaces)
            most = np.full(len(blocks), self.shape.record_nbytes - 1, np.uint64)
            self._library.kvstore_l3_encode(
                ctypes.addressof(self._plan),
                len(blocks),
                ids.ctypes.data,
                starts.ctypes.data,
                most.ctypes.data,
                sizes.ctypes.data,
            )
        return [
            Encoded(self._finish(Form.L3, int(nbytes), space))
            if nbytes
            else Encoded(self._keep(block, space), uncoded=True)
            for block, space, nbytes in zip(blocks, spaces, sizes, strict=True)
        ]

    def encode_lossy(
        self, blocks: Sequence[int], exact: Sequence[bool], room: npt.NDArray[np.uint8]
    ) -> list[Encoded]:
        """Encode blocks by EP; those that are `exact`, or have values EP cannot hold, by L3.

        room: uint8, at least `room_nbytes(lossy=True)` for each block.
        """
        spaces = self._spaces(room, len(blocks), self.room_nbytes(lossy=True))
        split = whole(self.record_nbytes)
        bases, fines = [each[:split] for each in spaces], [each[split:] for each in spaces]
        lossy = [index for index, each in enumerate(exact) if not each]
        refused = np.zeros(len(lossy), np.uint8)
        if lossy:
            ids = np.array([blocks[index] for index in lossy], np.int64)
            to_base = _addresses([bases[index] for index in lossy])
            to_fine = _addresses([fines[index] for index in lossy])
            self._library.kvstore_ep_encode(
                ctypes.addressof(self._plan),
                len(lossy),
                ids.ctypes.data,
                to_base.ctypes.data,
                to_fine.ctypes.data,
                self._planes.ctypes.data,
                refused.ctypes.data,
            )
        encoded: dict[int, Encoded] = {}
        taken = [index for index, no in zip(lossy, refused, strict=True) if not no]
        firsts = [self._finish(Form.EP_BASE, self._base_nbytes, bases[index]) for index in taken]
        for index, first, pair in zip(taken, firsts, sums_of(firsts), strict=True):
            fine = self._finish(Form.EP_FINE, self.fine_nbytes, fines[index], pair=pair)
            encoded[index] = Encoded(first, fine)
        rest = [index for index in range(len(blocks)) if index not in encoded]
        for index in rest:
            (encoded[index],) = self.encode_exact([blocks[index]], bases[index])
        return [encoded[index] for index in range(len(blocks))]

    def _spaces(
        self, room: npt.NDArray[np.uint8], count: int, nbytes: int
    ) -> list[npt.NDArray[np.uint8]]:
        if len(room) < count * nbytes:
            raise ValueError(f"{count} records need {count * nbytes:,} bytes, not {len(room):,}")
        return [room[index * nbytes : (index + 1) * nbytes] for index in range(count)]

    def _finish(
        self, form: Form, nbytes: int, space: npt.NDArray[np.uint8], *, pair: int = 0
    ) -> memoryview:
        """Write the header of a record, and zeros behind it; return what is stored."""
        stored = stored_nbytes(nbytes, self.shape) if form is Form.L3 else nbytes
        view = space.data
        view[:HEADER_NBYTES] = self._headers[form]
        put_pair(view, pair)
        put_nbytes(view, nbytes)
        if stored > nbytes:
            space[nbytes:stored] = 0
        return view[:stored]

    def _keep(self, block: int, space: npt.NDArray[np.uint8]) -> memoryview:
        """Store a block raw."""
        nbytes = self.shape.record_nbytes
        self._raw.read(block, space.data[HEADER_NBYTES:nbytes])
        return self._finish(Form.RAW, nbytes, space)

    # Decoding -------------------------------------------------------------------------------------

    def decode(
        self,
        blocks: Sequence[int],
        bases: Sequence[memoryview],
        fines: Sequence[memoryview | None] = (),
        sums: Sequence[int] = (),
    ) -> list[BadRecord | None]:
        """Decode records into blocks; return what was wrong with each, or None.

        bases: private copies, their checksums verified; what is done here with a record that lies
        is bounded by its block. fines: fine parts of some of the bases, or nothing at all. sums:
        the checksums of the bases, if the caller has them.
        """
        wrong: list[BadRecord | None] = [None] * len(blocks)
        forms: dict[Form, list[tuple[int, Header]]] = {form: [] for form in Form}
        for index, base in enumerate(bases):
            try:
                header = self._parsed(base)
                if len(base) > self.record_nbytes:
                    raise BadRecord(f"{len(base):,} bytes, more than any record of this shape")
                if header.form is Form.EP_FINE:
                    raise BadRecord("a fine part where a base part belongs")
                if fines and (fine := fines[index]) is not None:
                    sum_ = sums[index] if sums else self._checksum(base)
                    self._check_pair(header, sum_, fine)
                forms[header.form].append((index, header))
            except BadRecord as error:
                wrong[index] = error
        for index, _ in forms[Form.RAW]:
            self._raw.write(blocks[index], bases[index][HEADER_NBYTES : self.record_nbytes])
        for index in self._decode_l3(forms[Form.L3], blocks, bases):
            wrong[index] = BadRecord("the escapes of a record do not add up")
        self._decode_ep([index for index, _ in forms[Form.EP_BASE]], blocks, bases, fines)
        return wrong

    def _decode_l3(
        self,
        found: Sequence[tuple[int, Header]],
        blocks: Sequence[int],
        bases: Sequence[memoryview],
    ) -> Iterator[int]:
        """Decode L3 records; yield the indices of those that lied."""
        if not found:
            return
        ids = np.array([blocks[index] for index, _ in found], np.int64)
        views = [np.frombuffer(bases[index], np.uint8) for index, _ in found]
        starts = _addresses(views)
        sizes = np.array([header.nbytes for _, header in found], np.uint64)
        bad = np.zeros(len(found), np.uint8)
        self._library.kvstore_l3_decode(
            ctypes.addressof(self._plan),
            len(found),
            ids.ctypes.data,
            starts.ctypes.data,
            sizes.ctypes.data,
            bad.ctypes.data,
        )
        yield from (found[each][0] for each in np.flatnonzero(bad))

    def _decode_ep(
        self,
        found: Sequence[int],
        blocks: Sequence[int],
        bases: Sequence[memoryview],
        fines: Sequence[memoryview | None],
    ) -> None:
        if not found:
            return
        ids = np.array([blocks[index] for index in found], np.int64)
        views = [np.frombuffer(bases[index], np.uint8) for index in found]
        more = [fines[index] if fines else None for index in found]
        extra = [np.frombuffer(each, np.uint8) if each is not None else None for each in more]
        from_base, from_fine = _addresses(views), _addresses(extra)
        self._library.kvstore_ep_decode(
            ctypes.addressof(self._plan),
            len(found),
            ids.ctypes.data,
            from_base.ctypes.data,
            from_fine.ctypes.data,
            self._planes.ctypes.data,
        )

    def _parsed(self, record: memoryview) -> Header:
        """Return the header of `record`. Raises BadRecord for one of another shape."""
        header, shape = Header.parse(record), self.shape
        nbytes = {
            Form.RAW: shape.record_nbytes,
            Form.L3: max(header.nbytes, shape.l3_tail_at),
            Form.EP_BASE: self._base_nbytes,
            Form.EP_FINE: self.fine_nbytes,
        }[header.form]
        if not same_but_for_sizes(record, self._headers[header.form]):
            raise BadRecord(f"a record of another shape: {header}; this one is {shape.digest:x}")
        if header.nbytes != nbytes or (header.pair and header.form is not Form.EP_FINE):
            raise BadRecord(f"a {header.form.name} record of {header.nbytes:,} bytes")
        return header

    def refines(self, fine: memoryview, base_checksum: int) -> bool:
        """Say whether a record is the fine part of the base that has this checksum."""
        try:
            header = self._parsed(fine)
        except BadRecord:
            return False
        return header.form is Form.EP_FINE and header.pair == base_checksum

    def _check_pair(self, header: Header, base_checksum: int, fine: memoryview) -> None:
        """Raise BadRecord unless `fine` was made with the base that has this checksum."""
        second = self._parsed(fine)
        if header.form is not Form.EP_BASE or second.form is not Form.EP_FINE:
            raise BadRecord(f"a {second.form.name} record beside a {header.form.name} one")
        if second.pair != base_checksum:
            raise BadRecord("a fine part of another encoding of this block")


def header_of(form: Form, shape: Shape, base: tuple[int, int], fine: tuple[int, int]) -> bytes:
    """Return the header that every record of a form and a shape has, but for pair and sizes."""
    return Header(
        form=form,
        dtype=shape.dtype,
        tokens=shape.tokens,
        tiles=len(shape.tiles),
        shape=shape.digest,
        planes={Form.EP_BASE: base, Form.EP_FINE: fine}.get(form, (0, 0)),
        before=base if form is Form.EP_FINE else (0, 0),
        tail_at=shape.l3_tail_at if form is Form.L3 else 0,
        nbytes=0,
    ).pack()


def stored_nbytes(nbytes: int, shape: Shape) -> int:
    """Round a record's size up to about 1/64 of the raw size: an arena's slots have few sizes."""
    step = step_nbytes(shape)
    return min(-(-nbytes // step) * step, shape.record_nbytes)


def step_nbytes(shape: Shape) -> int:
    """Return what sizes of records are rounded up to: 1/64 of the raw size, in whole pages.

    Slots are whole pages. Where that is less than a page, pages do it alone: both would waste 2 %.
    """
    return shape.raw_nbytes // 64 // PAGE_NBYTES * PAGE_NBYTES or 16


def _addresses(arrays: Sequence[npt.NDArray[np.uint8] | None]) -> npt.NDArray[np.uint64]:
    """Return where each array begins; 0 for None. The caller keeps the arrays."""
    return np.array([0 if each is None else each.ctypes.data for each in arrays], np.uint64)
