"""What is in the frames between two daemons: msgpack, checked before anybody uses it. Pure.

Each `decode_*` raises Incompatible for what cannot be read, and InvalidRequest for a request that
can be read and asks for the impossible.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvstore.model.block import BlockKey, NamespaceId, Span, split_keys
from kvstore.model.errors import Incompatible, InvalidRequest
from kvstore.model.member import ENGINES_MAX, Member, check_fleet_name, check_node_id
from kvstore.model.tenant import NO_TENANT_ID, TENANT_ID_NBYTES, TenantId
from kvstore.peer.base import (
    CHANGES_MAX,
    HEAD_NBYTES,
    HEADS_MAX,
    KEYS_MAX,
    NAMED_KEYS_MAX,
    RECORDS_MAX,
    HeadsAsk,
    HeadsReply,
    PeerMatch,
)
from kvstore.peer.wire import SPANS_MAX, TIMEOUT_S_MAX, TOKEN_NBYTES

MAGIC = "kvstore-peer"
BULK_KEY_NBYTES = 16
FEATURES_MAX = 32
WORD_CHARS_MAX = 300  # of an address, or a version
CHARS_MAX = 200  # of a word or a sentence of a peer

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Who is there. member.protocol: the versions it speaks."""

    magic: str
    fleet: str
    member: Member


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests have. tenant: whose blocks it is about, its id; empty: the default one,
    which a peer without tenants has alone."""

    tenant: bytes = b""


class NamespaceBody(Body, frozen=True, kw_only=True):
    """A namespace: its canonical text, and its name for people."""

    spec: str
    name: str = ""


class KeysBody(Body, frozen=True, kw_only=True):
    """CORRUPT and DELETE. keys: packed; None: all of the namespace, or of every one (""), which
    DELETE alone may say."""

    namespace: bytes
    keys: bytes | None = None


class MatchBody(Body, frozen=True, kw_only=True):
    """MATCH."""

    namespace: bytes
    keys: bytes
    skip: int = 0
    refined: bool = False


class PartsBody(Body, frozen=True, kw_only=True):
    """READ, and ARRIVAL, which waits for what a READ then asks for."""

    namespace: bytes
    keys: bytes
    spans: tuple[Span, ...]
    refined: bool = False


class BulkBody(msgspec.Struct, frozen=True, kw_only=True):
    """BULK: a token for one more bulk connection. sealed: that it must be."""

    sealed: bool = False


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to BULK. token: good once, soon. keys: of what the borrower sends, and of what it
    receives; empty: in clear."""

    token: bytes
    send_key: bytes = b""
    receive_key: bytes = b""


