"""A router, as far as its index goes: what batches say is where. vLLM's own types, written anew."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec
import zmq

Hash = int | bytes


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As in vLLM 0.32: `vllm/distributed/kv_events.py`."""


class BlockStored(KVCacheEvent):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[Hash]
    medium: str | None
    locality: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(EventBatch).decode


class Index:
    """What a router believes: hash -> mediums. lost: blocks whose parent it did not know, which a
    router drops."""

    def __init__(self) -> None:
        self.where: dict[Hash, set[str]] = {}
        self.tokens: dict[Hash, tuple[int, ...]] = {}
        self.names: dict[Hash, str | None] = {}
        self.lost = self.clears = 0

    def apply(self, payload: bytes) -> EventBatch:
        batch = decode(payload)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.where.clear()
                self.clears += 1
            elif isinstance(event, BlockStored):
                self._stored(event)
            else:
                for each in event.block_hashes:
                    self.where.get(each, set()).discard(event.medium or "")
                    if not self.where.get(each, {""}):
                        del self.where[each]
        return batch

    def _stored(self, event: BlockStored) -> None:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.locality == "LOCAL"
        assert event.ownership is None
        parent = event.parent_block_hash
        if parent is not None and parent not in self.where:
            self.lost += len(event.block_hashes)
            return
        for at, each in enumerate(event.block_hashes):
            self.where.setdefault(each, set()).add(event.medium or "")
            tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
            self.tokens[each], self.names[each] = tuple(tokens), event.lora_name


class Subscriber:
    """vLLM's example of a subscriber (`examples/online_serving/kv_events_subscriber.py`), in its
    form: SUB, and REQ-like requests for what it has missed. A context manager."""

    def __init__(self, publish: str, replay: str = "", topic: str = "") -> None:
        self.index = Index()
        self.last = -1
        self.gaps = 0
        self.numbers: list[int] = []
        self.topics: set[bytes] = set()
        self._context = zmq.Context()
        self._replay_address = replay
        self._topic = topic
        self._publish = publish
        self.connect()

    def connect(self) -> None:
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.connect(self._publish)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, self._topic)

    def cut(self) -> None:
        """Lose the connection."""
        self._sub.close(0)

    def read(self, wait_s: float = 0.05) -> int:
        """Take what is there; returns how many batches came."""
        count = 0
        while self._sub.poll(int(wait_s * 1000) if not count else 0):
            topic, number, payload = self._sub.recv_multipart()
            count += 1
            self.topics.add(topic)
            sequence = int.from_bytes(number, "big")
            assert sequence > self.last, "a sequence number went back"
            if self._replay_address and 0 <= self.last < sequence - 1:
                self.gaps += 1
                for before, missed in self.replay(self.last + 1):
                    if before < sequence:
                        self.index.apply(missed)
            self.last = sequence
            self.numbers.append(sequence)
            self.index.apply(payload)
        return count

    def until(self, true: Callable[[Index], object], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not true(self.index):
            assert time.monotonic() < deadline, f"not told: {self.index.where}"
            self.read()

    def ask(self, *frames: bytes, copy: bool = True) -> zmq.Socket[bytes]:
        """Ask for a replay with any frames."""
        request = self._context.socket(zmq.DEALER)
        request.setsockopt(zmq.LINGER, 0)
        request.connect(self._replay_address)
        request.send_multipart([b"", *frames], copy=copy)
        return request

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield (number, payload) of what was sent from a number on."""
        with contextlib.closing(self.ask(start.to_bytes(8, "big"))) as request:
            while True:
                assert request.poll(10_000), "no answer to a replay"
                _, topic, number, payload = request.recv_multipart()
                self.topics.add(topic) if payload else None
                if not payload and number == b"\xff" * 8:
                    return
                yield int.from_bytes(number, "big"), payload

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._context.destroy(linger=0)
