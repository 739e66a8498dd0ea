"""The contract every link to a peer keeps. Subclass it and say how a lender is reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from kvstore.model.block import BlockKey, Group, Namespace, Part, Span
from kvstore.model.errors import InvalidRequest
from kvstore.peer.base import (
    KEYS_MAX,
    NAMED_KEYS_MAX,
    HeadsAsk,
    LentRecord,
    PeerBusy,
    PeerCorrupt,
    PeerError,
    PeerGone,
    PeerLink,
    PeerSlow,
)
from kvstore.testing.lender import MemoryLender
from kvstore.testing.samples import sample_keys, sample_namespace, sample_record

RECORD_NBYTES = 150_000  # neither whole pages nor whole leaves
LARGE_NBYTES = 40 << 20  # more than sockets buffer
SOON_S = 10.0
TEST_S_MAX = 30.0


def soon() -> float:
    """Return a deadline that no good answer misses."""
    return time.monotonic() + SOON_S


async def until(true: Callable[[], object]) -> None:
    """Let others run until `true()` is. Raises TimeoutError."""
    ends_at = soon()
    while time.monotonic() < ends_at:
        if true():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError(f"not true within {SOON_S} s")


def full_span(count: int) -> list[Span]:
    return [Span(Part(0, 0), 0, count)]


class PeerReadContract:
    """What is read, and how a read ends. `PeerLinkContract` has all of it."""

    namespace = sample_namespace("peer", RECORD_NBYTES)
    large_nbytes = LARGE_NBYTES  # more than READ_NBYTES_MAX

    def linked(self, lender: MemoryLender) -> AbstractAsyncContextManager[PeerLink]:
        raise NotImplementedError("serve `lender`, give a link to it, end both")

    def run(self, test: Callable[[MemoryLender, PeerLink], Awaitable[None]]) -> None:
        """Run a test with a fresh lender, and see that it was given back all it has lent."""

        async def main() -> None:
            lender = MemoryLender()
            async with asyncio.timeout(TEST_S_MAX), self.linked(lender) as link:
                await test(lender, link)
            assert all(loan.released == 1 for loan in lender.loans)

        asyncio.run(main())

    def fill_lender(self, lender: MemoryLender, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            lender.put(self.namespace, key, sample_record(key, RECORD_NBYTES))

    async def read(
        self, link: PeerLink, keys: Sequence[BlockKey], nbytes: int = RECORD_NBYTES
    ) -> list[bytes]:
        """Return the records of keys that are all there."""
        incoming = await link.read(self.namespace, keys, full_span(len(keys)), deadline=soon())
        targets = [memoryview(bytearray(nbytes)) for _ in keys]
        await incoming.fill(targets)
        return [bytes(each) for each in targets]

    # ---- what is there ---------------------------------------------------------------------------

    def test_records_arrive_as_they_were(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("read", 9)
            self.fill_lender(lender, keys)
            got = await self.read(link, keys)
            assert got == [sample_record(key, RECORD_NBYTES) for key in keys]

        self.run(test)

    def test_what_is_missing_has_no_size_and_what_is_unwanted_is_dropped(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("holes", 5)
            self.fill_lender(lender, [keys[0], keys[2], keys[3]])
            incoming = await link.read(self.namespace, keys, full_span(5), deadline=soon())
            there = [RECORD_NBYTES if i in (0, 2, 3) else 0 for i in range(5)]
            assert list(incoming.sizes) == there
            wanted = memoryview(bytearray(RECORD_NBYTES))
            await incoming.fill([None, None, None, wanted, None])
            assert wanted == sample_record(keys[3], RECORD_NBYTES)
            assert (await self.read(link, keys[2:4]))[0] == sample_record(keys[2], RECORD_NBYTES)

        self.run(test)

    def test_records_of_several_parts_and_sizes(self) -> None:
        namespace = Namespace(
            16,
            (Group("base", 90_000, varies=True), Group("small", 700, shards=2)),
            (("model", "parts"),),
        )

        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("parts", 40)
            for number, key in enumerate(keys):
                lender.put(namespace, key, sample_record(key, 1 + 1900 * number))
                for shard in (0, 1):
                    lender.put(namespace, key, bytes([number, shard] * 350), Part(1, shard))
            spans = [Span(Part(0, 0), 0, 40), Span(Part(1, 1), 5, 40), Span(Part(1, 0), 39, 40)]
            incoming = await link.read(namespace, keys, spans, deadline=soon())
            targets = [memoryview(bytearray(nbytes)) for nbytes in incoming.sizes]
            await incoming.fill(targets)
            expected = [sample_record(key, 1 + 1900 * i) for i, key in enumerate(keys)]
            expected += [bytes([number, 1] * 350) for number in range(5, 40)]
            assert targets == [*expected, bytes([39, 0] * 350)]

        self.run(test)

    def test_reads_at_once_do_not_mix(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            prefixes = [sample_keys(f"many {n}", 4) for n in range(16)]
            for keys in prefixes:
                self.fill_lender(lender, keys)
            got = await asyncio.gather(*(self.read(link, keys) for keys in prefixes))
            for keys, records in zip(prefixes, got, strict=True):
                assert records == [sample_record(key, RECORD_NBYTES) for key in keys]

        self.run(test)

    def test_a_block_larger_than_a_window_is_read_by_itself(self) -> None:
        namespace = sample_namespace("large", self.large_nbytes)

        async def test(lender: MemoryLender, link: PeerLink) -> None:
            (key,) = sample_keys("large", 1)
            lender.put(namespace, key, sample_record(key, self.large_nbytes))
            incoming = await link.read(namespace, [key], full_span(1), deadline=soon())
            target = memoryview(bytearray(self.large_nbytes))
            await incoming.fill([target])
            assert target == sample_record(key, self.large_nbytes)
            with pytest.raises(InvalidRequest):
                await link.read(namespace, [key, key], full_span(2), deadline=soon())

        self.run(test)

    # ---- waiting ---------------------------------------------------------------------------------

    def test_a_read_waits_for_blocks_that_are_being_computed(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("later", 2)
            self.fill_lender(lender, keys[:1])
            reading = asyncio.create_task(
                link.read(self.namespace, keys, full_span(2), wait_s=5.0, deadline=soon())
            )
            await until(lambda: lender.namespaces)
            await link.ping(soon())
            assert not reading.done()
            self.fill_lender(lender, keys[1:])
            incoming = await reading
            assert list(incoming.sizes) == [RECORD_NBYTES] * 2
            await incoming.close()

        self.run(test)

    def test_a_wait_ends_with_what_is_there(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("never", 2)
            self.fill_lender(lender, keys[:1])
            incoming = await link.read(
                self.namespace, keys, full_span(2), wait_s=0.05, deadline=soon()
            )
            assert list(incoming.sizes) == [RECORD_NBYTES, 0]
            await incoming.close()

        self.run(test)

    # ---- what goes wrong -------------------------------------------------------------------------

    def test_a_record_with_another_checksum_is_named(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("rotten", 3)
            self.fill_lender(lender, keys)
            place = (self.namespace.id, keys[1], Part(0, 0))
            record = lender.records[place]
            lender.records[place] = LentRecord(record.checksum ^ 1, record.nbytes, record.view)
            with pytest.raises(PeerCorrupt) as caught:
                await self.read(link, keys)
            assert caught.value.records == (1,)
            await link.corrupt(self.namespace.id, [keys[1]], deadline=soon())
            assert lender.corrupted == [keys[1]]
            assert await self.read(link, keys[:1]) == [sample_record(keys[0], RECORD_NBYTES)]

        self.run(test)

    def test_a_lease_that_was_over_makes_the_read_void(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("evicted", 2)
            self.fill_lender(lender, keys)
            lender.holds = False
            with pytest.raises(PeerGone) as caught:
                await self.read(link, keys)
            assert caught.value.reason == "lease"
            lender.holds = True
            assert len(await self.read(link, keys)) == 2

        self.run(test)

    def test_a_busy_lender_says_so_and_the_link_goes_on(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("busy", 1)
            self.fill_lender(lender, keys)
            lender.namespaces[self.namespace.id] = self.namespace
            lender.fails = PeerBusy("not now", retry_after_s=3.0)
            with pytest.raises(PeerBusy) as caught:
                await self.read(link, keys)
            assert caught.value.retry_after_s == 3.0
            assert len(await self.read(link, keys)) == 1

        self.run(test)

    def test_a_lender_that_fails_is_not_waited_for(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("failed", 1)
            self.fill_lender(lender, keys)
            lender.namespaces[self.namespace.id] = self.namespace
            lender.fails = PeerSlow("of its own")
            with pytest.raises(PeerGone) as caught:
                await self.read(link, keys)
            assert caught.value.reason == "failed"
            assert len(await self.read(link, keys)) == 1

        self.run(test)

    def test_nothing_writes_into_targets_after_a_cancelled_read(self) -> None:
        namespace = sample_namespace("cancelled", self.large_nbytes)

        async def test(lender: MemoryLender, link: PeerLink) -> None:
            (key,) = sample_keys("cancelled", 1)
            lender.put(namespace, key, b"\xff" * self.large_nbytes)
            incoming = await link.read(namespace, [key], full_span(1), deadline=soon())
            target = memoryview(bytearray(self.large_nbytes))
            filling = asyncio.create_task(incoming.fill([target]))
            await until(lambda: target[0])
            filling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await filling
            target[:] = bytes(self.large_nbytes)
            self.fill_lender(lender, [key])
            assert len(await self.read(link, [key])) == 1  # time for whoever still writes
            assert not any(target[:: 1 << 12])

        self.run(test)

    def test_a_read_that_is_not_filled_can_be_closed(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("closed", 2)
            self.fill_lender(lender, keys)
            for _ in range(9):  # more often than there are connections
                incoming = await link.read(self.namespace, keys, full_span(2), deadline=soon())
                await incoming.close()
            assert len(await self.read(link, keys)) == 2

        self.run(test)

    def test_a_deadline_ends_a_request(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("late", 1)
            self.fill_lender(lender, keys)
            with pytest.raises(PeerSlow):
                await link.match(self.namespace, keys, deadline=time.monotonic() - 1)
            with pytest.raises(PeerSlow):
                await link.read(self.namespace, keys, full_span(1), deadline=time.monotonic() - 1)
            assert len(await self.read(link, keys)) == 1

        self.run(test)

    def test_targets_of_other_sizes_are_refused(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("sizes", 1)
            self.fill_lender(lender, keys)
            for targets in ([], [memoryview(bytearray(9))]):
                incoming = await link.read(self.namespace, keys, full_span(1), deadline=soon())
                with pytest.raises(InvalidRequest):
                    await incoming.fill(targets)
            assert len(await self.read(link, keys)) == 1

        self.run(test)


class PeerLinkContract(PeerReadContract):
    """Subclass and override `linked`."""

    def test_heads_come_as_a_snapshot_and_then_as_changes(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("heads", 3)
            self.fill_lender(lender, keys[:2])
            first = await link.heads(HeadsAsk(level=1), deadline=soon())
            assert first.snapshot
            assert {first.heads[:8], first.heads[8:]} == {keys[0][:8], keys[1][:8]}
            ask = HeadsAsk(lender.instance, level=1, since=first.since, wait_s=5.0)
            asking = asyncio.create_task(link.heads(ask, deadline=soon()))
            await link.ping(soon())
            self.fill_lender(lender, keys[2:])
            changes = await asking
            assert (changes.heads, changes.came, changes.snapshot) == (keys[2][:8], b"\1", False)
            nothing = HeadsAsk(lender.instance, level=1, since=changes.since, wait_s=0.01)
            assert (await link.heads(nothing, deadline=soon())).heads == b""

        self.run(test)

    def test_deletes_reach_the_lender(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("deleted", 2)
            with pytest.raises(PeerGone):
                await link.delete(self.namespace.id, keys, deadline=soon())
            lender.namespaces[self.namespace.id] = self.namespace
            await link.delete(self.namespace.id, keys, deadline=soon())
            await link.delete(self.namespace.id, None, deadline=soon())
            assert lender.deleted == [(self.namespace.id, keys), (self.namespace.id, None)]

        self.run(test)

    def test_a_closed_link_answers_nothing(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("over", 1)
            self.fill_lender(lender, keys)
            await self.read(link, keys)
            await link.close()
            assert not link.open
            for call in (
                link.match(self.namespace, keys, deadline=soon()),
                link.read(self.namespace, keys, full_span(1), deadline=soon()),
                link.heads(HeadsAsk(), deadline=soon()),
                link.ping(soon()),
            ):
                with pytest.raises(PeerError):
                    await call

        self.run(test)

    def test_a_match_counts_the_prefix_and_registers_its_namespace(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = sample_keys("match", 6)
            self.fill_lender(lender, keys[:4])
            found = await link.match(self.namespace, keys, deadline=soon())
            assert (found.hit_blocks, found.resident_blocks, found.busy) == (4, 4, False)
            assert lender.namespaces == {self.namespace.id: self.namespace}

        self.run(test)

    def test_requests_beyond_their_bounds_are_not_sent(self) -> None:
        async def test(lender: MemoryLender, link: PeerLink) -> None:
            keys = [sample_keys("bounds", 1)[0]] * (KEYS_MAX + 1)
            for call in (
                link.match(self.namespace, keys, deadline=soon()),
                link.read(self.namespace, keys, full_span(1), deadline=soon()),
                link.read(self.namespace, keys[:2], full_span(3), deadline=soon()),
                link.read(self.namespace, keys[:2], full_span(2) * 2, deadline=soon()),
                link.read(self.namespace, keys[:2], [Span(Part(7, 0), 0, 1)], deadline=soon()),
                link.corrupt(self.namespace.id, keys[: NAMED_KEYS_MAX + 1], deadline=soon()),
                link.delete(self.namespace.id, keys[: NAMED_KEYS_MAX + 1], deadline=soon()),
            ):
                with pytest.raises(InvalidRequest):
                    await call
            assert await link.ping(soon()) < SOON_S

        self.run(test)
