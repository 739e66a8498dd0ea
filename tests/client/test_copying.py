"""Batches that a client's threads share: records that come and go in any mixture."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.client.copying import AT_ONCE_NBYTES, Copiers, Wanted
from kvstore.client.pieces import Memory, Pieces
from kvstore.model.checksum import checksum
from kvstore_kernels.native import sums

SMALL, LARGE = 5_000, AT_ONCE_NBYTES + 77


@pytest.fixture(params=["native", "python"])
def copiers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copiers]:
    if request.param == "python":
        monkeypatch.setattr("kvstore.client.copying.shared_copies", lambda *_: None)
        monkeypatch.setattr("kvstore.model.checksum._natively", lambda _: False)
    copiers = Copiers(3)
    yield copiers
    copiers.close()


def drawn(nbytes: int) -> memoryview:
    return memoryview(np.random.default_rng(nbytes).bytes(nbytes))


def empty(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def cut(view: memoryview) -> Pieces:
    return Pieces([view[:1000], view[1000:]])


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_what_has_a_slot_is_copied_there(copiers: Copiers, nbytes: int) -> None:
    plain = [drawn(nbytes + extra) for extra in range(4)]
    records: list[Memory] = [plain[0], cut(plain[1]), plain[2], plain[3], cut(plain[3])]
    slots = [empty(len(record)) for record in records]
    targets = [slots[0], slots[1], None, slots[3], None]
    found = asyncio.run(copiers.fill(records, targets))
    assert found == [checksum(plain[0]), checksum(plain[1]), 0, checksum(plain[3]), 0]
    kept = [plain[0], plain[1], empty(nbytes + 2), plain[3], empty(nbytes + 3)]
    assert slots == kept


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_what_is_there_is_taken_and_what_is_wrong_is_not(
    copiers: Copiers, nbytes: int, verify: bool
) -> None:
    slots = [drawn(nbytes + extra) for extra in range(7)]
    expected = [checksum(slot) for slot in slots]
    for wrong in (1, 3, 5):
        expected[wrong] ^= 1
    room = [empty(len(slot)) for slot in slots]
    targets: list[Memory | None] = [room[0], room[1], cut(room[2]), cut(room[3]), None, None]
    targets.append(room[6])
    stored = [*slots[:6], None]
    taken = asyncio.run(copiers.take(stored, expected, Wanted(targets, verify)))
    assert [corrupt for _, corrupt in taken] == [verify and at in (1, 3, 5) for at in range(7)]
    got = [record is not None for record, _ in taken]
    assert got == [not (verify and at in (1, 3, 5)) and at < 6 for at in range(7)]
    assert [room[0], room[2], taken[4][0]] == [slots[0], slots[2], slots[4]]
    assert taken[0][0] is room[0]
    assert not any(room[6])


def test_a_batch_of_nothing_is_nothing(copiers: Copiers) -> None:
    assert asyncio.run(copiers.fill([], [])) == []
    assert asyncio.run(copiers.fill([drawn(9)], [None])) == [0]
    assert asyncio.run(copiers.take([None], [0], Wanted([None]))) == [(None, False)]


def test_a_slot_of_another_size_is_refused(copiers: Copiers) -> None:
    with pytest.raises(ValueError, match=r"differ in size|broadcast"):
        asyncio.run(copiers.fill([drawn(LARGE)], [empty(LARGE + 1)]))


def test_several_batches_at_once_are_all_copied(copiers: Copiers) -> None:
    records = [[drawn(LARGE + at), drawn(SMALL + at)] for at in range(20)]
    slots = [[empty(len(record)) for record in some] for some in records]

    async def fill() -> list[list[int]]:
        return await asyncio.gather(*map(copiers.fill, records, slots))

    assert asyncio.run(fill()) == [[checksum(record) for record in some] for some in records]
    assert slots == records


def test_who_is_cancelled_goes_on_when_its_threads_have_ended(copiers: Copiers) -> None:
    gate, begun = threading.Event(), threading.Event()

    def work(_: int) -> None:
        begun.set()
        assert gate.wait(10)

    async def cancelled() -> None:
        task = asyncio.create_task(copiers.map(work, [1]))
        assert await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
        assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_what_a_thread_raises_is_raised(copiers: Copiers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(sums.SharedCopies, "take_part", fail)
    monkeypatch.setattr("kvstore.client.copying._each", fail)
    with pytest.raises(MemoryError, match="no room"):
        asyncio.run(copiers.fill([drawn(LARGE)], [empty(LARGE)]))


def test_where_a_thread_cannot_begin_those_that_did_are_waited_for(
    copiers: Copiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, done = threading.Event(), threading.Event()
    submit, submitted = copiers._threads.submit, []

    def work(_: int) -> None:
        assert gate.wait(10)
        done.set()

    def submit_one(job: Any) -> Any:
        if submitted:
            threading.Timer(0.05, gate.set).start()
            raise RuntimeError("can't start new thread")
        submitted.append(job)
        return submit(job)

    monkeypatch.setattr(copiers._threads, "submit", submit_one)
    with pytest.raises(RuntimeError, match="new thread"):
        asyncio.run(copiers.map(work, [1, 2, 3]))
    assert done.is_set()
