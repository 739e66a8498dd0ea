"""A process that uses the cache as an engine does, and does what its parent tells it.

    python -m tests.faults.engine unix:/path/k.sock TOKEN RECORD_NBYTES KIND

One JSON object a line on standard input, one answer a line on standard output. Whatever the daemon
does, the engine goes on: a call that fails is counted and its blocks are computed instead. Only a
bug ends this process.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstore import BlockKey, Client, Grant, KVStoreError, checksum
from kvstore.model.member import Origin
from kvstore.testing.samples import sample_keys
from tests.faults.records import Records

PREFIXES = 12
PREFIX_BLOCKS = 16


class Engine:
    """One process. Methods are the commands; they return what is answered."""

    def __init__(self, target: str, token: str, record_nbytes: int, kind: str) -> None:
        self._records = Records(kind, record_nbytes, token)
        self._namespace = self._records.namespace
        self._client = Client(target, token=token, name="engine", timeout_s=1.0)
        self._grants: dict[int, tuple[list[BlockKey], Grant]] = {}
        self._registered = False

    def join(self) -> dict[str, Any]:
        self._register()
        return {"local": self._client.local, "instance": self._client.instance}

    def save(self, prefix: str, blocks: int, durable: bool = False) -> dict[str, Any]:
        """Put a prefix."""
        self._register()
        keys = sample_keys(prefix, blocks)
        if self._records.sized:
            grant = self._reserved(keys)
            self._write(keys, grant)
            done = self._client.commit(grant.lease_id, self._sums(keys, grant), durable=durable)
        else:
            records = self._records.make(keys, self._records.spans(blocks))
            done = self._client.put(self._namespace.id, keys, records, durable=durable)
        return {"committed": done.committed, "refused": done.refused, "durable": done.durable}

    def load(self, prefix: str, blocks: int, **options: Any) -> dict[str, Any]:
        """Acquire, copy, verify, release, as a connector does; count what was served and wrong.
        took_s: until the lease was there."""
        began = time.monotonic()
        lease = self.acquire(prefix, blocks, **options)
        took_s = time.monotonic() - began
        read = self.read(lease["lease"])
        held = self.release(lease["lease"])["held"]
        hit, wrong = (lease["hit"], read["wrong"]) if held else (0, 0)
        return {"hit": hit, "wrong": wrong, "took_s": took_s}

    def acquire(
        self,
        prefix: str,
        blocks: int,
        *,
        readers: int = 1,
        wait_s: float = 1.0,
        pace_s: float = 0.0,
        source: str = "",
        request_id: str = "",
    ) -> dict[str, Any]:
        """pace_s: of computing a block. source: who is named as having the prefix."""
        self._register()
        keys = sample_keys(prefix, blocks)
        grant = self._client.acquire(
            self._namespace.id,
            keys,
            readers=readers,
            wait_s=wait_s,
            recompute_s_per_block=pace_s,
            request_id=request_id,
            origin=Origin(source) if source else None,
        )
        self._grants[grant.lease_id] = keys, grant
        return {"lease": grant.lease_id, "hit": grant.hit_blocks, "leased": grant.leased}

    def reserve(self, prefix: str, blocks: int) -> dict[str, Any]:
        self._register()
        keys = sample_keys(prefix, blocks)
        grant = self._reserved(keys)
        self._grants[grant.lease_id] = keys, grant
        return {"lease": grant.lease_id, "slots": sum(slot is not None for slot in grant.slots)}

    def read(self, lease: int) -> dict[str, Any]:
        """Copy what a lease covers; wrong: records that are not what was put."""
        keys, grant = self._grants[lease]
        copies = [bytes(self._client.view(slot)) if slot else None for slot in grant.slots]
        wrong = self._records.wrong(keys, grant, copies)
        return {"read": len(copies) - copies.count(None), "wrong": wrong}

    def write(self, lease: int, begin: int = 0) -> dict[str, Any]:
        """Write the records from `begin` on into the slots of a reservation."""
        self._write(*self._grants[lease], begin)
        return {}

    def commit(self, lease: int) -> dict[str, Any]:
        keys, grant = self._grants.pop(lease)
        return {"committed": self._client.commit(lease, self._sums(keys, grant)).committed}

    def _reserved(self, keys: list[BlockKey]) -> Grant:
        spans = self._records.spans(len(keys))
        sized = self._records.sized
        sizes = [len(record) for record in self._records.make(keys, spans)] if sized else []
        return self._client.reserve(
            self._namespace.id, keys, first_block=0, parent=None, spans=spans, sizes=sizes
        )

    def _write(self, keys: list[BlockKey], grant: Grant, begin: int = 0) -> None:
        records = self._records.make(keys, grant.spans)
        for record, slot in list(zip(records, grant.slots, strict=True))[begin:]:
            if slot:
                self._client.view(slot)[:] = record

    def _sums(self, keys: list[BlockKey], grant: Grant) -> list[int]:
        return [checksum(record) for record in self._records.make(keys, grant.spans)]

    def release(self, lease: int) -> dict[str, Any]:
        self._grants.pop(lease, None)
        return {"held": self._client.release(lease) == [True]}

    def delete(self, prefix: str, blocks: int) -> dict[str, Any]:
        """Delete on every daemon of the fleet."""
        self._register()
        return {
            "deleted": self._client.admin.delete(self._namespace.id, sample_keys(prefix, blocks))
        }

    def clear_here(self) -> dict[str, Any]:
        """Forget all blocks at this daemon alone."""
        self._register()
        return {"cleared": self._client.admin.clear(self._namespace.id, this_daemon_only=True)}

    def extents(self) -> dict[str, Any]:
        return {"extents": sorted(self._client.extents())}

    def call(self) -> dict[str, Any]:
        """Make one call and say how long it took, and whether it was answered."""
        began = time.perf_counter()
        try:
            self._client.match(self._namespace.id, sample_keys("call", 4))
            answered = True
        except KVStoreError:
            answered = False
        return {"seconds": time.perf_counter() - began, "answered": answered}

    def work(self, seconds: float, seed: int, saves: float = 0.5) -> dict[str, Any]:
        """Save and load at random; `recomputed` counts what the cache could not do. saves: the
        share of steps that save."""
        draw = random.Random(seed)
        count = dict.fromkeys(("steps", "hits", "wrong", "recomputed"), 0)
        longest_s, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            prefix, blocks = f"work {draw.randrange(PREFIXES)}", draw.randint(1, PREFIX_BLOCKS)
            began = time.monotonic()
            try:
                if draw.random() < saves:
                    self.save(prefix, blocks)
                else:
                    loaded = self.load(prefix, blocks)
                    count["hits"] += loaded["hit"]
                    count["wrong"] += loaded["wrong"]
            except KVStoreError:
                count["recomputed"] += 1
                time.sleep(0.01)  # what computing costs, far less than it does
            count["steps"] += 1
            longest_s = max(longest_s, time.monotonic() - began)
        return {**count, "longest_s": round(longest_s, 3)}

    def borrow_on(self, prefixes: list[str], blocks: int, source: str) -> dict[str, Any]:
        """Load prefixes that another daemon has, and forget them, until told something else."""
        count = dict.fromkeys(("loads", "hits_lost", "wrong"), 0)
        told = threading.Event()

        def listen() -> None:
            sys.stdin.readline()
            told.set()

        threading.Thread(target=listen, daemon=True).start()
        while not told.is_set():
            try:
                self.clear_here()
                for prefix in prefixes:
                    loaded = self.load(prefix, blocks, source=source, wait_s=5.0)
                    count["loads"] += 1
                    count["hits_lost"] += blocks - loaded["hit"]
                    count["wrong"] += loaded["wrong"]
            except KVStoreError:
                count["hits_lost"] += blocks
            told.wait(0.05)
        return count

    def _register(self) -> None:
        if not self._registered:
            self._client.register(self._namespace)
            self._registered = True


def main() -> None:
    target, token, record_nbytes, kind = sys.argv[1:]
    engine = Engine(target, token, int(record_nbytes), kind)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        do: Callable[..., dict[str, Any]] = getattr(engine, command.pop("do"))
        try:
            answer = do(**command)
        except KVStoreError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
