"""A key in memory that core dumps leave out."""

from __future__ import annotations

import mmap

from kvstore.model.errors import InvalidRequest

KEY_NBYTES = 32


class Secret:
    """Holds 32 bytes in a page of its own. Copies that a call makes live as long as the call."""

    __slots__ = ("_page",)

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_NBYTES:
            raise InvalidRequest(f"a key of {len(key)} bytes; keys have {KEY_NBYTES}")
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._page.madvise(mmap.MADV_DONTDUMP)
        self._page[:KEY_NBYTES] = key

    def reveal(self) -> bytes:
        return self._page[:KEY_NBYTES]

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a secret is not to be copied elsewhere")
