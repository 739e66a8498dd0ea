"""Deletes of the fleet, kept in etcd for those who are away.

    /kvstore/v1/<fleet>/deletes/<id>       a delete, under a lease of `kept_s`
    /kvstore/v1/<fleet>/applied/<node id>  a token, under a shorter lease that the daemon renews

etcd's revisions order deletes; their ids only have to differ. As long as the token of a daemon is
there, so is every delete since it was renewed: both leases run by etcd's clock, and the token's is
the shorter one. A token that is gone, or is another one, is that of a daemon that was away for too
long, or of an etcd that has lost what it had.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvstore.membership.etcd_calls import EtcdCalls
from kvstore.model.block import KEY_NBYTES, BlockKey, NamespaceId
from kvstore.model.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.model.member import NodeId
from kvstore.model.tenant import NO_TENANT_ID, TenantId
from kvstore.rpc.etcd import etcd_pb2 as pb

logger = logging.getLogger(__name__)

KEYS_MAX = 1000  # of an entry: etcd takes 1.5 MiB a request
ENTRY_NBYTES_MAX = 64 << 10
ENTRIES_MAX = 4096  # in etcd: at most 180 MB of its 2 GB
PAGE_ENTRIES = 8  # of 1.5 MiB at the most, which is what etcd takes: less than an answer may have
NAMESPACE_NBYTES_MAX = 64
TOKEN_SHARE = 0.8  # of the time for which deletes are kept
CALL_S = 2.0


class Delete(NamedTuple):
    """Blocks that are deleted. keys: None is all of a namespace, and without one, of all. revision:
    of etcd, at which it was kept; 0: not yet."""

    namespace_id: NamespaceId | None
    keys: tuple[BlockKey, ...] | None
    revision: int = 0


@dataclass(slots=True)
class Found:
    """Deletes in the order of etcd's revisions. revision: up to which. refused: entries that are
    none, or too large."""

    revision: int = 0
    deletes: list[Delete] = field(default_factory=list)
    refused: int = 0


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    namespace: bytes | None = None
    keys: bytes | None = None


def encode_delete(delete: Delete) -> bytes:
    keys = b"".join(delete.keys) if delete.keys is not None else None
    return msgspec.json.encode(_Entry(delete.namespace_id, keys))


def decode_delete(data: bytes) -> Delete:
    """Return what an entry says. Raises InvalidRequest."""
    if len(data) > ENTRY_NBYTES_MAX:
        raise InvalidRequest(f"it has {len(data):,} bytes; {ENTRY_NBYTES_MAX:,} are allowed")
    try:
        entry = msgspec.json.decode(data, type=_Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"it is no delete: {str(error)[:200]}") from error
    name, keys = entry.namespace, entry.keys
    if name is not None and not 0 < len(name) <= NAMESPACE_NBYTES_MAX:
        raise InvalidRequest(f"its namespace has {len(name)} bytes")
    if keys is None:
        return Delete(NamespaceId(name) if name is not None else None, None)
    if name is None or not keys or len(keys) % KEY_NBYTES or len(keys) > KEYS_MAX * KEY_NBYTES:
        raise InvalidRequest(f"it has {len(keys)} bytes of keys, or no namespace")
    cut = range(0, len(keys), KEY_NBYTES)
    return Delete(NamespaceId(name), tuple(BlockKey(keys[at : at + KEY_NBYTES]) for at in cut))


class EtcdDeletes:
    """The deletes of one tenant of a fleet. kept_s: how long each is kept. Every method raises
    Unavailable and ConfigError as the calls do."""

    def __init__(
        self, calls: EtcdCalls, fleet: str, kept_s: float, tenant: TenantId = NO_TENANT_ID
    ) -> None:
        whose = f"tenants/{tenant.hex()}/" if tenant != NO_TENANT_ID else ""
        self._calls = calls
        self._prefix = f"/kvstore/v1/{fleet}/{whose}deletes/".encode()
        self._end = self._prefix[:-1] + b"0"
        self._applied = f"/kvstore/v1/{fleet}/{whose}applied/".encode()
        self._kept_s = kept_s
        self.token_s = TOKEN_SHARE * kept_s
        self._lease = 0  # of the token

    async def write(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> None:
        """Keep a delete. Raises Unavailable if etcd keeps too many already."""
        deletes = [Delete(namespace_id, None)]
        if keys is not None:
            cut = range(0, len(keys), KEYS_MAX)
            deletes = [Delete(namespace_id, tuple(keys[at : at + KEYS_MAX])) for at in cut]
        kept = await self._calls.range(
            pb.RangeRequest(key=self._prefix, range_end=self._end, count_only=True),
            timeout_s=CALL_S,
        )
        if kept.count + len(deletes) > ENTRIES_MAX:
            raise Unavailable(
                f"etcd keeps {kept.count} deletes of {ENTRIES_MAX} already: delete whole namespaces"
                " instead of keys, or lower cluster.deletes_kept_days",
                reason="fleet",
            )
        grant = await self._calls.grant(int(self._kept_s), timeout_s=CALL_S)
        name = secrets.token_hex(16)
        for number, delete in enumerate(deletes):
            key = self._prefix + f"{name}-{number:04x}".encode()
            await self._put(key, encode_delete(delete), grant.lease)

    async def read(self, after: int) -> Found:
        """Return the deletes after a revision, as of one moment."""
        found, deletes = Found(), list[Delete]()
        begin = self._prefix
        for _ in range(2 * ENTRIES_MAX // PAGE_ENTRIES):
            reply = await self._calls.range(
                pb.RangeRequest(
                    key=begin,
                    range_end=self._end,
                    limit=PAGE_ENTRIES,
                    revision=found.revision,
                    min_mod_revision=after + 1,
                ),
                timeout_s=CALL_S,
            )
            found.revision = found.revision or reply.header.revision
            for kv in reply.kvs:
                try:
                    deletes.append(decode_delete(kv.value)._replace(revision=kv.mod_revision))
                except InvalidRequest as error:
                    found.refused += 1
                    logger.warning("delete=bad_entry key=%r error=%s", kv.key[:200], error)
            if not reply.more or not reply.kvs:
                found.deletes = sorted(deletes, key=lambda each: each.revision)
                return found
            begin = reply.kvs[-1].key + b"\0"
        raise Unavailable(f"etcd has more than {2 * ENTRIES_MAX} deletes of the fleet: not ours")

    async def token(self, node: NodeId) -> str:
        """Return the token of a daemon; "": there is none."""
        request = pb.RangeRequest(key=self._applied + node.encode())
        reply = await self._calls.range(request, timeout_s=CALL_S)
        return reply.kvs[0].value.decode("ascii", "replace") if reply.kvs else ""

    async def renew(self, node: NodeId, token: str) -> None:
        """Put another token in the place of the last one."""
        if not self._lease or not await self._calls.renew(self._lease, timeout_s=CALL_S):
            self._lease = (await self._calls.grant(int(self.token_s), timeout_s=CALL_S)).lease
        try:
            await self._put(self._applied + node.encode(), token.encode(), self._lease)
        except KVStoreError:
            self._lease = 0
            raise

    async def _put(self, key: bytes, value: bytes, lease: int) -> None:
        put = pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))
        await self._calls.txn(pb.TxnRequest(success=[put]), timeout_s=CALL_S)
