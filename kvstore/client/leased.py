"""Stored prefixes for an engine's own thread: leased, copied, verified, in bounded time.

A copy counts only if the daemon says that the lease was held until it was done, and if every record
matches its checksum. What is copied is then this process's own, whatever becomes of the daemon.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import NamedTuple, TypeVar

from kvstore.client.async_client import AsyncClient
from kvstore.client.blocking import Client
from kvstore.model.block import BlockKey, Grant, Namespace, Part
from kvstore.model.checksum import copies_out
from kvstore.model.errors import CorruptBlock, KVStoreError, Unavailable

logger = logging.getLogger(__name__)

DOUBT_S = 0.1
"""For the client's own thread to note that the daemon is late."""

PROMOTION_SHARE = 0.75
"""Of the deadline: how long slower tiers may take, so that the answer itself is not late."""

T = TypeVar("T")


class Copied(NamedTuple):
    """Records of one part: which blocks they are of, and their bytes, one after the other."""

    part: Part
    blocks: range
    records: memoryview


class PrefixLeases:
    """Leases of one engine on stored prefixes. For one thread at a time."""

    def __init__(self, client: Client, deadline_s: float) -> None:
        """deadline_s: how long every answer is waited for. A daemon that is late is not asked again
        before it answers a ping."""
        self._client = client
        self._deadline_s = deadline_s

    def acquire(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        request_id: str,
        recompute_s_per_block: float = 0.0,
        session_id: str = "",
    ) -> Grant | None:
        """Return a lease on the longest stored prefix of `keys`; None: nothing beyond skip_blocks.
        It is asked for as many of them as the daemon takes in one call.

        Raises KVStoreError if the daemon cannot answer, or is late; that lease is given back.
        """

        async def acquire(remote: AsyncClient) -> Grant:
            await remote.connect()
            return await remote.acquire(
                await remote.register(namespace, now=False),
                keys[: remote.batch_keys_max],
                skip_blocks=skip_blocks,
                wait_s=self._deadline_s * PROMOTION_SHARE,
                request_id=request_id,
                recompute_s_per_block=recompute_s_per_block,
                session_id=session_id,
            )

        asked = self._client.submit(acquire)
        try:
            grant = self.answer(asked)
        except Unavailable:
            give_back(self._client, asked)
            raise
        if not grant.leased or grant.hit_blocks <= skip_blocks:
            give_back(self._client, asked)
            return None
        return grant

    def answer(self, asked: Future[T]) -> T:
        """Return what the daemon answers in time. Raises Unavailable."""
        return answer_in(self._client, asked, self._deadline_s)

    def release(self, grant: Grant) -> Future[list[bool]]:
        """Give a lease back; the answer says whether it was held until then."""
        return self._client.submit(lambda remote: remote.release(grant.lease_id))

    def copy(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        grant: Grant,
        memory: memoryview,
        *,
        skip_blocks: int = 0,
    ) -> tuple[list[Copied], list[BlockKey]]:
        """Copy every leased record to `memory`, in the order of the lease. Return them by part, and
        the keys of those that are not what was committed: which is so, only if the lease was held.

        memory: as many bytes as the slots have, at least. Raises Unavailable if the lease is not
        for what was asked.
        """
        check_lease(namespace, grant, len(keys), skip_blocks)
        slots = [slot for slot in grant.slots if slot]
        views, targets, at = [], [], 0
        for slot in slots:
            views.append(self._client.view(slot)[: slot.nbytes])
            targets.append(memory[at : at + slot.nbytes])
            at += slot.nbytes
        sums = copies_out(views, targets)
        copied, corrupt, begin, at = [], [], 0, 0
        for span in grant.spans:
            end = begin + span.end - span.begin
            nbytes = sum(slot.nbytes for slot in slots[begin:end])
            blocks = range(span.begin, span.end)
            copied.append(Copied(span.part, blocks, memory[at : at + nbytes]))
            checked = zip(
                keys[span.begin : span.end],
                sums[begin:end],
                grant.checksums[begin:end],
                strict=True,
            )
            corrupt += [key for key, found, expected in checked if found != expected]
            begin, at = end, at + nbytes
        return copied, corrupt

    def confirm(
        self, namespace: Namespace, held: Future[list[bool]], corrupt: Sequence[BlockKey]
    ) -> None:
        """Raise Unavailable unless the lease was held, CorruptBlock if a record was not what was
        committed. Such records are deleted, so that nobody is offered them again."""
        held_all: list[bool] = self.answer(held)
        if not all(held_all):
            raise Unavailable("the lease ended during the load")
        if corrupt:
            wrong = sorted(set(corrupt))
            logger.warning("load=corrupt blocks=%d", len(wrong))
            self._client.submit(
                lambda remote: remote.admin.delete(namespace.id, wrong, corrupt=True)
            )
            raise CorruptBlock(f"{len(corrupt)} records do not match their checksums")


def answer_in(client: Client, asked: Future[T], deadline_s: float) -> T:
    """Return what the daemon answers in time. Raises Unavailable: then it is not asked again before
    it has answered a ping."""
    try:
        return asked.result(deadline_s)
    except Late:
        doubted = client.submit(lambda remote: remote.doubt())
        with contextlib.suppress(Late, KVStoreError):
            doubted.result(DOUBT_S)  # the caller's next question finds it noted
        raise Unavailable(f"no answer in {deadline_s:g} s") from None


def give_back(client: Client, asked: Future[Grant]) -> None:
    """Release the lease of an answer that nobody wants any more, now or when it comes."""

    def release(answered: Future[Grant]) -> None:
        if answered.cancelled() or answered.exception() is not None:
            return
        if lease := answered.result().lease_id:
            client.submit(lambda remote: remote.release(lease))

    asked.add_done_callback(release)


def leased_nbytes(grant: Grant) -> int:
    """Return how many bytes the records of a lease have."""
    return sum(slot.nbytes for slot in grant.slots if slot)


def check_lease(namespace: Namespace, grant: Grant, keys: int, skip_blocks: int = 0) -> None:
    """Raise Unavailable unless a lease is of every record that a resume needs, beyond those blocks
    that the engine has itself."""
    wanted = []
    for index, group in enumerate(namespace.groups):
        needed = group.blocks_needed(grant.hit_blocks, namespace.block_tokens)
        blocks = range(max(needed.start, skip_blocks), needed.stop)
        wanted += [(Part(index, shard), blocks) for shard in range(group.shards) if blocks]
    found = [(span.part, range(span.begin, span.end)) for span in grant.spans]
    sizes = [namespace.record_nbytes(part) for part, blocks in wanted for _ in blocks]
    if (
        grant.hit_blocks > keys
        or found != wanted
        or not len(sizes) == len(grant.slots) == len(grant.checksums)
        or not all(
            slot and (slot.nbytes <= nbytes if grant.varies else slot.nbytes == nbytes)
            for slot, nbytes in zip(grant.slots, sizes, strict=False)
        )
    ):
        raise Unavailable("the lease is not for what was asked")
