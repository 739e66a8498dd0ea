"""What a stored fine part says of its base: all that a node reads of a coded record.

Two computations of a block differ in last bits, and planes of two encodings do not mix. So the
header of a fine part holds the checksum of the base it was made with (docs/design/formats.md), and
whoever brings one beside a base from elsewhere (a disk, a bucket) looks whether they belong
together.
"""

from __future__ import annotations

import struct

from kvstore.model.block import Buffer

_HEADER = struct.Struct("<4sB19xQ")
_MAGIC, _EP_FINE = b"KVR1", 4


def named_base(record: Buffer) -> int | None:
    """Return the checksum of the base that a fine part was made with; None: it names none, and
    nothing can be said of it."""
    if len(record) < _HEADER.size:
        return None
    magic, form, pair = _HEADER.unpack_from(record)
    return pair if (magic, form) == (_MAGIC, _EP_FINE) else None


def belongs(record: Buffer, base_checksum: int | None) -> bool:
    """Say whether a fine part may stand beside a base; None: its base is not known here."""
    named = named_base(record)
    return named is None or base_checksum is None or named == base_checksum
