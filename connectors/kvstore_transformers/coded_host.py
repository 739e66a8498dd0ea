"""Coded records of a model in host memory, by the native library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvstore import checksum
from kvstore.model.checksum import copies_in
from kvstore_kernels import native
from kvstore_kernels.codec.coder import Coder, Memory
from kvstore_kernels.codec.coder import Encoded as Records
from kvstore_kernels.codec.copies import CodedCopies, Decoded, Fine, Scratch
from kvstore_kernels.codec.places import Unplaced
from kvstore_kernels.host import HostPages
from kvstore_kernels.registration import Extents
from kvstore_transformers.cache import Pages
from kvstore_transformers.coding import CodedCopier, Coding, Sized, places_of
from kvstore_transformers.namespace import Layout

ENCODED_NBYTES_MAX = 64 << 20


class HostCoding(Coding):
    def __init__(self, layout: Layout, block_tokens: int, *, lossy: bool) -> None:
        """Raise Unplaced for a model whose KV is not coded, and without a native library."""
        if native.reason():
            raise Unplaced(native.reason())
        super().__init__(layout, block_tokens, lossy=lossy)

    def copier(self, extents: Extents) -> HostCodedCopier:
        return HostCodedCopier(self)


class HostCodedCopier(CodedCopier):
    """In host memory models compute synchronously: nothing is ever in flight."""

    encoded_nbytes_max = ENCODED_NBYTES_MAX
    bounced_nbytes = 0

    def __init__(self, coding: Coding) -> None:
        super().__init__(coding)
        self._scratch = [Scratch() for _ in coding.shapes]

    def enter_thread(self) -> None: ...

    def mark(self) -> None: ...

    def open(self, group: int, pages: Pages) -> CodedCopies:
        shape, raw = self.coding.shapes[group], HostPages(pages)
        coder = Coder(shape, Memory.of(pages), raw, checksum, places_of(pages))
        return CodedCopies(coder, checksum, self._scratch[group], lossy=self.coding.lossy)

    def encode(
        self, opened: CodedCopies, blocks: Sequence[int], exact: Sequence[bool], after: None
    ) -> list[Records]:
        return opened.encode(blocks, exact)

    def store(
        self, opened: CodedCopies, parts: Sequence[tuple[Sized, memoryview]]
    ) -> Sequence[int]:
        records = [cast(memoryview, record) for record, _ in parts]
        return copies_in(records, [view for _, view in parts])

    def refine(
        self,
        opened: CodedCopies,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[Fine | None],
        after: None,
    ) -> list[Decoded]:
        return opened.refine(blocks, records, fines)

    def wait_reached(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None: ...
