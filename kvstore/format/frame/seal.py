"""What is encrypted, and what each piece is bound to. Pure: keys come from outside.

Every piece is sealed by AES-256-GCM under the random key of its segment, with a random nonce. Its
associated data says what it is, so a piece that stands anywhere else does not open.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.format.frame.page import SegmentTag
from kvstore.model.block import PAGE_NBYTES, Buffer, padded

if TYPE_CHECKING:
    from kvstore.format.frame.header import FrameHeader, RunBlock

KEY_WRAPPED_NBYTES = 40  # 256 bits in AES key wrap
NONCE_NBYTES = 12
TAG_NBYTES = 16
SEAL_NBYTES = NONCE_NBYTES + TAG_NBYTES
PLAIN_NBYTES = PAGE_NBYTES - SEAL_NBYTES  # of a page, before it is sealed
PLAIN_BODY_NBYTES = PLAIN_NBYTES - 8  # of that, before its checksum

_BLOCK = struct.Struct("<8s16s32sIIQ32sIB")
_FOOTER = struct.Struct("<8sQQ16s")
_BLOB = struct.Struct(f"<8s16sI{KEY_WRAPPED_NBYTES}s{SEAL_NBYTES}s")
_BLOB_MAGIC = b"KVSSEAL2"
BLOB_NBYTES = _BLOB.size  # what a note grows by


class WrappedKey(NamedTuple):
    """A segment's key as its file holds it: wrapped by the tenant's key of that epoch."""

    tenant: bytes
    epoch: int
    wrapped: bytes


class SegmentKey(Protocol):
    """Seals and opens what one segment or object holds. Safe to call from several threads."""

    @property
    def tenant(self) -> bytes: ...

    @property
    def wrapped(self) -> WrappedKey: ...

    def seal(self, data: Buffer, aad: bytes, target: memoryview) -> bytes:
        """Write the ciphertext of `data`, then its tag, into `target`, 16 bytes longer.

        Returns the seal: the nonce, drawn at random, and the tag.
        """

    def open(self, sealed: Buffer, nonce: bytes, aad: bytes, target: memoryview) -> bool:
        """Decrypt a ciphertext and its tag into `target`, 16 bytes shorter.

        False if the tag is wrong: then `target` holds zeros.
        """

    def open_in_place(self, data: memoryview, seal: bytes, aad: bytes) -> bool:
        """Decrypt a ciphertext where it lies. seal: as `seal` returned it.

        False if the tag is wrong: then `data` holds zeros.
        """


def block_aad(header: FrameHeader, index: int) -> bytes:
    """Return what block `index` of a run is bound to: whose, which and of what size it is."""
    block = header.blocks[index]
    return _BLOCK.pack(
        b"KVSBLOCK",
        header.tenant,
        header.namespace_id,
        header.part.group,
        header.part.shard,
        header.first_block + index,
        block.key,
        block.raw_nbytes,
        header.codec_id,
    )


def seal_block(
    header: FrameHeader, position: int, key: SegmentKey, source: memoryview, target: memoryview
) -> RunBlock:
    """Encrypt a block of a run into `target`, up to its last page, and return it with its seal.

    source: begins with the stored bytes. target: has room for a tag behind them.
    """
    block = header.blocks[position]
    nbytes = block.stored_nbytes
    aad = block_aad(header, position)
    seal = key.seal(source[:nbytes], aad, target[: nbytes + TAG_NBYTES])
    after = target[nbytes : padded(nbytes)]
    after[:] = bytes(len(after))  # of the tag, what is left in the page
    return block._replace(seal=seal)


def open_block(header: FrameHeader, position: int, key: SegmentKey, stored: memoryview) -> bool:
    """Decrypt a block where it lies; False, and zeros, if its tag is wrong. stored: begins with
    it."""
    block = header.blocks[position]
    return key.open_in_place(stored[: block.stored_nbytes], block.seal, block_aad(header, position))


def seal_page(plain: bytes, clear_nbytes: int, key: SegmentKey) -> bytes:
    """Return the 4 KiB page of `plain`: its first bytes in clear, the others sealed with them."""
    page = memoryview(bytearray(PAGE_NBYTES))
    clear = plain[:clear_nbytes]
    page[:clear_nbytes] = clear
    target = page[clear_nbytes : PLAIN_NBYTES + TAG_NBYTES]
    seal = key.seal(plain[clear_nbytes:], clear + key.tenant, target)
    page[PLAIN_NBYTES:] = seal
    return bytes(page)


def open_page(page: bytes | memoryview, clear_nbytes: int, key: SegmentKey) -> bytes | None:
    """Return what `seal_page` was given; None for any other page."""
    if len(page) != PAGE_NBYTES:
        return None
    plain = memoryview(bytearray(PLAIN_NBYTES))
    clear = plain[:clear_nbytes] = bytes(page[:clear_nbytes])
    nonce = bytes(page[PLAIN_NBYTES : PLAIN_NBYTES + NONCE_NBYTES])
    sealed = bytes(page[clear_nbytes:PLAIN_NBYTES]) + bytes(page[-TAG_NBYTES:])
    if not key.open(sealed, nonce, clear + key.tenant, plain[clear_nbytes:]):
        return None
    return bytes(plain)


def seal_footer(body: bytes, tag: SegmentTag, key: SegmentKey) -> tuple[bytes, bytes]:
    """Return the ciphertext of a footer's body, and its seal."""
    target = memoryview(bytearray(len(body) + TAG_NBYTES))
    seal = key.seal(body, _footer_aad(tag, key), target)
    return bytes(target[: len(body)]), seal


def open_footer(body: Buffer, seal: bytes, tag: SegmentTag, key: SegmentKey) -> bytes | None:
    """Return the body that `seal_footer` was given; None for anything else."""
    plain = memoryview(bytearray(len(body)))
    nonce, own_tag = seal[:NONCE_NBYTES], seal[NONCE_NBYTES:]
    good = key.open(bytes(body) + own_tag, nonce, _footer_aad(tag, key), plain)
    return bytes(plain) if good else None


def _footer_aad(tag: SegmentTag, key: SegmentKey) -> bytes:
    return _FOOTER.pack(b"KVSFOOTR", tag.number, tag.nonce, key.tenant)


def seal_blob(data: bytes, label: bytes, key: SegmentKey) -> bytes:
    """Return a note, sealed, with its own key. label: what it is; it opens as nothing else."""
    target = memoryview(bytearray(len(data) + TAG_NBYTES))
    seal = key.seal(data, label + key.tenant, target)
    tenant, epoch, wrapped = key.wrapped
    return _BLOB.pack(_BLOB_MAGIC, tenant, epoch, wrapped, seal) + bytes(target[: len(data)])


def blob_key(blob: Buffer) -> WrappedKey | None:
    """Return the key that a sealed note names; None for what is none."""
    if len(blob) < _BLOB.size:
        return None
    magic, tenant, epoch, wrapped, _ = _BLOB.unpack_from(blob)
    return WrappedKey(tenant, epoch, wrapped) if magic == _BLOB_MAGIC else None


def open_blob(blob: Buffer, label: bytes, key: SegmentKey) -> bytes | None:
    """Return what `seal_blob` was given; None for anything else."""
    *_, seal = _BLOB.unpack_from(blob)
    sealed = bytes(blob)[_BLOB.size :]
    plain = memoryview(bytearray(len(sealed)))
    nonce, own_tag = seal[:NONCE_NBYTES], seal[NONCE_NBYTES:]
    good = key.open(sealed + own_tag, nonce, label + key.tenant, plain)
    return bytes(plain) if good else None
