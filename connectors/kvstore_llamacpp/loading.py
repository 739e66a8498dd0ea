"""Loads: leased slots -> verified copies in memory of our own -> the state of a sequence.

llama.cpp sees a state only when every record of it has matched its checksum, and the lease was held
all the time. A state is written from records by a layout that this process has read from its own
llama.cpp: the bytes of a record are KV, and say nothing about sizes or counts. A snapshot is
llama.cpp's own bytes, and is stored with its length and its tokens in front.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvstore import (
    AsyncClient,
    BlockKey,
    Client,
    CorruptBlock,
    Grant,
    Namespace,
    Unavailable,
)
from kvstore.model.checksum import copies_out
from kvstore_llamacpp.saving import Buffers
from kvstore_llamacpp.state import MAGIC, SEQUENCE, Blocks, Bytes, state_nbytes, write_state

if TYPE_CHECKING:
    from kvstore_llamacpp.namespace import Layers

logger = logging.getLogger(__name__)

KEYS_MAX = 8192
"""Blocks that one load asks for: the daemon's bound on a batch."""

PROMOTION_SHARE = 0.75
"""Of the deadline: how long slower tiers may take, so that the answer itself is not late."""

T = TypeVar("T")
_SNAPSHOT = struct.Struct("<8sQQ")
_SNAPSHOT_MAGIC = b"kvllama1"
_STATE = struct.Struct("=Ii")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified state of the first `tokens` tokens; `buffers` is the memory it lies in."""

    tokens: int
    state: Bytes
    buffers: Sequence[Bytes]


class Loader:
    """Loads for one model. For the thread that runs it."""

    def __init__(
        self,
        client: Client,
        buffers: Buffers,
        layers: Sequence[Layers],
        *,
        deadline_s: float,
    ) -> None:
        self._client = client
        self._buffers = buffers
        self._layers = layers
        self._deadline_s = deadline_s

    def match(self, namespace: Namespace, keys: Sequence[BlockKey]) -> int:
        """Return how many blocks of a prefix are stored. Raises KVStoreError."""
        asked = self._client.submit(lambda remote: remote.match(namespace.id, keys[:KEYS_MAX]))
        return self._answer(asked).hit_blocks

    def load(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        *,
        request_id: str,
        recompute_s_per_block: float,
    ) -> Loaded | None:
        """Return the longest stored prefix of `keys`; None: nothing is stored.

        Waits for two answers, the deadline each at the most. Raises KVStoreError if the daemon
        cannot answer, is late, or has something else than what was stored.
        """
        keys = keys[:KEYS_MAX]

        async def acquire(remote: AsyncClient) -> Grant:
            return await remote.acquire(
                namespace.id,
                keys,
                wait_s=self._deadline_s * PROMOTION_SHARE,
                request_id=request_id,
                recompute_s_per_block=recompute_s_per_block,
            )

        asked = self._client.submit(acquire)
        try:
            grant = self._answer(asked)
        except Unavailable:
            asked.add_done_callback(self._give_back)
            raise
        if not grant.leased or not grant.hit_blocks:
            self._give_back(asked)
            return None
        return self._load(namespace, keys, grant)

    def _answer(self, asked: Future[T]) -> T:
        """Return what the daemon answers in time. Raises Unavailable; the daemon is then not asked
        again before it answers a ping."""
        try:
            return asked.result(self._deadline_s)
        except Late:
            self._client.submit(lambda remote: remote.doubt())
            raise Unavailable(f"no answer in {self._deadline_s:g} s") from None

    def _give_back(self, asked: Future[Grant]) -> None:
        """Release the lease of an answer that nobody wants any more."""
        if asked.cancelled() or asked.exception() is not None:
            return
        if lease := asked.result().lease_id:
            self._client.submit(lambda remote: remote.release(lease))

    def _load(self, namespace: Namespace, keys: Sequence[BlockKey], grant: Grant) -> Loaded:
        held: Future[list[bool]] | None = None
        memory = self._buffers.take()
        try:
            try:
                groups, memory, corrupt = self._copy(namespace, keys, grant, memory)
            finally:
                held = self._client.submit(lambda remote: remote.release(grant.lease_id))
            tokens = grant.hit_blocks * namespace.block_tokens
            try:
                state, buffers = self._state(groups, tokens, namespace.block_tokens)
            except CorruptBlock:
                self.forget(namespace, keys[grant.hit_blocks - 1])
                raise
            held_all: list[bool] = self._answer(held)
            if not all(held_all):
                raise Unavailable("the lease ended during the load")
            if corrupt:
                self._drop(namespace, corrupt)
                raise CorruptBlock(f"{len(corrupt)} records do not match their checksums")
            assert memory is not None
            return Loaded(tokens, state, [memory, *buffers])
        except BaseException:
            if memory is not None:
                self._buffers.give(memory)
            raise

    def _copy(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        grant: Grant,
        memory: Bytes | None,
    ) -> tuple[list[tuple[int, Bytes]], Bytes, list[BlockKey]]:
        """Copy every record; return the first block and the bytes of each group, the memory they
        are in, and the keys of records that are not what was committed.

        Raises Unavailable if the lease is not for what was asked.
        """
        self._check(namespace, grant, len(keys))
        slots = [slot for slot in grant.slots if slot]
        total = sum(slot.nbytes for slot in slots)
        if memory is None or len(memory) < total:
            memory = np.empty(total, np.uint8)
        views, targets, at = [], [], 0
        for slot in slots:
            views.append(self._client.view(slot)[: slot.nbytes])
            targets.append(memory[at : at + slot.nbytes].data)
            at += slot.nbytes
        sums = copies_out(views, targets)
        groups, corrupt, begin, at = [], [], 0, 0
        for span in grant.spans:
            end = begin + span.end - span.begin
            nbytes = sum(slot.nbytes for slot in slots[begin:end])
            groups.append((span.begin, memory[at : at + nbytes]))
            checked = zip(
                keys[span.begin : span.end],
                sums[begin:end],
                grant.checksums[begin:end],
                strict=True,
            )
            corrupt += [key for key, found, expected in checked if found != expected]
            begin, at = end, at + nbytes
        return groups, memory, corrupt

    def _check(self, namespace: Namespace, grant: Grant, keys: int) -> None:
        """Raise Unavailable unless a lease is of every record that a resume needs."""
        wanted = [
            (index, group.blocks_needed(grant.hit_blocks, namespace.block_tokens))
            for index, group in enumerate(namespace.groups)
        ]
        found = [(span.part.group, range(span.begin, span.end)) for span in grant.spans]
        sizes = [namespace.groups[index].record_nbytes for index, blocks in wanted for _ in blocks]
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

    def _state(
        self, groups: Sequence[tuple[int, Bytes]], tokens: int, block_tokens: int
    ) -> tuple[Bytes, list[Bytes]]:
        """Return the state that is made of records, and the memory that was taken for it."""
        if self._layers[0].layout is None:
            return open_snapshot(groups[-1][1], tokens), []
        caches = [
            Blocks(
                layers.layout,
                first * block_tokens,
                block_tokens,
                records.reshape(-1, layers.record_nbytes(block_tokens)),
            )
            for layers, (first, records) in zip(self._layers, groups, strict=True)
            if layers.layout is not None
        ]
        nbytes = state_nbytes(caches)
        buffer = self._buffers.take()
        if buffer is None or len(buffer) < nbytes:
            buffer = np.empty(nbytes, np.uint8)
        write_state(caches, buffer[:nbytes])
        return buffer[:nbytes], [buffer]

    def forget(self, namespace: Namespace, key: BlockKey) -> None:
        """Have a block deleted that is what was stored, and of no use."""
        self._client.submit(lambda remote: remote.admin.delete(namespace.id, [key]))

    def _drop(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        """Have blocks deleted that are corrupt, so that nobody is offered them again."""
        wrong = sorted(set(keys))
        logger.warning("load=corrupt blocks=%d", len(wrong))
        self._client.submit(lambda remote: remote.admin.delete(namespace.id, wrong, corrupt=True))


def snapshot_nbytes(state: Bytes) -> int:
    """Return the size of a snapshot's record."""
    return _SNAPSHOT.size + len(state)


def write_snapshot(state: Bytes, tokens: int, record: Bytes) -> None:
    """Write a state of `tokens` tokens, whatever its layout, as a record."""
    head = _SNAPSHOT.pack(_SNAPSHOT_MAGIC, tokens, len(state))
    record[: len(head)] = np.frombuffer(head, np.uint8)
    record[len(head) :] = state


def open_snapshot(record: Bytes, tokens: int) -> Bytes:
    """Return the state in a record. Raises CorruptBlock unless it is a whole one of `tokens`."""
    if len(record) < _SNAPSHOT.size + _STATE.size:
        raise CorruptBlock(f"a snapshot of {len(record)} bytes")
    state = record[_SNAPSHOT.size :]
    if _SNAPSHOT.unpack_from(record.data) != (_SNAPSHOT_MAGIC, tokens, len(state)):
        raise CorruptBlock("what is stored is no snapshot of this prefix")
    if _STATE.unpack_from(state.data) != (MAGIC, SEQUENCE):
        raise CorruptBlock("a snapshot does not begin as llama.cpp's states do")
    return state
