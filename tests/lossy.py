"""Lossy records for tests: headers as coded records have them, and bytes that say whose they are.

Two writers of a block store different bytes under the same key, as engines do whose last bits
differ. A fine part names its base by its checksum.
"""

from __future__ import annotations

import random
import struct

from kvstore.model.block import Part
from kvstore.model.checksum import checksum

_HEADER = struct.Struct("<4sBB2B2BHIQQII24x")
L3, EP_BASE, EP_FINE = 2, 3, 4
BF16 = 1


def base_header(nbytes: int, form: int = EP_BASE) -> bytes:
    """Return the header of a base part; form: L3 for an exact one."""
    return _HEADER.pack(b"KVR1", form, BF16, 5, 4, 0, 0, 16, 1, 0, 0, 0, nbytes)


def fine_header(nbytes: int, base_checksum: int) -> bytes:
    """Return the header of the fine part of a base."""
    return _HEADER.pack(b"KVR1", EP_FINE, BF16, 3, 4, 5, 4, 16, 1, 0, base_checksum, 0, nbytes)


def base_record(writer: str, name: str, part: Part, nbytes: int, *, exact: bool) -> bytes:
    """Return what a writer stores as the base part of a block."""
    header = base_header(nbytes, L3 if exact else EP_BASE)
    return _filled(header, f"{writer} {name} {part}", nbytes)


def fine_record(writer: str, name: str, part: Part, nbytes: int, base: bytes) -> bytes:
    """Return the fine part that goes with `base`. part: the fine one."""
    return _filled(fine_header(nbytes, checksum(base)), f"{writer} {name} {part}", nbytes)


def _filled(header: bytes, seed: str, nbytes: int) -> bytes:
    unit = random.Random(seed).randbytes(100)
    return (header + unit * (nbytes // len(unit) + 1))[:nbytes]
