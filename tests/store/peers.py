"""Stores that borrow from each other in one process: links without a network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvstore.model.block import BlockKey, Namespace, NamespaceId, Span
from kvstore.model.checksum import checksum
from kvstore.model.errors import UnknownNamespace
from kvstore.model.member import Member, NodeId
from kvstore.model.tenant import TenantId
from kvstore.move.peers import Peers
from kvstore.move.tenant_peers import TenantPeers
from kvstore.peer.base import (
    HeadsAsk,
    HeadsReply,
    LentRecord,
    Loan,
    PeerCorrupt,
    PeerGone,
    PeerMatch,
    PeerSlow,
)
from kvstore.store.lender import StoreLender
from tests.store.node import Node


@dataclass
class Faults:
    """What goes wrong with a link: set while it is used."""

    dead: bool = False
    flips: bool = False
    lets_go: bool = False  # the lease was over before the last byte
    delay_s: float = 0.0
    boasts: int = 0  # of a match, too many blocks
    stuck: asyncio.Future[bool] | None = None  # what may still write into targets


class DirectIncoming:
    def __init__(self, link: DirectLink, loan: Loan) -> None:
        self._link = link
        self._loan: Loan | None = loan
        self.sizes = [each.nbytes if each else 0 for each in loan.records]
        self.checksums = [each.checksum if each else 0 for each in loan.records]
        self.limbo = link.faults.stuck

    async def fill(self, targets: Sequence[memoryview | None]) -> None:
        assert self._loan is not None
        await self._link.wait()
        if self.limbo is not None:
            await self.close()
            raise PeerSlow("the read does not end")
        wrong = []
        pairs = zip(targets, self._loan.records, strict=True)
        for at, (target, record) in enumerate(pairs):
            if target is None or record is None:
                continue
            target[:] = _bytes_of(record)
            if self._link.faults.flips:
                target[0] ^= 1
            if checksum(target) != record.checksum:
                wrong.append(at)
        held = self._loan.held() and not self._link.faults.lets_go
        await self.close()
        if not held:
            raise PeerGone("the lease was over", reason="lease")
        if wrong:
            raise PeerCorrupt("wrong bytes", reason="checksum", records=wrong)

    async def close(self) -> None:
        loan, self._loan = self._loan, None
        if loan is not None:
            loan.release()


class DirectLink:
    """A PeerLink to a lender in this process. reads, matches: how many there were."""

    def __init__(self, peer: Member, lender: StoreLender, faults: Faults) -> None:
        self.peer = peer
        self.faults = faults
        self.reads = self.matches = 0
        self.reported: list[BlockKey] = []
        self._lender = lender

    @property
    def open(self) -> bool:
        return not self.faults.dead

    worn = False
    fault = None
    medium = "tcp"
    read_bytes: ClassVar[dict[str, int]] = {}

    def of(self, tenant: TenantId) -> DirectLink:
        return self

    async def wait(self) -> None:
        await asyncio.sleep(self.faults.delay_s)
        if self.faults.dead:
            raise PeerGone("dead")

    async def match(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        refined: bool = False,
        registers: bool = True,
        deadline: float,
    ) -> PeerMatch:
        self.matches += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self.wait()
        except TimeoutError:
            raise PeerSlow("no answer in time", reason="deadline") from None
        with contextlib.suppress(UnknownNamespace):
            found = await self._lender.match(namespace.id, keys, skip_blocks, refined)
            return PeerMatch(found.hit_blocks + self.faults.boasts, found.resident_blocks)
        return PeerMatch(self.faults.boasts, 0)

    async def read(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        *,
        refined: bool = False,
        wait_s: float = 0.0,
        deadline: float,
    ) -> DirectIncoming:
        self.reads += 1
        await self.wait()
        if wait_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._lender.arrival(namespace.id, keys, spans)
        return DirectIncoming(
            self, await self._lender.lend(namespace.id, keys, spans, refined, node_id(0))
        )

    async def heads(self, ask: HeadsAsk, *, deadline: float) -> HeadsReply:
        return await self._lender.heads(ask)

    async def corrupt(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, deadline: float
    ) -> None:
        self.reported += keys
        await self._lender.corrupt(namespace_id, keys)

    async def delete(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey] | None, *, deadline: float
    ) -> None:
        await self._lender.delete(namespace_id, keys)

    async def ping(self, deadline: float) -> float:
        await self.wait()
        return 0.001

    async def close(self) -> None:
        """Nothing is open."""


def node_id(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def member(number: int, *, engines: tuple[str, ...] = ()) -> Member:
    return Member(node_id(number), f"{number:016x}", f"127.0.0.1:{7700 + number}", engines=engines)


def joined(node: Node, lenders: dict[Member, Node]) -> tuple[Peers, dict[NodeId, DirectLink]]:
    """Let a node borrow from others; returns its peers, and the links to them."""
    links = {
        each.node: DirectLink(each, other.store.lender(each.instance), Faults())
        for each, other in lenders.items()
    }

    async def dial(to: Member, deadline: float) -> DirectLink:
        if links[to.node].faults.dead:
            raise PeerGone("dead")
        return links[to.node]

    peers = Peers(dial, node_id(0), node.metrics, node.loop.time)
    node.store.join_fleet(node_id(0), TenantPeers(peers, node.metrics, node.loop.time), dict)
    node.tending = node.loop.create_task(peers.run())  # type: ignore[attr-defined]
    peers.know({each.node: each for each in lenders})
    node.until(lambda: all(peer.usable for peer in peers))
    return peers, links


def _bytes_of(record: LentRecord) -> bytes:
    if record.view is not None:
        return bytes(record.view)
    assert record.place is not None
    with open(record.place.path, "rb") as file:
        file.seek(record.place.offset)
        return file.read(record.nbytes)