class ReadHead(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to READ, before the records. sizes: u32 each, 0: not there; checksums: u64."""

    instance: str
    sizes: bytes
    checksums: bytes


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An ERROR: a word for the program, a sentence for people."""

    reason: str
    message: str = ""
    retry_after_s: float = 1.0


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return what reads a body as `kind`, or raises Incompatible."""
    parse = msgspec.msgpack.Decoder(kind)

    def decode(body: bytes) -> T:
        try:
            return parse.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: no UTF-8
            raise Incompatible(f"not a {kind.__name__}: {error}") from error

    return decode


_hello = decoder(Hello)
_match_body = decoder(MatchBody)
_parts_body = decoder(PartsBody)
_keys_body = decoder(KeysBody)
_heads_ask = decoder(HeadsAsk)
_heads_reply = decoder(HeadsReply)
_match_reply = decoder(PeerMatch)
_ticket = decoder(Ticket)
_read_head = decoder(ReadHead)
_refusal = decoder(Refusal)
decode_namespace = decoder(NamespaceBody)
decode_bulk = decoder(BulkBody)


class Keys(NamedTuple):
    """The keys of a request, and their namespace's id."""

    namespace_id: NamespaceId
    keys: list[BlockKey]


def decode_hello(body: bytes) -> Hello:
    """Read a HELLO. Raises Incompatible. It is compared with nothing; its words are possible."""
    hello = _hello(body)
    member = hello.member
    lowest, highest = member.protocol
    words = (hello.fleet, member.address, member.version, *member.features, *member.engines)
    numbers = (member.arena_bytes, member.file_bytes)
    possible = (
        hello.magic == MAGIC
        and 0 < lowest <= highest < 1 << 16
        and len(member.features) <= FEATURES_MAX
        and len(member.engines) <= ENGINES_MAX
        and all(len(word) <= WORD_CHARS_MAX and word.isprintable() for word in words)
        and all(0 <= number < 1 << 63 for number in numbers)
        and re.fullmatch("[0-9a-f]{16}", member.instance) is not None
    )
    if not possible:
        raise Incompatible("not a daemon's HELLO")
    try:
        check_node_id(member.node)
        check_fleet_name(member.zone or "none")
    except InvalidRequest as error:
        raise Incompatible(f"not a daemon's HELLO: {error}") from error
    return hello


def decode_match(body: bytes) -> tuple[Keys, MatchBody]:
    """Read a MATCH. Raises Incompatible, InvalidRequest."""
    found = _match_body(body)
    keys = _keys(found.namespace, found.keys, KEYS_MAX)
    if not 0 <= found.skip <= len(keys.keys):
        raise InvalidRequest(f"skip={found.skip} of {len(keys.keys)} keys")
    return keys, found


def decode_parts(body: bytes) -> tuple[Keys, PartsBody]:
    """Read a READ or an ARRIVAL. Raises Incompatible, InvalidRequest."""
    found = _parts_body(body)
    keys = _keys(found.namespace, found.keys, KEYS_MAX)
    check_parts(len(keys.keys), found.spans)
    return keys, found


class Deleted(NamedTuple):
    """What a DELETE is about; None: all of the namespace, or of every one."""

    tenant: TenantId
    namespace_id: NamespaceId | None
    keys: list[BlockKey] | None


def decode_delete(body: bytes) -> Deleted:
    """Read a DELETE: of keys, of a namespace, or of all. Raises Incompatible, InvalidRequest."""
    found = _keys_body(body)
    tenant = tenant_of(found.tenant)
    if found.keys is None:
        return Deleted(tenant, _namespace_id(found.namespace) if found.namespace else None, None)
    return Deleted(tenant, *_keys(found.namespace, found.keys, NAMED_KEYS_MAX))


def decode_keys(body: bytes) -> tuple[TenantId, Keys]:
    """Read a CORRUPT. Raises Incompatible, InvalidRequest."""
    found = _keys_body(body)
    return tenant_of(found.tenant), _keys(found.namespace, found.keys or b"", NAMED_KEYS_MAX)


def decode_heads_ask(body: bytes) -> HeadsAsk:
    """Read a HEADS. Raises Incompatible, InvalidRequest."""
    ask = _heads_ask(body)
    possible = (
        len(ask.instance) <= CHARS_MAX
        and 0 <= ask.level < 32
        and ask.since >= -1
        and 0 <= ask.cursor < 1 << 64
        and 0.0 <= ask.wait_s <= TIMEOUT_S_MAX
    )
    if not possible:
        raise InvalidRequest("not what heads are asked by")
    tenant_of(ask.tenant)
    return ask


def decode_match_reply(body: bytes, *, keys: int) -> PeerMatch:
    """Read the answer to a MATCH of so many keys. Raises Incompatible."""
    found = _match_reply(body)
    if not 0 <= found.resident_blocks <= found.hit_blocks <= keys:
        raise Incompatible(f"a hit of {found.hit_blocks} of {keys} blocks")
    return found


def decode_heads_reply(body: bytes, *, ask: HeadsAsk) -> HeadsReply:
    """Read the answer to a HEADS. Raises Incompatible."""
    found = _heads_reply(body)
    heads, rest = divmod(len(found.heads), HEAD_NBYTES)
    if rest or found.level != ask.level or len(found.instance) > CHARS_MAX or found.since < 0:
        raise Incompatible("not the heads that were asked for")
    if found.snapshot:
        begin = ask.cursor if found.instance == ask.instance and ask.since == -1 else 0
        goes_on = heads > 0 and begin < found.cursor < 1 << 64
        is_right = found.cursor == 0 or goes_on
        possible = heads <= HEADS_MAX and not found.came and is_right
    else:
        new = found.since - ask.since
        possible = (
            found.instance == ask.instance
            and ask.since >= 0
            and found.cursor == 0
            and len(found.came) == heads <= CHANGES_MAX
            and new >= heads
            and not found.came.strip(b"\0\1")
        )
    if not possible:
        raise Incompatible("not the heads that were asked for")
    return found


def decode_ticket(body: bytes) -> Ticket:
    """Read the answer to a BULK. Raises Incompatible."""
    ticket = _ticket(body)
    lengths = len(ticket.token), len(ticket.send_key), len(ticket.receive_key)
    if lengths not in ((TOKEN_NBYTES, 0, 0), (TOKEN_NBYTES, BULK_KEY_NBYTES, BULK_KEY_NBYTES)):
        raise Incompatible("not a ticket for a bulk connection")
    if ticket.send_key and ticket.send_key == ticket.receive_key:
        raise Incompatible("one key for both directions")
    return ticket


class ReadAnswer(NamedTuple):
    """What a READ brings. sizes: 0 for a record that is not there."""

    instance: str
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]


