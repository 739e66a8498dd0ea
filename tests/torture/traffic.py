"""Clients that put, get, delete, clear and flush until the daemon is dead, and keep the journal."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from kvstore import Client, KVStoreError
from kvstore.model.block import BlockKey, Namespace, Part
from kvstore.testing.samples import sample_keys
from tests.torture import parts
from tests.torture.journal import Call, Journal
from tests.torture.parts import coarse_and_mixed
from tests.torture.spaces import LOSSY, PARTS, Item, record_bytes

T = TypeVar("T")

CHAIN_BLOCKS = 24
PUT_BLOCKS_MAX = 8
KEPT_NBYTES_MAX = 48 << 20  # a writer clears its namespace beyond this: restarts stay short
# No call may take longer: what it was told to wait, its own deadlines, and a busy machine.
CALL_S_MAX = 25.0
DURABLE_CALL_S_MAX = 60.0
ACQUIRE_S = 3.0
PAUSE_S = 0.02  # after a refusal, before the next call


class Chain(NamedTuple):
    """A prefix that somebody writes to."""

    namespace: Namespace
    keys: list[BlockKey]


class Traffic:
    """What the clients of one run share."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.calls: Counter[str] = Counter()
        self.violations: list[str] = []  # "kind: words"
        self.over = threading.Event()
        self.quiet = threading.Event()  # nothing is called while it is set
        self.flushes = True  # whether an answered flush is believed


class Worker(threading.Thread):
    """Steps until the traffic is over. Each step is one call that the daemon may refuse."""

    def __init__(self, traffic: Traffic, client: Client, draw: Random) -> None:
        super().__init__(daemon=True)
        self.steps = 0
        self.traffic = traffic
        self._journal = traffic.journal
        self._client = client
        self._draw = draw

    def run(self) -> None:
        while not self.traffic.over.is_set():
            if self.traffic.quiet.is_set():
                self.traffic.over.wait(PAUSE_S)
                continue
            try:
                self._step()
            except KVStoreError:
                self.traffic.calls["refused"] += 1
                self.traffic.over.wait(PAUSE_S)
            except Exception as error:
                self.traffic.violations.append(f"bug: {type(self).__name__}: {error!r}")
                return
            self.steps += 1

    def _step(self) -> None:
        raise NotImplementedError

    def _timed(self, name: str, call: Callable[[], T], limit_s: float = CALL_S_MAX) -> T:
        self.traffic.calls[name] += 1
        began = time.monotonic()
        try:
            return call()
        finally:
            took_s = time.monotonic() - began
            if took_s > limit_s:
                self.traffic.violations.append(f"hung: {name} took {took_s:.0f} s")

    def _get(self, namespace: Namespace, keys: Sequence[BlockKey], part: Part) -> None:
        asked_at = time.monotonic()
        if namespace.varies and not self._client.local:
            return  # records of their own sizes are read where they are
        records = self._timed("get", lambda: parts.get(self._client, namespace, keys, part))
        for key, record in zip(keys, records, strict=True):
            if record is not None:
                item = Item(namespace.id, key, part)
                found = self._journal.judge(item, record, asked_at)
                if found:
                    self.traffic.violations.append(f"{found}: get of {name_of(item)}")


