"""Other bytes with the same checksum: second preimages of XXH3-64, for records of kvstore.

XXH3 has no key. It takes a leaf in blocks of 1024 bytes, 16 stripes of eight words each. Per stripe
and lane i, with the word d and the secret's word s:

    acc[i ^ 1] += d            acc[i] += low32(d ^ s) * high32(d ^ s)

A word with the low half of `s` adds nothing by the product, nor does one with its high half. So the
last two stripes of a block can add any 64 bits to each lane: the block ends in the state in which
the old one ended, whatever its first 14 stripes are now, and what follows stays as it is.
"""

from __future__ import annotations

import struct

LEAF_NBYTES = 64 << 10
BLOCK_NBYTES = 1024
STRIPE_NBYTES = 64
FREE_STRIPES = 14  # of a block: the last two are for the state
FREE_NBYTES = FREE_STRIPES * STRIPE_NBYTES
_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1
_WORDS = struct.Struct("<8Q")
# The default secret of XXH3, as far as a block uses it.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def forged(record: bytes, message: bytes) -> bytes:
    """Return a record with the checksum of `record`, with `message` in the first block of each
    whole leaf. Raises ValueError for a record without one."""
    if len(record) < LEAF_NBYTES or len(message) > FREE_NBYTES:
        raise ValueError("a forgery takes a leaf of 64 KiB, and has room for 896 bytes")
    out = bytearray(record)
    for start in range(0, len(record) - LEAF_NBYTES + 1, LEAF_NBYTES):
        block = bytes(out[start : start + BLOCK_NBYTES])
        out[start : start + BLOCK_NBYTES] = _forged_block(block, message)
    return bytes(out)


def _forged_block(old: bytes, message: bytes) -> bytes:
    new = message + old[len(message) : FREE_NBYTES]
    want = _added(old, 16)
    have = _added(new, FREE_STRIPES)
    no_product = [_secret(FREE_STRIPES), _secret(FREE_STRIPES + 1)]
    first, second = [], []
    for lane in range(8):
        low, high = no_product[0][lane] & _LOW, no_product[1][lane] >> 32
        missing = (want[lane ^ 1] - have[lane ^ 1] - low - (high << 32)) & _MASK
        first.append((missing >> 32) << 32 | low)
        second.append(high << 32 | missing & _LOW)
    return new + _WORDS.pack(*first) + _WORDS.pack(*second)


def _added(block: bytes, stripes: int) -> list[int]:
    """Return what the first stripes of a block add to each lane."""
    lanes = [0] * 8
    for stripe in range(stripes):
        words = _WORDS.unpack_from(block, stripe * STRIPE_NBYTES)
        for lane, (word, secret) in enumerate(zip(words, _secret(stripe), strict=True)):
            mixed = word ^ secret
            lanes[lane ^ 1] += word
            lanes[lane] += (mixed & _LOW) * (mixed >> 32)
    return [lane & _MASK for lane in lanes]


def _secret(stripe: int) -> tuple[int, ...]:
    return _WORDS.unpack_from(_SECRET, 8 * stripe)
