"""Loads: leased slots -> verified copies in memory of our own -> the state of a sequence.

llama.cpp sees a state only when every record of it has matched its checksum, and the lease was held
all the time. A state is written from records by a layout that this process has read from its own
llama.cpp: the bytes of a record are KV, and say nothing about sizes or counts. A snapshot is
llama.cpp's own bytes, and is stored with its length and its tokens in front.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore import AsyncClient, BlockKey, Client, CorruptBlock, Grant, Namespace
from kvstore.client.leased import PrefixLeases, leased_nbytes
from kvstore.model.block import Match
from kvstore_llamacpp.saving import Buffers
from kvstore_llamacpp.state import MAGIC, SEQUENCE, Blocks, Bytes, state_nbytes, write_state

if TYPE_CHECKING:
    from kvstore_llamacpp.namespace import Layers

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
        self._leases = PrefixLeases(client, deadline_s)

    def match(self, namespace: Namespace, keys: Sequence[BlockKey]) -> int:
        """Return how many blocks of a prefix are stored. Raises KVStoreError."""

        async def match(remote: AsyncClient) -> Match:
            await remote.connect()
            return await remote.match(namespace.id, keys[: remote.batch_keys_max])

        return self._leases.answer(self._client.submit(match)).hit_blocks

    def load(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        *,
        request_id: str,
        recompute_s_per_block: float,
        session_id: str = "",
    ) -> Loaded | None:
        """Return the longest stored prefix of `keys`; None: nothing is stored.

        session_id: of the conversation, for hints.
        Waits for two answers, the deadline each at the most. Raises KVStoreError if the daemon
        cannot answer, is late, or has something else than what was stored.
        """
        grant = self._leases.acquire(
            namespace,
            keys,
            request_id=request_id,
            recompute_s_per_block=recompute_s_per_block,
            session_id=session_id,
        )
        return self._load(namespace, keys, grant) if grant is not None else None

    def _load(self, namespace: Namespace, keys: Sequence[BlockKey], grant: Grant) -> Loaded:
        memory = self._buffers.take()
        try:
            try:
                groups, memory, corrupt = self._copy(namespace, keys, grant, memory)
            finally:
                held = self._leases.release(grant)
            tokens = grant.hit_blocks * namespace.block_tokens
            try:
                state, buffers = self._state(groups, tokens, namespace.block_tokens)
            except CorruptBlock:
                self.forget(namespace, keys[grant.hit_blocks - 1])
                raise
            self._leases.confirm(namespace, held, corrupt)
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
        total = leased_nbytes(grant)
        if memory is None or len(memory) < total:
            memory = np.empty(total, np.uint8)
        copied, corrupt = self._leases.copy(namespace, keys, grant, memory.data)
        groups = [(each.blocks.start, np.frombuffer(each.records, np.uint8)) for each in copied]
        return groups, memory, corrupt

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
