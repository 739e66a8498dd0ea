"""Members out of the keys that etcd has. An entry that is none is counted, and left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvstore.membership.entry import decode_member
from kvstore.model.errors import InvalidRequest
from kvstore.model.member import Member, NodeId
from kvstore.rpc.etcd import etcd_pb2 as pb

logger = logging.getLogger(__name__)

BAD_MAX = 1024  # keys that are remembered for having a bad entry


class Entries:
    """What the keys under a prefix say. bad: the keys whose entries are none."""

    def __init__(self, prefix: bytes) -> None:
        self.bad: set[bytes] = set()
        self._prefix = prefix
        self._read: dict[bytes, tuple[bytes, Member]] = {}  # most lists say nothing new

    def parse(
        self, kvs: Sequence[pb.KeyValue], *, all_there_are: bool = False
    ) -> dict[NodeId, Member]:
        """Return the members. all_there_are: what was read of other keys can be forgotten."""
        found: dict[NodeId, Member] = {}
        read: dict[bytes, tuple[bytes, Member]] = {}
        bad = set() if all_there_are else self.bad
        for kv in kvs:
            value, member = self._read.get(kv.key, (b"", None))
            if member is None or value != kv.value:
                member = self._member(kv)
            if member is None:
                if len(bad) < BAD_MAX:
                    bad.add(kv.key)
                continue
            bad.discard(kv.key)
            read[kv.key] = kv.value, member
            found[member.node] = member
        self.bad = bad
        if all_there_are:
            self._read = read
        return found

    def _member(self, kv: pb.KeyValue) -> Member | None:
        try:
            member = decode_member(kv.value)
            if kv.key != self._prefix + member.node.encode():
                raise InvalidRequest(f"it is of the node {member.node}")
        except InvalidRequest as error:
            if kv.key not in self.bad:
                logger.warning("member=bad_entry key=%r error=%s", kv.key[:200], error)
            return None
        return member
