"""The file format: segments of frames. Every number is little-endian, every unit a 4 KiB page.

A *segment* is one append-only file. A *frame* is one run of blocks, or one tombstone. Nothing is
ever overwritten; a frame leaves by having its pages punched out, a segment by being unlinked.

```
segment file   page 0      segment header
               page 1..    frames: one header page, then the payload; holes between them are legal
               ...         footer: packed copies of the frame headers     } only when the
               last page   trailer: where the footer is, and its checksum } segment is sealed
```

**Segment header page.** The layout of this page is the same in every format version.

| offset | bytes | field |
| -----: | ----: | ----- |
| 0 | 8 | magic `KVSEGMNT` |
| 8 | 2 | format version |
| 10 | 6 | zero |
| 16 | 8 | segment number |
| 24 | 8 | nonce: random, drawn once per segment |
| 32 | 4056 | zero |
| 4088 | 8 | XXH3-64 of bytes 0..4087 |

Number and nonce also stand in the file's name, `<number:016x>-<nonce:016x>.segment`, so a damaged
first page costs nothing.

**Frame header page.** Its checksum is seeded with the segment's nonce and the page names its own
place, so neither a page left over from another life of the disk nor one forged inside a payload is
taken for a frame.

| offset | bytes | field |
| -----: | ----: | ----- |
| 0 | 8 | magic `KVSFRAME` |
| 8 | 2 | format version |
| 10 | 1 | kind: 1 run, 2 tombstone of keys, 3 tombstone of a namespace |
| 11 | 1 | codec id of the payload (zero in tombstones) |
| 12 | 4 | flags: none is defined; a frame with a flag unknown to the reader is dropped |
| 16 | 8 | sequence: the higher one wins |
| 24 | 8 | offset of this page in its file |
| 32 | 8 | segment number |
| 40 | 16 | tenant (zero: the default tenant) |
| 56 | 32 | namespace id |
| 88 | 32 | parent: key of the block before the run (zero: the run starts a prefix) |
| 120 | 4 | part: group |
| 124 | 4 | part: shard |
| 128 | 4 | first block: index in its prefix of the run's first block |
| 132 | 4 | count: entries that follow (run 1..16, tombstone of keys 1..64, of a namespace 0) |
| 136 | 56 x count | run: key 32, raw_nbytes 4, stored_nbytes 4, raw checksum 8, stored checksum 8 |
| 136 | 32 x count | tombstone of keys: key 32 |
| ... | | zero |
| 4088 | 8 | XXH3-64 of bytes 0..4087, seeded with the nonce |

**Payload** of a run: each block's stored bytes, in order, each from a page boundary on, so a block
can be read and decoded alone and a raw one lands aligned in its slot. What fills up the last page
of a block is written as zeros, and readers ignore it: older writers left other bytes there.
Checksums are those of `kvstore.model.checksum`: `raw` over the record, `stored` over the encoded
bytes. A tombstone has no payload. It kills every part of its keys (or every block of its namespace)
in frames of a lower sequence, in all files of a directory: they are one tenant's.

**Footer**: one record per frame, `u16 nbytes` and then the packed header: bytes 0..135 and the
entries of the header page, followed by its checksum; the zeros between are left out. Rebuilt, it
is parsed and checked like the page itself. The body is filled up with zeros to a whole page.

**Trailer page**, the last of the file.

| offset | bytes | field |
| -----: | ----: | ----- |
| 0 | 8 | magic `KVSTRAIL` |
| 8 | 2 | format version |
| 10 | 6 | zero |
| 16 | 8 | segment number |
| 24 | 8 | nonce |
| 32 | 8 | offset of the footer in the file, a multiple of 4096 |
| 40 | 8 | bytes of the footer, without the filling |
| 48 | 8 | number of records |
| 56 | 8 | checksum of the footer |
| 64 | 8 | lowest sequence of any run ever placed in the segment (all ones: none) |
| 72 | 4016 | zero |
| 4088 | 8 | XXH3-64 of bytes 0..4087, seeded with the nonce |

## Format 2: encrypted

Written where a key is configured; format 1 stays as it is, byte by byte. What is *sealed* is
AES-256-GCM under the segment's own random key, with a random nonce of 12 bytes for each piece. The
associated data binds a piece to what it is, so that one which was moved or exchanged does not open.
Format numbers, places and sizes of files stay readable; keys, namespaces and what is stored do not.

**Segment header page**: as in format 1, with version 2, and

| offset | bytes | field |
| -----: | ----: | ----- |
| 32 | 16 | tenant |
| 48 | 4 | epoch of the tenant's key |
| 52 | 4 | zero |
| 56 | 40 | the segment's key, wrapped by the tenant's (AES key wrap, RFC 3394) |
| 2048 | 8 | magic `KVSEGKEY` |
| 2056 | 16, 4, 4, 40 | tenant, epoch, zero, and the wrapped key once more |

Key wrap has a check of its own, so of a damaged page the copy that unwraps is taken. The trailer
has the key as well.

**Frame header page**: bytes 0..135 have the fields of format 1, with version 2 and flags 1.

| offset | bytes | field |
| -----: | ----: | ----- |
| 0 | 40 | in clear: magic, version, kind, codec, flags, sequence, offset, segment number |
| 40 | 4028 | sealed, bound to bytes 0..39 and the tenant: |
| 136 | 84 x count | - run: the 56 bytes of format 1, then nonce 12 and tag 16 of the block |
| 136 | 32 x count | - tombstone of keys: key 32 |
| 4060 | 8 | - XXH3-64 of bytes 0..4059, seeded with the segment's nonce |
| 4068 | 12 | nonce |
| 4080 | 16 | tag |

**Payload**: each block's stored bytes, sealed, from a page boundary on, filled up with zeros. Bound
to `KVSBLOCK`, tenant 16, namespace 32, group 4, shard 4, block index 8, key 32, raw_nbytes 4, codec
1. Both checksums are of what was sealed: they find what memory breaks, the tag what people change.

**Footer**: the records of format 1, each with the checksum at 4060, sealed as one piece. Bound to
`KVSFOOTR`, segment number 8, segment nonce 8, tenant 16.

**Trailer page**

| offset | bytes | field |
| -----: | ----: | ----- |
| 0 | 8 | magic `KVSTRAIL` |
| 8 | 2 | format version |
| 10 | 2 | zero |
| 12 | 4 | epoch of the tenant's key |
| 16 | 8 | segment number |
| 24 | 8 | segment nonce |
| 32 | 16 | tenant |
| 48 | 40 | the segment's wrapped key |
| 88 | 8 | offset of the footer in the file, a multiple of 4096 |
| 96 | 8 | bytes of the footer, without the filling |
| 104 | 3964 | sealed, bound to bytes 0..103 and the tenant: |
| 104 | 8 | - number of records |
| 112 | 8 | - checksum of the footer, before it was sealed |
| 120 | 8 | - lowest sequence of any run ever placed in the segment (all ones: none) |
| 128 | 28 | - nonce and tag of the footer |
| 4060 | 8 | - XXH3-64 of bytes 0..4059, seeded with the segment's nonce |
| 4068 | 12 | nonce |
| 4080 | 16 | tag |

**Notes** beside the segments: magic `KVSSEAL2`, tenant 16, epoch 4, a key of its own, wrapped, 40,
nonce 12, tag 16; then the note, sealed, bound to what it is and the tenant.

Whatever does not parse is `None`; no input makes a parser raise anything else than what it names.
"""

