"""The native library: compiled C++ called by ctypes, which lets go of the interpreter lock.

It comes with the wheel, or is compiled when the project is installed from its sources. Where it is
missing, `reason` says why, and nothing here fails: engines store records as they are.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

VERSION = 6
_NAME = "libkvstore.so"
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "kvstore_l3_encode": (_POINTER, _SIZE, *(_POINTER,) * 4),
    "kvstore_l3_decode": (_POINTER, _SIZE, *(_POINTER,) * 4),
    "kvstore_ep_encode": (_POINTER, _SIZE, *(_POINTER,) * 5),
    "kvstore_ep_decode": (_POINTER, _SIZE, *(_POINTER,) * 4),
    "kvstore_leaves": (_POINTER, _SIZE, _POINTER),
    "kvstore_copies": (_SIZE, *(_POINTER,) * 4),
    "kvstore_share": (_POINTER,),
    "kvstore_receive": (_INT, _SIZE, *(_POINTER,) * 4),
    "kvstore_pages": (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _INT, _POINTER, _POINTER),
    "kvstore_load": (_POINTER, _SIZE, *(_POINTER,) * 5),
    "kvstore_slots_find": (_SIZE, *(_POINTER,) * 3, _SIZE, *(_POINTER,) * 3),
    "kvstore_slots_place": (_SIZE, *(_POINTER,) * 2, _SIZE, *(_POINTER,) * 3),
}


class Isa(IntEnum):
    """What the library was compiled for; it takes the best that this processor has."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("KVSTORE_NATIVE", "1") == "0":
        return None, "KVSTORE_NATIVE=0 turns it off"
    path = Path(__file__).parent / _NAME
    if not path.exists():
        return None, (
            f"{path} is missing: install a wheel of this platform, or a C++ compiler and then "
            "run `python -m kvstore_kernels.native.build`"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = library.kvstore_native_version()
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = None
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        return None, f"{path} does not load: {error}"
    if not version:
        return None, f"{path} needs a processor with SSE 4.2"
    if version != VERSION:
        return None, f"{path} is version {version}, this is {VERSION}: install the project again"
    return library, ""


def library() -> ctypes.CDLL | None:
    """Return the library, or None where there is none; `reason` says why."""
    return _loaded()[0]


def reason() -> str:
    """Return why there is no library, or ""."""
    return _loaded()[1]


def use_isa(limit: Isa = Isa.AVX512) -> Isa:
    """Use no more than `limit` from now on, in this process; return what is used. For tests."""
    found = library()
    if found is None:
        raise RuntimeError(reason())
    return Isa(found.kvstore_use_isa(int(limit)))
