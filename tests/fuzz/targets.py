"""Every parser of what comes from a socket, a file or a user, as a function of bytes.

A target returns, or raises a KVStoreError; anything else is a finding. Checksums that guard a page
are put right first, else no input would get past them. `seeds` are real inputs, made by code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random

import msgspec
from google.protobuf.message import DecodeError

from kvstore import checksum
from kvstore.format.codec.lz4 import Lz4Codec
from kvstore.format.codec.zstd import ZstdCodec
from kvstore.format.frame import (
    TAG_NBYTES,
    FrameHeader,
    FrameKind,
    RunBlock,
    SegmentTag,
    Trailer,
    clear_trailer,
    encode_footer,
    encode_header,
    encode_segment_header,
    pack_header,
    parse_footer,
    parse_header,
    parse_segment_header,
    parse_trailer,
    seal_block,
    sealed_place,
)
from kvstore.format.frame.header import SEALED, plain_page
from kvstore.format.frame.page import BODY_NBYTES, guard
from kvstore.model.block import PAGE_NBYTES, BlockKey, Group, Namespace, split_keys
from kvstore.model.errors import KVStoreError
from kvstore.model.tenant import Role
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.sealing import Keyring, parse_root_key
from kvstore.server.credentials import evidence_of, host_of
from kvstore.settings import load_settings, parse_listen, parse_size
from kvstore.system.audit_chain import Chain, split_lines, verify
from kvstore.system.token_file import TokenEntry, Tokens, make_token, read_tokens
from kvstore.tier.file.found import Found
from kvstore.tier.file.keys import DirectoryKeys
from kvstore.tier.file.recovery import adopted, load_segment
from kvstore.tier.file.segment_file import SegmentFiles, segment_name
from kvstore.tier.object import lay_out
from kvstore.tier.object.layout import read_footer, read_trailer
from kvstore.tier.object.names import TombstoneName
from kvstore.tier.object.tombstones import encode_tombstone, parse_tombstone
from kvstore.transport import arena_wire
from kvstore.transport.call_wire import Frame, FrameLink, Kind, Status, decode_status, encode_status
from kvstore.transport.chunks import Scatter
from kvstore.transport.messages import NO_PLACE, NO_SLOT, grant_of
from tests.fuzz import peer
from tests.kernels.codec.hostile import SEEDS, decode_any
from tests.sim.disk import File, Platter, SimDisk
from tests.sim.sealing import SEALING

TAG = SegmentTag(7, 99)
RING = Keyring.create(SEALING.root, SEALING.tenant)
RECORD_NBYTES = 5000
NAMESPACE = Namespace(
    2, (Group("full", RECORD_NBYTES), Group("window", 4096, window_tokens=5)), (("model", "fuzz"),)
)
LOSSY = Namespace(
    2,
    (
        Group("full", RECORD_NBYTES, varies=True),
        Group("full.fine", 1000, refines=0, base_nbytes=2000),
    ),
    (("model", "fuzz"),),
    fidelity="ep",
)
TOKEN = make_token("acme", Role.WRITER)
TOKENS = Tokens([TOKEN[1]])
AUDIT_KEY = b"k" * 32


def _audit_lines() -> bytes:
    chain = Chain(AUDIT_KEY)
    return b"".join(chain.line({"method": "Clear"}, follows=not n) for n in range(3))


AUDIT_LOG = _audit_lines()
KEYS = [BlockKey(bytes([i]) * 32) for i in range(1, 9)]


@dataclass(frozen=True)
class Target:
    """One parser."""

    run: Callable[[bytes], object]
    seeds: Sequence[bytes]


def check(target: Target, data: bytes) -> None:
    """Run a target on `data`. Raises whatever is a finding."""
    try:
        target.run(data)
    except KVStoreError:
        pass  # what hostile input is to be answered with


# ---- files ---------------------------------------------------------------------------------------


def _frame(sequence: int, offset: int, keys: Sequence[BlockKey]) -> tuple[FrameHeader, bytes]:
    """Return a run, and its bytes at an offset of the segment TAG."""
    records = [Random(key).randbytes(RECORD_NBYTES) for key in keys]
    sums = [checksum(record) for record in records]
    header = FrameHeader(
        kind=FrameKind.RUN,
        sequence=sequence,
        namespace_id=NAMESPACE.id,
        blocks=tuple(
            RunBlock(key, RECORD_NBYTES, RECORD_NBYTES, value, value)
            for key, value in zip(keys, sums, strict=True)
        ),
    )
    payload = b"".join(record.ljust(2 * PAGE_NBYTES, b"\0") for record in records)
    return header, encode_header(header, TAG, offset) + payload


def _segment(*, sealed: bool) -> bytes:
    data, packed = encode_segment_header(TAG), []
    for sequence, keys in ((1, KEYS[:2]), (2, KEYS[2:3])):
        _, frame = _frame(sequence, len(data), keys)
        packed.append(pack_header(frame[:PAGE_NBYTES]))
        data += frame
    dead = FrameHeader(
        kind=FrameKind.TOMBSTONE_KEYS, sequence=3, namespace_id=NAMESPACE.id, killed=(KEYS[0],)
    )
    page = encode_header(dead, TAG, len(data))
    packed.append(pack_header(page))
    data += page
    return data + encode_footer(TAG, len(data), packed, 1) if sealed else data


def _segment_header(data: bytes) -> object:
    return parse_segment_header(data) or parse_segment_header(guard(data[:BODY_NBYTES], 0))


def _frame_header(data: bytes) -> None:
    for page in (data, guard(data[:BODY_NBYTES], TAG.nonce)):
        header = parse_header(page, TAG, PAGE_NBYTES)
        if header is not None:
            assert parse_header(encode_header(header, TAG, PAGE_NBYTES), TAG, PAGE_NBYTES) == header


def _footer(data: bytes) -> None:
    trailer = parse_trailer(guard(data[-PAGE_NBYTES:][:BODY_NBYTES], TAG.nonce), TAG)
    if trailer is not None:
        parse_footer(data[: trailer.footer_nbytes], trailer, TAG)
    parse_footer(data, Trailer(1 << 20, len(data), data[:1].count(1), checksum(data), 1), TAG)


def _object(data: bytes) -> None:
    name = OBJECT[0].name
    page = guard(data[-PAGE_NBYTES:][:BODY_NBYTES], name.nonce)
    trailer = parse_trailer(page, name.tag)
    if trailer is not None:
        nbytes = trailer.file_nbytes
        body = memoryview(data)[: read_trailer(name, nbytes, memoryview(page)).footer_nbytes]
        fixed = replace(trailer, footer_nbytes=len(body), footer_checksum=checksum(body))
        read_footer(name, nbytes, fixed, body)


def _tombstone(data: bytes) -> None:
    name = TombstoneName(NAMESPACE.id, 5)
    pages = [data[at : at + BODY_NBYTES] for at in range(0, len(data), PAGE_NBYTES)]
    fixed = b"".join(guard(page, name.nonce) for page in pages)
    parse_tombstone(name, 0.0, memoryview(fixed))


def _recovery(data: bytes) -> None:
    """Recover a file of this content, as it is and with the checksums of its pages put right."""
    fixed = b"".join(
        guard(data[at : at + BODY_NBYTES], TAG.nonce if at else 0)
        for at in range(0, len(data), PAGE_NBYTES)
    )
    for content in (data, fixed):
        file = File(size=len(content), size_before=len(content))
        for at in range(0, len(content), PAGE_NBYTES):
            page = content[at : at + PAGE_NBYTES]
            file.pages[at // PAGE_NBYTES] = page.ljust(PAGE_NBYTES, b"\0")
        names = {segment_name(TAG): file}
        disk = SimDisk(Platter(names, dict(names)), Random(0))
        loaded = load_segment(SegmentFiles(disk, Path("/fuzz"), direct=False), TAG)
        adopted(loaded)
        found = Found([loaded])
        found.take_oldest(len(found))


def _sealed_recovery(data: bytes) -> None:
    """Recover an encrypted file of this content. Without the key nothing in it is a frame."""
    names = {segment_name(TAG): File(size=len(data), size_before=len(data))}
    for at in range(0, len(data), PAGE_NBYTES):
        page = data[at : at + PAGE_NBYTES].ljust(PAGE_NBYTES, b"\0")
        names[segment_name(TAG)].pages[at // PAGE_NBYTES] = page
    disk = SimDisk(Platter(names, dict(names)), Random(0))
    keys = DirectoryKeys(disk, Path("/fuzz"), SEALING)
    keys.save(RING)
    loaded = load_segment(SegmentFiles(disk, Path("/fuzz"), direct=False, keys=keys), TAG)
    adopted(loaded)
    Found([loaded]).take_oldest(8)
    for page in (data[:PAGE_NBYTES], data[-PAGE_NBYTES:]):
        sealed_place(page)
        clear_trailer(page, TAG)


def _sealed_segment() -> bytes:
    """Return an encrypted segment with one frame and its footer."""
    key = RING.new_key()
    header, frame = _frame(1, PAGE_NBYTES, KEYS[:1])
    body = memoryview(bytearray(len(frame) - PAGE_NBYTES + TAG_NBYTES))
    block = seal_block(header, 0, key, memoryview(frame)[PAGE_NBYTES:], body)
    header = replace(header, blocks=(block,))
    packed = [pack_header(plain_page(header, TAG, PAGE_NBYTES, SEALED))]
    page = encode_header(header, TAG, PAGE_NBYTES, key)
    data = encode_segment_header(TAG, key) + page + bytes(body[:-TAG_NBYTES])
    return data + encode_footer(TAG, len(data), packed, 1, key=key)


def _stored_keys(data: bytes) -> None:
    Keyring.load(SEALING.root, SEALING.tenant, data, "fuzz")


def _root_key(data: bytes) -> None:
    key = parse_root_key(data)
    assert key is None or len(key) == 32


# ---- users ---------------------------------------------------------------------------------------


def _namespace(data: bytes) -> None:
    namespace = Namespace.from_json(data.decode("utf-8", "replace"))
    assert Namespace.from_json(namespace.to_json()).id == namespace.id


def _config(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        load_settings(Path(file.name))


def _overrides(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for parse in (parse_size, lambda text: parse_listen("server.listen", text)):
        try:
            parse(text)
        except KVStoreError:
            continue
    load_settings(None, text.split("\n"))


# ---- credentials and the audit log ---------------------------------------------------------------


def _authorization(data: bytes) -> None:
    """A header, and what gRPC calls a peer."""
    text = data.decode("latin-1")
    evidence = evidence_of(text, None)
    assert evidence.token is None or TOKENS.find(evidence.token, 0.0) is None or TOKEN[0] in text
    assert host_of(text) or not text


def _token_file(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix="kv-fuzz-") as file:
        file.write(data)
        file.flush()
        for entry in read_tokens(Path(file.name)):
            assert msgspec.json.decode(msgspec.json.encode(entry), type=TokenEntry) == entry


def _audit_log(data: bytes) -> None:
    """What is not as it was written is a fault, whatever else it is."""
    lines = [*split_lines([data])]
    found = verify(lines, AUDIT_KEY)
    assert found.lines == len(lines)
    if not found.faults:
        assert all(line in AUDIT_LOG for line in lines)


# ---- sockets -------------------------------------------------------------------------------------


def _packet(data: bytes) -> None:
    packet = arena_wire.decode(data)
    assert arena_wire.decode(msgspec.msgpack.encode(packet)) == packet


def _call_frames(data: bytes) -> None:
    """In two pieces, as a socket may cut them."""
    frames: list[Frame] = []
    link = FrameLink(frames.append, lambda: None)
    for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
        link.data_received(piece)
    for frame in frames:
        assert len(frame.body) <= len(data)
        if frame.kind is Kind.ERROR:
            decode_status(frame.body)


def _grant(data: bytes) -> None:
    try:
        reply = pb.GrantReply.FromString(data)
    except DecodeError:
        return
    for reading in (True, False):
        grant = grant_of(reply, NAMESPACE, reading=reading)
        assert len(grant.slots) == sum(span.end - span.begin for span in grant.spans)
        assert len(grant.places) in (0, len(grant.slots))
        for slot, place in zip(grant.slots, grant.places, strict=False):
            assert slot is None or place is None
            assert place is None or (place.path.startswith("/") and place.offset % PAGE_NBYTES == 0)


def _keys(data: bytes) -> None:
    assert b"".join(split_keys(data, keys_max=100)) == data


def _chunks(data: bytes) -> None:
    """The first eight bytes say how long the chunks are, the rest is in them."""
    targets = [memoryview(bytearray(10)) if data[:1] != b"\0" or i else None for i in range(4)]
    scatter = Scatter(targets, 10)
    for begin, end in zip(accumulate(data[:8], initial=8), accumulate(data[:9]), strict=False):
        scatter.write(memoryview(data[begin : begin + end]))
    scatter.finish()


def _codecs(data: bytes) -> None:
    target = memoryview(bytearray(4096))
    for codec in (Lz4Codec(), ZstdCodec()):
        try:
            codec.decode(memoryview(data), target)
        except KVStoreError:
            continue


def _seed_places() -> bytes:
    span = pb.Span(group=0, shard=0, begin=0, end=2)
    reply = pb.GrantReply(
        lease=9,
        spans=[span],
        extents=[NO_SLOT, 2],
        offsets=[0, 4096],
        checksums=[1, 2],
        files=["/f"],
        place_files=[0, NO_PLACE],
        place_offsets=[8192, 0],
    )
    return reply.SerializeToString()


def _seed_grant() -> bytes:
    span = pb.Span(group=0, shard=0, begin=0, end=2)
    reply = pb.GrantReply(
        lease=9, spans=[span], extents=[1, 2], offsets=[0, 4096], checksums=[1, 2], hit_blocks=2
    )
    return reply.SerializeToString()


_BAD_FINE = [
    LOSSY.to_json().replace(old, new).encode()
    for old, new in (
        ('"refines":0', '"refines":1'),
        ('"refines":0', '"refines":-2'),
        ('"refines":0', '"refines":1e400'),
        ('"refines":0', '"refines":true'),
        ('"base_nbytes":2000', '"base_nbytes":0'),
        ('"base_nbytes":2000', '"base_nbytes":9007199254740993'),
        ('"varies":true', '"varies":[]'),
        ('"fidelity":"ep"', '"fidelity":"exact"'),
    )
]
OBJECT = lay_out([_frame(1, 0, KEYS)[0]])

TARGETS: dict[str, Target] = {
    "segment_header": Target(_segment_header, [encode_segment_header(TAG)]),
    "frame_header": Target(_frame_header, [_frame(5, PAGE_NBYTES, KEYS)[1][:PAGE_NBYTES]]),
    "footer": Target(_footer, [_segment(sealed=True)[-2 * PAGE_NBYTES :]]),
    "object": Target(_object, [OBJECT[2]]),
    "tombstone": Target(
        _tombstone,
        [encode_tombstone(TombstoneName(NAMESPACE.id, 5), keys) for keys in (KEYS, None)],
    ),
    "sealed_recovery": Target(_sealed_recovery, [_sealed_segment()]),
    "stored_keys": Target(_stored_keys, [RING.encode()]),
    "root_key": Target(_root_key, [bytes(range(32)), b"0123456789abcdef" * 4]),
    "recovery": Target(_recovery, [_segment(sealed=False), _segment(sealed=True)]),
    "namespace": Target(
        _namespace, [NAMESPACE.to_json().encode(), LOSSY.to_json().encode(), *_BAD_FINE]
    ),
    "config": Target(
        _config, [b'[dram]\ncapacity = "2GiB"\n[file]\npath = ""\n[limits]\nlease_s = 1.5\n']
    ),
    "overrides": Target(
        _overrides, [b"dram.capacity=1GiB\nserver.listen=127.0.0.1:0\nserver.listen_open=true"]
    ),
    "authorization": Target(
        _authorization,
        [f"Bearer {TOKEN[0]}".encode(), b"ipv6:%5B2001:db8::1%5D:4711", b"ipv4:127.0.0.1:80"],
    ),
    "token_file": Target(_token_file, [msgspec.json.encode(TOKEN[1]) + b"\n# comment\n"]),
    "audit_log": Target(_audit_log, [AUDIT_LOG]),
    "packet": Target(
        _packet,
        [
            msgspec.msgpack.encode(packet)
            for packet in (
                arena_wire.Hello(1, 7, "t" * 16),
                arena_wire.Welcome(2),
                arena_wire.Extent(1, 4096),
                arena_wire.Ended(),
                arena_wire.Refused("Unavailable", "why"),
            )
        ],
    ),
    "call_frames": Target(
        _call_frames,
        [
            Frame(Kind.REQUEST, 1, b"x" * 9, 1, 5.0).encode(),
            Frame(Kind.ERROR, 2, encode_status(Status(14, "why", (("k", "v"),)))).encode(),
        ],
    ),
    "peer_requests": Target(peer.requests, peer.REQUESTS),
    "peer_answers": Target(peer.answers, peer.ANSWERS),
    "grant": Target(_grant, [_seed_grant(), _seed_places()]),
    "keys": Target(_keys, [b"".join(KEYS)]),
    "chunks": Target(_chunks, [bytes([5, 10, 10, 10, 5, 0, 0, 0]) + b"x" * 40]),
    "record": Target(decode_any, SEEDS),
    "codecs": Target(
        _codecs,
        [Lz4Codec().encode(memoryview(bytes(4096))), ZstdCodec().encode(memoryview(bytes(4096)))],
    ),
}
