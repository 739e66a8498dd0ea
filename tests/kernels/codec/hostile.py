"""Records that lie are decoded here, between guards: nothing outside the block may change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.model.checksum import checksum
from kvstore_kernels import native
from kvstore_kernels.codec.copies import CodedCopies, Fine, Scratch
from kvstore_kernels.codec.places import Place
from kvstore_kernels.codec.record import HEADER_NBYTES, BadRecord, DType, Header
from tests.kernels.codec.memory import Pages, both, made_up, pages

GUARD = 0xA5


@dataclass(frozen=True)
class Hostile:
    """Memory whose blocks 0 and 2 are guards, and records of block 1.

    exact: by L3; of float16 raw. base, fine: lossy. raw: of bits that L3 makes no smaller.
    """

    page: Pages
    exact: bytes
    base: bytes
    fine: bytes
    raw: bytes

    @property
    def bases(self) -> tuple[bytes, bytes, bytes]:
        """Records that can be decoded alone."""
        return self.exact, self.base, self.raw

    def decode(self, base: bytes, fine: bytes | None = None) -> BadRecord | None:
        """Decode private copies, and from a slot: both have to find the same."""
        coder = self.page.coder()
        parts = None if fine is None else Fine(memoryview(fine), checksum(fine))
        views = memoryview(base), None if fine is None else memoryview(fine)
        (wrong,) = coder.decode([1], [views[0]], [views[1]])
        self._check_guards()
        (loaded,) = CodedCopies(coder, checksum, Scratch()).refine([1], [views[0]], [parts])
        self._check_guards()
        if fine is None or wrong is None:
            assert (loaded.base is None) == (wrong is not None), (loaded, wrong)
        assert loaded.base in (None, checksum(base))
        assert loaded.refined is (None if fine is None else wrong is None)
        return wrong

    def _check_guards(self) -> None:
        for layer in self.page.memory:
            assert (layer[[0, 2]] == GUARD).all(), "written outside the block"


def hostile(layers: list[list[Place]], dtype: DType, seed: int = 1) -> Hostile:
    page = pages(layers, dtype)
    page.fill(1, made_up(page.shape, seed))
    exact, lossy = page.coder().encode_lossy([1, 1], [True, False], page.room(2))
    assert lossy.fine is not None
    found = bytes(exact.base), bytes(lossy.base), bytes(lossy.fine)
    rng = np.random.default_rng(seed)
    for layer in page.memory:
        layer[1] = rng.integers(0, 256, layer[1].size)
    (kept,) = page.coder().encode_exact([1], page.room(1))
    assert kept.uncoded
    raw = bytes(kept.base)
    for layer in page.memory:
        layer[[0, 2]] = GUARD
    return Hostile(page, *found, raw)


NARROW = [both(1, 16, 80)]
CASES = {
    "bf16": hostile(NARROW, DType.BF16),
    "bf16 in tiles": hostile([both(2, 72, 16, "p")] * 2, DType.BF16),
    "fp16": hostile([both(1, 8, 64)], DType.FP16),
    "fp32": hostile([both(2, 16, 96, "hct")], DType.FP32),
}
"""One tile of each kind; tiles of 24 of 72 tokens, two layers; and the other dtypes."""

FORMS = 4
_CASES, _ISAS = list(CASES.values()), list(native.Isa)


def seeds() -> list[bytes]:
    """Return, of each case, what `decode_any` takes for right, in each of its forms."""
    found = []
    for index, case in enumerate(_CASES):
        isa = _ISAS[index % len(_ISAS)]
        for form, data in (
            (0, case.exact),
            (0, case.raw),
            (1, case.base + case.fine),
            (2, case.exact[HEADER_NBYTES : Header.parse(case.exact).nbytes]),
            (3, case.fine[HEADER_NBYTES:]),
        ):
            found.append(bytes([form + FORMS * (index + len(_CASES) * isa)]) + data)
    return found


def decode_any(data: bytes) -> BadRecord | None:
    """Decode what a fuzzer makes up. The first byte says by which instruction set at most, which of
    the cases, and how the rest is cut: a record, a record with a fine part, or what stands behind
    an honest header, of an exact record or of a fine part."""
    first, data = (data[0], data[1:]) if data else (0, b"")
    rest, form = divmod(first, FORMS)
    rest, index = divmod(rest, len(_CASES))
    case = _CASES[index]
    native.use_isa(_ISAS[rest % len(_ISAS)])
    try:
        if form == 1:
            split = len(case.base)
            return case.decode(data[:split], data[split:])
        if form == 2:
            return case.decode(_behind(case.exact, data))
        if form == 3:
            return case.decode(case.base, _behind(case.fine, data))
        return case.decode(data)
    finally:
        native.use_isa()


def _behind(record: bytes, body: bytes) -> bytes:
    """Return a body behind the header of a record, with the size that it has."""
    nbytes = (HEADER_NBYTES + len(body)).to_bytes(4, "little")
    return record[:36] + nbytes + record[40:HEADER_NBYTES] + body


SEEDS = seeds()
