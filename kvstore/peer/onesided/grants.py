"""What a peer reads one-sided from this daemon: grants, each of which leases its records.

A grant that is not given back ends by itself. A lender needs no limbo: who reads late reads what
is there by then, and HELD, or the checksum, says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvstore.model.errors import InvalidRequest
from kvstore.model.member import NodeId
from kvstore.model.tenant import TenantId
from kvstore.peer.base import LentRecord, Loan, PeerBusy, PeerGone
from kvstore.peer.lending import Lending
from kvstore.peer.messages import ReadAnswer, encode, tenant_of
from kvstore.peer.onesided.driver import DriverError
from kvstore.peer.onesided.messages import (
    GrantReply,
    Memory,
    decode_grant,
    decode_held,
    decode_memory_ask,
    encode_grant_reply,
)
from kvstore.peer.onesided.mover import Mover, address_of
from kvstore.peer.onesided.reads import READS_MAX
from kvstore.peer.wire import HELD, NOT_HELD, Frame

GRANT_S_MAX = 10.0
GRANTS_MAX = 2 * READS_MAX  # some may be given back without our knowing yet


@dataclass(slots=True)
class _Grant:
    """One lease. stack: ends it."""

    loan: Loan
    nbytes: int
    node: NodeId
    tenant: TenantId
    stack: ExitStack


class Grants:
    """The grants of one link. movers: what this daemon has, by name."""

    def __init__(
        self, lending: Lending, movers: Mapping[str, Mover], instance: Callable[[], str]
    ) -> None:
        self._lending = lending
        self._movers = movers
        self._instance = instance
        self._grants: dict[int, _Grant] = {}
        self._last = 0

    async def memory(self, frame: Frame) -> bytes:
        """Answer a MEMORY. Raises Incompatible, KVStoreError."""
        try:
            version, offer = await self._mover(decode_memory_ask(frame.body)).offer()
        except DriverError as error:
            raise PeerGone(str(error), reason="failed") from error
        return encode(Memory(version=version, offer=offer))

    async def grant(self, frame: Frame, node: NodeId) -> bytes:
        """Answer a GRANT. Raises Incompatible, KVStoreError."""
        link, keys, body = decode_grant(frame.body)
        mover = self._mover(link)
        if len(self._grants) >= GRANTS_MAX:
            raise PeerBusy(f"{GRANTS_MAX} grants are under way")
        with ExitStack() as stack:
            tenant = tenant_of(body.tenant)
            stack.enter_context(self._lending.permit())
            stack.enter_context(self._lending.permit_of(tenant))
            await self._lending.pace()
            loan = await self._lending.lend(keys, body, node)
            stack.callback(loan.release)
            addresses, version = _addresses(loan.records, mover), mover.version
            if addresses is None:
                return encode(GrantReply(grant=0))
            nbytes = self._lending.take(loan, body)
            self._last += 1
            number = self._last
            ends_s = min(frame.timeout_s, GRANT_S_MAX)
            timer = asyncio.get_running_loop().call_later(ends_s, self._end, number)
            stack.callback(timer.cancel)
            self._grants[number] = _Grant(loan, nbytes, node, tenant, stack.pop_all())
        answer = ReadAnswer(
            self._instance(),
            tuple(record.nbytes if record is not None else 0 for record in loan.records),
            tuple(record.checksum if record is not None else 0 for record in loan.records),
        )
        return encode_grant_reply(number, answer, addresses, version)

    async def held(self, frame: Frame) -> bytes:
        """Answer a HELD, and end the grant. Raises Incompatible."""
        number = decode_held(frame.body)
        grant = self._grants.get(number)
        if grant is None:
            return NOT_HELD  # it has ended by itself
        held = grant.loan.held()
        self._end(number)
        if held:
            self._lending.note_lent(grant.node, grant.tenant, grant.nbytes)
        return HELD if held else NOT_HELD

    def close(self) -> None:
        """End all of them."""
        for number in list(self._grants):
            self._end(number)

    def _end(self, number: int) -> None:
        grant = self._grants.pop(number, None)
        if grant is not None:
            grant.stack.close()

    def _mover(self, link: str) -> Mover:
        mover = self._movers.get(link)
        if mover is None:
            raise InvalidRequest(f"no link {link[:20]!r} here")
        return mover


def _addresses(records: Sequence[LentRecord | None], mover: Mover) -> list[int] | None:
    """Return where records are in registered memory; None if one of them is not."""
    addresses = []
    for record in records:
        if record is None:
            addresses.append(0)
        elif record.view is None or not mover.holds(record.view):
            return None
        else:
            addresses.append(address_of(record.view))
    return addresses