def encode_read_head(instance: str, sizes: Sequence[int], checksums: Sequence[int]) -> bytes:
    head = ReadHead(
        instance=instance,
        sizes=struct.pack(f"<{len(sizes)}I", *sizes),
        checksums=struct.pack(f"<{len(checksums)}Q", *checksums),
    )
    return encode(head)


def decode_read_head(body: bytes, *, records: int) -> ReadAnswer:
    """Read what comes before so many records. Raises Incompatible.

    Whether the sizes are those of the namespace is not looked at.
    """
    head = _read_head(body)
    if (len(head.sizes), len(head.checksums)) != (4 * records, 8 * records):
        raise Incompatible(f"not the head of {records} records")
    return ReadAnswer(
        head.instance,
        struct.unpack(f"<{records}I", head.sizes),
        struct.unpack(f"<{records}Q", head.checksums),
    )


def decode_refusal(body: bytes) -> Refusal:
    """Read an ERROR. Raises Incompatible. Its message is cut, and can be printed."""
    found = _refusal(body)
    retry_s = found.retry_after_s
    return Refusal(
        reason="".join(filter(str.isalnum, found.reason[:32])),
        message="".join(filter(str.isprintable, found.message[:CHARS_MAX])),
        retry_after_s=min(max(0.0, retry_s), 600.0) if math.isfinite(retry_s) else 1.0,
    )


def check_parts(keys: int, spans: Sequence[Span]) -> int:
    """Return how many records the spans have. Raises InvalidRequest."""
    if len(spans) > SPANS_MAX or len({span.part for span in spans}) != len(spans):
        raise InvalidRequest("spans name a part twice, or there are too many of them")
    for part, begin, end in spans:
        if not (0 <= begin <= end <= keys and 0 <= part.group < 1 << 16 > part.shard >= 0):
            raise InvalidRequest(f"span {begin}:{end} of {keys} keys")
    records = sum(end - begin for _, begin, end in spans)
    if records > RECORDS_MAX:
        raise InvalidRequest(f"{records} records in one read; the limit is {RECORDS_MAX}")
    return records


def tenant_of(data: bytes) -> TenantId:
    """Return whose blocks a request is about. Raises InvalidRequest."""
    if data and len(data) != TENANT_ID_NBYTES:
        raise InvalidRequest(f"a tenant's id of {len(data)} bytes")
    return TenantId(data) if data else NO_TENANT_ID


def _namespace_id(data: bytes) -> NamespaceId:
    if len(data) != 32:
        raise InvalidRequest(f"a namespace id of {len(data)} bytes")
    return NamespaceId(data)


def _keys(namespace: bytes, keys: bytes, keys_max: int) -> Keys:
    return Keys(_namespace_id(namespace), split_keys(keys, keys_max=keys_max))
