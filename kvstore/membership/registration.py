"""This daemon's own key in etcd: made once, renewed, changed, and given back."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from kvstore.membership.base import NodeIdTaken, Ping
from kvstore.membership.entry import decode_member, encode_member
from kvstore.membership.etcd_calls import EtcdCalls
from kvstore.membership.held import answers
from kvstore.model.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.model.member import Member, NodeId
from kvstore.rpc.etcd import etcd_pb2 as pb

logger = logging.getLogger(__name__)

CALL_S = 1.0
END_S = 1.0
RACES_MAX = 4  # how often others may change the key between our look and our change
CLAIM_SLACK_S = 1.0  # etcd removes what has expired twice a second
NOBODY = Member(NodeId("0" * 32), "0" * 16, "")


class Registration:
    """The key, and its lease: 0 is none. own: what the key is to say."""

    def __init__(self, calls: EtcdCalls, prefix: bytes, ttl_s: float, ping: Ping) -> None:
        self.own = NOBODY
        self.lease = 0
        self.claims = 0  # how often the key was made
        self.claiming = False  # etcd was asked to make it, and may do so later than we hear of it
        self.on_claim: list[Callable[[], None]] = []  # told of each
        self.ttl_s = float(math.ceil(ttl_s))
        self._calls = calls
        self._prefix = prefix
        self._ping = ping
        self._published: Member | None = None  # what the key says, as far as is known

    def is_right(self, found: Member | None, *, absent: bool = False) -> bool:
        """Tell whether the key, as etcd has it, is ours. absent: what none means."""
        if not self.lease:
            return True  # it is being made
        return absent if found is None else found.instance == self.own.instance

    def doubt(self) -> None:
        """Have `keep` look at the key, whatever the lease says."""
        self._published = None

    async def claim(self) -> None:
        """Make the key. One whose owner does not answer is waited for until it expires.

        Raises NodeIdTaken, Unavailable, ConfigError.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.ttl_s + CLAIM_SLACK_S
        while True:
            owner = await self._register()
            if owner is None:
                return
            if loop.time() >= until or await answers(self._ping, owner):
                raise NodeIdTaken(self.own.node, owner.address)
            await asyncio.sleep(self.ttl_s / 8)

    async def keep(self) -> None:
        """Renew the key, and make it say what `own` is; if it is gone, make it anew.

        Raises NodeIdTaken, Unavailable, ConfigError.
        """
        renewed = self.lease and await self._calls.renew(self.lease, timeout_s=CALL_S)
        if renewed and (self._published == self.own or await self._change()):
            return
        self.lease = 0
        owner = await self._register()
        if owner is not None:
            raise NodeIdTaken(self.own.node, owner.address)

    async def end(self) -> None:
        """Give the key back at once; if that fails, it expires."""
        lease, self.lease = self.lease, 0
        if lease:
            await self._revoke(lease)

    @property
    def _key(self) -> bytes:
        return self._prefix + self.own.node.encode()

    async def _change(self) -> bool:
        """Write `own`, if the key is still under our lease."""
        own = self.own
        ours = pb.Compare(target=pb.Compare.LEASE, key=self._key, lease=self.lease)
        reply = await self._calls.txn(
            pb.TxnRequest(compare=[ours], success=[self._put(own, self.lease)]), timeout_s=CALL_S
        )
        if reply.succeeded:
            self._published = own
        return bool(reply.succeeded)

    async def _register(self) -> Member | None:
        """Make the key under a new lease. Return the daemon that has it, if another one does."""
        grant = await self._calls.grant(int(self.ttl_s), timeout_s=CALL_S)
        own, unheard = self.own, self.claiming
        self.claiming = True  # an answer that is lost leaves it so
        try:
            owner = await self._make(own, grant.lease)
        except KVStoreError:
            await self._revoke(grant.lease)
            raise
        if owner is not None:
            self.claiming = unheard
            await self._revoke(grant.lease)
            return owner
        self.lease, self.ttl_s, self._published = grant.lease, grant.ttl_s, own
        self.claims, self.claiming = self.claims + 1, False
        for told in self.on_claim:
            told()
        logger.info("member=registered node=%s ttl_s=%.0f", own.node, self.ttl_s)
        return None

    async def _make(self, own: Member, lease: int) -> Member | None:
        """Create the key; or take it over from our own earlier start."""
        compare = pb.Compare(target=pb.Compare.CREATE, key=self._key, create_revision=0)
        for _ in range(RACES_MAX):
            reply = await self._calls.txn(
                pb.TxnRequest(
                    compare=[compare],
                    success=[self._put(own, lease)],
                    failure=[pb.RequestOp(request_range=pb.RangeRequest(key=self._key))],
                ),
                timeout_s=CALL_S,
            )
            if reply.succeeded:
                return None
            found = reply.responses[0].response_range.kvs if reply.responses else ()
            if not found:  # it expired just now
                compare = pb.Compare(target=pb.Compare.CREATE, key=self._key, create_revision=0)
                continue
            owner = _owner(found[0].value)
            if owner.address != own.address and owner.instance != own.instance:
                return owner
            compare = pb.Compare(
                target=pb.Compare.MOD, key=self._key, mod_revision=found[0].mod_revision
            )
        raise Unavailable("the key of this daemon in etcd changes all the time")

    def _put(self, own: Member, lease: int) -> pb.RequestOp:
        put = pb.PutRequest(key=self._key, value=encode_member(own), lease=lease)
        return pb.RequestOp(request_put=put)

    async def _revoke(self, lease: int) -> None:
        try:
            await self._calls.revoke(lease, timeout_s=END_S)
        except KVStoreError as error:  # it expires by itself
            logger.info("member=lease_not_revoked error=%s", error)


def _owner(value: bytes) -> Member:
    try:
        return decode_member(value)
    except InvalidRequest:
        return Member(NOBODY.node, NOBODY.instance, "(an entry in etcd that cannot be read)")
