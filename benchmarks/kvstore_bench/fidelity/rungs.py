"""The rungs of the ladder: every form of a record, and every rival, as something that loses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.model.errors import InvalidRequest
from kvstore_bench.codec.kv import Bits, Blocks
from kvstore_bench.fidelity.rivals import RIVALS, Rival
from kvstore_kernels import native
from kvstore_kernels.codec.coder import BASE_PLANES
from kvstore_kernels.codec.record import DType
from kvstore_kernels.codec.reference import of_float, to_float


@dataclass(frozen=True, slots=True)
class Stored:
    """KV after it was stored and loaded. ratio: raw bytes over stored ones, without a first block
    that was kept as it is."""

    parts: Sequence[Bits]
    ratio: float


Rung = Callable[[Sequence[Bits], int], Stored]
"""What takes KV, (heads, tokens, channels) of bfloat16 for each part, and the tokens of a block."""


def rungs() -> Iterator[tuple[str, Rung]]:
    """Yield every rung by name, exact first. Raises InvalidRequest without the native library."""
    if native.library() is None:
        raise InvalidRequest(f"there is no native library to measure: {native.reason()}")
    yield "l3", _l3
    yield "ep88", _ep(BASE_PLANES, fine=True)
    for planes in ((6, 5), BASE_PLANES, (4, 3)):
        yield "ep{}{}".format(*planes), _ep(planes, fine=False)
    for name, rival in RIVALS.items():
        yield name, _of(rival)
    yield "fp8_first_exact", _of(RIVALS["fp8"], first_exact=True)


def _l3(parts: Sequence[Bits], block_tokens: int) -> Stored:
    blocks = Blocks(parts, block_tokens)
    coder, ids = blocks.coder(), range(blocks.count)
    room = np.zeros(blocks.count * coder.room_nbytes(), np.uint8)
    records = [each.base for each in coder.encode_exact(ids, room)]
    nbytes = sum(map(len, records))
    return Stored(_back(parts, blocks, coder.decode(ids, records)), blocks.nbytes / nbytes)


def _ep(planes: tuple[int, int], *, fine: bool) -> Rung:
    def store(parts: Sequence[Bits], block_tokens: int) -> Stored:
        blocks = Blocks(parts, block_tokens)
        coder, ids = blocks.coder(base_planes=planes), range(blocks.count)
        room = np.zeros(blocks.count * coder.room_nbytes(lossy=True), np.uint8)
        records = coder.encode_lossy(ids, [block == 0 for block in ids], room)
        bases = [each.base for each in records]
        fines = [each.fine if fine else None for each in records]
        nbytes = sum(len(each) for each in (*bases[1:], *fines[1:]) if each is not None)
        raw = blocks.nbytes - blocks.shape.raw_nbytes
        return Stored(_back(parts, blocks, coder.decode(ids, bases, fines)), raw / max(nbytes, 1))

    return store


def _back(parts: Sequence[Bits], blocks: Blocks, wrong: Sequence[Exception | None]) -> list[Bits]:
    """Return what was decoded into `blocks`, and behind it the tokens of no whole block."""
    for error in wrong:
        if error is not None:
            raise InvalidRequest(f"a record was not decoded: {error}: this is a bug")
    return [
        np.concatenate([part, was[:, part.shape[1] :]], axis=1)
        for part, was in zip(blocks.parts(), parts, strict=True)
    ]


def _of(rival: Rival, *, first_exact: bool = False) -> Rung:
    """first_exact: keep the first block as it is, as EP does; engines do not."""

    def store(parts: Sequence[Bits], block_tokens: int) -> Stored:
        bits, values, found = 0.0, 0, []
        for part in parts:
            lost = of_float(rival.lose(to_float(part, DType.BF16)), DType.BF16).astype(np.uint16)
            if first_exact:
                lost[:, :block_tokens] = part[:, :block_tokens]
            found.append(lost)
            bits += rival.bits(part.shape[2]) * part.size
            values += part.size
        return Stored(found, 16 * values / bits)

    return store