class Writer(Worker):
    """Owns its chains of blocks: nobody else puts or deletes them, but for a clear."""

    def __init__(
        self, traffic: Traffic, client: Client, draw: Random, namespace: Namespace, name: str
    ) -> None:
        super().__init__(traffic, client, draw)
        self.namespace = namespace
        self.chains: list[list[BlockKey]] = []
        self._chain_name = name
        self._put_nbytes = 0

    def _step(self) -> None:
        chance = self._draw.random()
        if not self.chains or chance < 0.15:
            self.chains.append(sample_keys(f"{self._chain_name} {len(self.chains)}", CHAIN_BLOCKS))
            self._put(self.chains[-1], 0)
        elif self._put_nbytes > KEPT_NBYTES_MAX or chance < 0.154:
            self._clear_all()
        elif chance < 0.75:
            self._put(self._draw.choice(self.chains), self._draw.randrange(CHAIN_BLOCKS))
        elif chance < 0.9:
            part = self._draw.choice(PARTS[self.namespace.id])
            self._get(self.namespace, self._draw.choice(self.chains), part)
        elif chance < 0.97:
            self._delete_keys()
        else:
            self._flush()

    def _put(self, chain: list[BlockKey], first: int) -> None:
        if self.namespace.varies:
            self._put_sized(chain, first)
            return
        keys = chain[first : first + self._draw.randint(1, PUT_BLOCKS_MAX)]
        durable = self._draw.random() < 0.5
        for part in PARTS[self.namespace.id]:
            items = [Item(self.namespace.id, key, part) for key in keys]
            nbytes = self.namespace.record_nbytes(part)
            call = self._journal.put(items)
            records = [record_bytes(item, call.number, nbytes) for item in items]
            done = self._timed(
                "put durable" if durable else "put",
                lambda records=records, part=part: self._client.put(  # type: ignore[misc]
                    self.namespace.id,
                    keys,
                    records,
                    group=part.group,
                    shard=part.shard,
                    first_block=first,
                    parent=chain[first - 1] if first else None,
                    durable=durable,
                ),
                DURABLE_CALL_S_MAX if durable else CALL_S_MAX,
            )
            self._journal.put_done(call, items, nbytes, done)
            self._put_nbytes += done.committed * nbytes

    def _put_sized(self, chain: list[BlockKey], first: int) -> None:
        """Put all parts of some blocks at once: or twice, by two puts that race, with other bytes,
        of which that commits last that has reserved first."""
        blocks = range(first, min(len(chain), first + self._draw.randint(1, PUT_BLOCKS_MAX)))
        durable, refined = self._draw.random() < 0.5, self._draw.random() < 0.4
        begun: list[tuple[Call, parts.Put]] = []
        for _ in range(2 if self._draw.random() < 0.3 else 1):
            fine = self._draw.random() < 0.7
            items = [
                Item(self.namespace.id, key, part)
                for key in chain[blocks.start : blocks.stop]
                for part in PARTS[self.namespace.id]
            ]
            call = self._journal.put(items)
            put = self._timed(
                "reserve",
                lambda call=call, fine=fine: parts.reserve(  # type: ignore[misc]
                    self._client,
                    self.namespace,
                    chain,
                    blocks,
                    call.number,
                    fine=fine,
                    refined=refined,
                ),
            )
            begun.append((call, put))
        for call, put in reversed(begun):
            done = self._timed(
                "commit durable" if durable else "commit",
                lambda put=put: parts.commit(self._client, put, durable=durable),  # type: ignore[misc]
                DURABLE_CALL_S_MAX if durable else CALL_S_MAX,
            )
            nbytes = sum(slot.nbytes for slot in put.grant.slots if slot) // len(put.items)
            self._journal.put_done(call, put.items, nbytes, done)
            self._put_nbytes += done.committed * nbytes

    def _delete_keys(self) -> None:
        chain = self._draw.choice(self.chains)
        first = self._draw.randrange(CHAIN_BLOCKS)
        keys = chain[first : first + self._draw.randint(1, PUT_BLOCKS_MAX)]
        call = self._journal.delete(*keys)
        self._timed("delete", lambda: self._client.admin.delete(self.namespace.id, keys))
        self._journal.delete_done(call)

    def _clear_all(self) -> None:
        call = self._journal.delete(self.namespace.id)
        self._timed("clear", lambda: self._client.admin.clear(self.namespace.id))
        self._journal.delete_done(call)
        self._put_nbytes = 0

    def _flush(self) -> None:
        began = time.monotonic()
        durable = self._timed("flush", lambda: self._client.admin.flush(5.0))
        if durable and self.traffic.flushes:
            self._journal.flushed(began)


class Reader(Worker):
    """Reads what the writers put, as a client without the arena does."""

    def __init__(
        self, traffic: Traffic, client: Client, draw: Random, writers: Sequence[Writer]
    ) -> None:
        super().__init__(traffic, client, draw)
        self._writers = writers

    def _step(self) -> None:
        writer = self._draw.choice(self._writers)
        if not writer.chains:
            self.traffic.over.wait(PAUSE_S)
            return
        keys = self._draw.choice(writer.chains)
        if writer.namespace is LOSSY and self._client.local:
            refined = self._draw.random() < 0.5
            self.traffic.violations += self._timed(
                "acquire refined" if refined else "acquire",
                lambda: read_prefix(
                    self._client, self._journal, Chain(LOSSY, keys), refined=refined
                ),
            )
            return
        self._get(writer.namespace, keys, self._draw.choice(PARTS[writer.namespace.id]))


class PrefixReader(Worker):
    """Reads prefixes as an engine does: so what the node lacks comes up from a bucket."""

    def __init__(
        self,
        traffic: Traffic,
        client: Client,
        draw: Random,
        chains: Callable[[], Sequence[Chain]],
    ) -> None:
        super().__init__(traffic, client, draw)
        self._chains = chains

    def _step(self) -> None:
        chains = self._chains()
        if not chains:
            self.traffic.over.wait(PAUSE_S)
            return
        chain = self._draw.choice(chains)
        refined = chain.namespace is LOSSY and self._draw.random() < 0.5
        self.traffic.violations += self._timed(
            "acquire refined" if refined else "acquire",
            lambda: read_prefix(self._client, self._journal, chain, refined=refined),
        )


def read_prefix(
    client: Client, journal: Journal, chain: Chain, *, refined: bool = False
) -> list[str]:
    """Lease what is stored of a prefix, copy it, release it; return what was wrong with it."""
    asked_at = time.monotonic()
    grant = client.acquire(chain.namespace.id, chain.keys, wait_s=ACQUIRE_S, refined=refined)
    if not grant.leased:
        return []
    places = [
        (Item(chain.namespace.id, chain.keys[block], part), block)
        for part, begin, end in grant.spans
        for block in range(begin, end)
    ]
    copies = [
        (item, block, bytes(client.view(slot)))
        for (item, block), slot in zip(places, grant.slots, strict=True)
        if slot is not None
    ]
    if client.release(grant.lease_id) != [True]:
        return []
    return coarse_and_mixed(copies, refined=refined) + [
        f"{found}: prefix with {name_of(item)}"
        for item, _, copy in copies
        if (found := journal.judge(item, copy, asked_at))
    ]


def name_of(item: Item) -> str:
    return f"{item.key[:4].hex()} group {item.part.group} shard {item.part.shard}"