from kvstore.format.frame.header import (
    KILLED_MAX,
    NO_KEY,
    NO_TENANT,
    RUN_BLOCKS_MAX,
    FrameHeader,
    FrameKind,
    RunBlock,
    encode_header,
    pack_header,
    parse_header,
    sealed_place,
)
from kvstore.format.frame.packed import PackedFrames
from kvstore.format.frame.page import SegmentTag
from kvstore.format.frame.seal import (
    NONCE_NBYTES,
    SEAL_NBYTES,
    TAG_NBYTES,
    SegmentKey,
    WrappedKey,
    blob_key,
    block_aad,
    open_blob,
    open_block,
    seal_blob,
    seal_block,
)
from kvstore.format.frame.segment import (
    FOOTER_RECORD_NBYTES_MAX,
    NO_SEQUENCE,
    ClearTrailer,
    Trailer,
    clear_trailer,
    encode_footer,
    encode_segment_header,
    packed_footer,
    parse_footer,
    parse_segment_header,
    parse_trailer,
    segment_keys,
)

__all__ = [
    "FOOTER_RECORD_NBYTES_MAX",
    "KILLED_MAX",
    "NONCE_NBYTES",
    "NO_KEY",
    "NO_SEQUENCE",
    "NO_TENANT",
    "RUN_BLOCKS_MAX",
    "SEAL_NBYTES",
    "TAG_NBYTES",
    "ClearTrailer",
    "FrameHeader",
    "FrameKind",
    "PackedFrames",
    "RunBlock",
    "SegmentKey",
    "SegmentTag",
    "Trailer",
    "WrappedKey",
    "blob_key",
    "block_aad",
    "clear_trailer",
    "encode_footer",
    "encode_header",
    "encode_segment_header",
    "open_blob",
    "open_block",
    "pack_header",
    "packed_footer",
    "parse_footer",
    "parse_header",
    "parse_segment_header",
    "parse_trailer",
    "seal_blob",
    "seal_block",
    "sealed_place",
    "segment_keys",
]
