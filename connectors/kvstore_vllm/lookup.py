"""One question to the cache, "how much of this prefix do you hold?", and the lease that answers it.

The question runs in the client's loop thread; the scheduler only looks whether an answer is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait

from kvstore import AsyncClient, Client
from kvstore.model.block import BlockKey, Grant, Namespace
from kvstore.model.errors import InvalidRequest, KVStoreError
from kvstore.model.member import Origin
from kvstore.model.tokens import BlockTokens

logger = logging.getLogger(__name__)

RENEW_S = 3.0
"""A lease with less than this left is not offered: scheduling and copying take a while."""


ESTIMATE_RETRY_S = 0.02
"""Until an unpinned estimate is asked for again: others' leases must end."""


class Lookup:
    """An acquire under way, answered or abandoned. Used by the scheduler's thread alone."""

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int,
        readers: int,
        wait_s: float,
        request_id: str,
        recompute_s_per_block: float,
        session_id: str = "",
        refined: bool = False,
        origin: Origin | None = None,
        early: bool = False,
        tokens: BlockTokens | None = None,
    ) -> None:
        """Ask for `keys`, of which the engine holds the first `skip_blocks` itself. Longer prefixes
        than the daemon takes in one call hit up to there.

        recompute_s_per_block: what computing a block takes the engine, 0 while that is unknown.
        session_id: the client's name of the conversation, if it gave one.
        refined: a lossy block without its fine part is a miss. origin: who has the prefix, as the
        request says. early: the answer may be a lease whose last slots are still read into.
        tokens: of the keys, if the daemon wants them.
        """
        self.skip_blocks = skip_blocks
        self.refined = refined
        self.instance = ""  # of the daemon's life that answered
        self.node = ""  # the daemon's id in its fleet
        self.offered = False  # vLLM asks again in every step until it has the device blocks
        self._client = client
        self._readers = readers
        self._asked_at = self.answered_at = time.monotonic()  # answered_at: set with the answer
        self.give_up_at = self._asked_at + wait_s

        async def acquire(remote: AsyncClient) -> Grant:
            namespace_id = await remote.register(namespace, now=False)
            await remote.connect()
            grant = await remote.acquire(
                namespace_id,
                keys[: remote.batch_keys_max],
                skip_blocks=skip_blocks,
                readers=readers,
                wait_s=wait_s,
                request_id=request_id,
                recompute_s_per_block=recompute_s_per_block,
                session_id=session_id,
                refined=refined,
                origin=origin,
                early=early,
                tokens=tokens,
            )
            self.instance, self.node = remote.instance, remote.node
            return grant

        self._future: Future[Grant] = client.submit(acquire)
        self._future.add_done_callback(self._note_time)

    def _note_time(self, _: Future[Grant]) -> None:
        self.answered_at = time.monotonic()

    @property
    def answered(self) -> bool:
        return self._future.done()

    def wait(self, wait_s: float) -> None:
        """Wait until there is an answer, `wait_s` at most."""
        wait([self._future], wait_s)

    def grant(self) -> Grant | None:
        """Return the answer, None if the daemon could not give one. Only once `answered`."""
        if self._future.cancelled():
            return None
        error = self._future.exception(timeout=0)
        if error is None:
            return self._future.result(timeout=0)
        if isinstance(error, InvalidRequest) or not isinstance(error, KVStoreError):
            # A bug, but still: a lookup without an answer is a miss, and the engine runs on.
            logger.error("lookup=failed", exc_info=error)
        return None

    @property
    def deadline(self) -> float:
        """time.monotonic() until when the lease is surely held.

        Counted from the question, so never later than the daemon's own deadline, which counts from
        the answer, however long that was under way.
        """
        return self._asked_at + self._future.result(timeout=0).deadline_s

    @property
    def is_fresh_estimate(self) -> bool:
        """Whether the daemon had too much on lease to pin anything, a moment ago. Only once
        `answered`."""
        grant = self.grant()
        estimate = grant is not None and not grant.leased
        return estimate and time.monotonic() < self.answered_at + ESTIMATE_RETRY_S

    def usable(self, local_blocks: int) -> bool:
        """Whether the answer is a lease that lasts and starts within the blocks held locally."""
        grant = self.grant()
        return (
            grant is not None
            and grant.leased
            and self.skip_blocks <= local_blocks
            and time.monotonic() + RENEW_S < self.deadline
        )

    def doubt(self) -> None:
        """Say that the answer is overdue, so that no other request waits as long for a daemon that
        is stopped. Never blocks."""
        if not self.answered:
            self._client.submit(lambda remote: remote.doubt())

    def abandon(self) -> None:
        """Give the lease back, now or as soon as it is granted. Never blocks."""
        self._future.add_done_callback(self._release)

    def _release(self, future: Future[Grant]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        grant = future.result()
        if grant.leased and grant.lease_id:
            leases = [grant.lease_id] * self._readers
            self._client.submit(lambda remote: remote.release(*leases))
