"""A store with a lossy namespace: several writers of the same blocks, and a reader that looks whose
bytes it gets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey, Committed, Grant, Group, Namespace, Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, root_key
from tests.lossy import base_record, fine_record
from tests.store.node import Node

BASE, FINE, EXACT_MAX = 6000, 5000, 12_000
SPEC = Namespace(
    2,
    (
        Group("full", EXACT_MAX, varies=True),
        Group("window", EXACT_MAX, 5, varies=True),
        Group("full.fine", FINE, refines=0, base_nbytes=BASE),
        Group("window.fine", FINE, 5, refines=1, base_nbytes=BASE),
    ),
    (),
    fidelity="ep",
)
BASES, FINES = (Part(0, 0), Part(1, 0)), (Part(2, 0), Part(3, 0))
WRITERS = ("one", "two")
BLOCKS = 16


def chain(name: int, blocks: int = BLOCKS) -> list[BlockKey]:
    return KeyChain(root_key(SPEC.id), 2).update([name] * 2 * blocks)


@cache
def record(writer: str, key: BlockKey, block: int, part: Part) -> bytes:
    """Return a writer's bytes. The first block is exact, and another one now and then."""
    name = key.hex()
    if part in FINES:
        base = record(writer, key, block, BASES[FINES.index(part)])
        return fine_record(writer, name, part, FINE, base)
    exact = block == 0 or (block + WRITERS.index(writer)) % 7 == 0
    nbytes = EXACT_MAX - 128 * block - 64 * WRITERS.index(writer) if exact else BASE
    return base_record(writer, name, part, nbytes, exact=exact)


class LossyNode(Node):
    """A node whose puts and reads are of the lossy namespace."""

    def __enter__(self) -> LossyNode:
        super().__enter__()
        self.store.namespaces.register(SPEC)
        return self

    def reserve(
        self,
        keys: Sequence[BlockKey],
        begin: int = 0,
        end: int | None = None,
        *,
        writer: str = "one",
        fine: bool = True,
        refined: bool = False,
        adds: bool = False,
        wait_s: float = 0.0,
    ) -> tuple[Grant, list[int]]:
        """Reserve blocks keys[begin:end] and write into their slots; return what to commit. adds:
        fine parts to bases that are here, too."""
        some = keys[begin:end]
        parts = BASES + FINES if fine else BASES
        items = [(part, begin + i, key) for part in parts for i, key in enumerate(some)]
        data = [record(writer, key, block, part) for part, block, key in items]
        grant = self.run(
            self.store.puts.reserve(
                DAEMON_SESSION,
                SPEC.id,
                some,
                first_block=begin,
                parent=keys[begin - 1] if begin else None,
                spans=tuple(Span(part, 0, len(some)) for part in parts),
                sizes=[len(each) for each in data],
                refined=refined,
                bases=[checksum(each) for each in data] if adds else (),
                wait_s=wait_s,
            )
        )
        for slot, each in zip(grant.slots, data, strict=True):
            if slot is not None:
                self.store.view(slot)[:] = each
        return grant, [checksum(each) for each in data]

    def store_blocks(
        self,
        keys: Sequence[BlockKey],
        begin: int = 0,
        end: int | None = None,
        *,
        writer: str = "one",
        fine: bool = True,
        refined: bool = False,
        adds: bool = False,
        durable: bool = False,
    ) -> Committed:
        """Put blocks keys[begin:end]."""
        grant, sums = self.reserve(
            keys, begin, end, writer=writer, fine=fine, refined=refined, adds=adds
        )
        commit = self.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums, durable=durable)
        return self.run(commit)

    def read(
        self, keys: Sequence[BlockKey], *, refined: bool = False, wait_s: float = 5.0
    ) -> tuple[int, int]:
        """Acquire a prefix, look whose every record is; return the hit, and its fine parts."""
        grant = self.run(
            self.store.gets.acquire(DAEMON_SESSION, SPEC.id, keys, refined=refined, wait_s=wait_s)
        )
        whose: dict[tuple[int, Part], str] = {}
        coarse, fine = set[tuple[int, Part]](), 0
        places = [(span.part, block) for span in grant.spans for block in range(*span[1:])]
        for (part, block), slot, expected in zip(places, grant.slots, grant.checksums, strict=True):
            base = BASES[FINES.index(part)] if part in FINES else part
            if slot is None:
                assert part in FINES
                continue
            data = bytes(self.store.view(slot))
            assert checksum(data) == expected
            (writer,) = [w for w in WRITERS if data == record(w, keys[block], block, part)]
            assert whose.setdefault((block, base), writer) == writer, "planes of two encodings"
            if part in FINES:
                fine += 1
                coarse.discard((block, base))
            elif len(data) == BASE:
                assert block > 0, "the first block is exact"
                coarse.add((block, base))
        assert not refined or not coarse
        assert self.store.release(DAEMON_SESSION, [grant.lease_id]) == [True]
        return grant.hit_blocks, fine
