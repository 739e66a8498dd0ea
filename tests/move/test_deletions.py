"""What is being deleted is told to work that is under way, and to work that begins meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator

import pytest

from kvstore.model.block import BlockKey, NamespaceId
from kvstore.move import deletions as deletions_module
from kvstore.move.deletions import LINGERING_MAX, Deletions
from kvstore.testing.samples import sample_keys

ONE, OTHER = NamespaceId(b"1" * 32), NamespaceId(b"2" * 32)
KEYS = sample_keys("deletions", 4)


@pytest.mark.parametrize(
    ("namespaces", "keys", "dead"),
    [
        ({ONE}, KEYS[:1], KEYS[:1]),
        ({ONE}, None, KEYS),
        ({OTHER}, None, []),
        (set(), None, []),
        (None, None, KEYS),  # all, whoever knows of them
    ],
)
def test_work_learns_what_is_deleted_of_it(
    namespaces: Collection[NamespaceId] | None,
    keys: Collection[BlockKey] | None,
    dead: list[BlockKey],
) -> None:
    deletions = Deletions()
    with (
        deletions.watch(ONE, KEYS) as before,
        deletions.deleting(namespaces, keys),
        deletions.watch(ONE, KEYS) as during,
    ):
        assert before.dead == during.dead == set(dead)
    with deletions.watch(ONE, KEYS) as after:
        assert not after.dead


def test_a_delete_of_everything_lingers_beyond_the_bound() -> None:
    async def run() -> None:
        deletions = Deletions()
        lingering = [
            asyncio.ensure_future(deletions.linger({OTHER}, KEYS[:1], 60.0))
            for _ in range(LINGERING_MAX)
        ]
        lingering.append(asyncio.ensure_future(deletions.linger(None, None, 60.0)))
        await asyncio.sleep(0)
        with deletions.watch(ONE, KEYS) as watch:
            assert watch.dead == set(KEYS)
        for each in lingering:
            each.cancel()
        await asyncio.gather(*lingering, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("others", [0, LINGERING_MAX], ids=["", "beyond-the-bound"])
def test_a_delete_lingers_until_it_is_over(monkeypatch: pytest.MonkeyPatch, *, others: int) -> None:
    monkeypatch.setattr(deletions_module, "LOOK_S", 0.001)
    over = [False, False]

    async def run() -> None:
        deletions = Deletions()
        lingering = [
            asyncio.ensure_future(deletions.linger({OTHER}, KEYS[:1], 60.0)) for _ in range(others)
        ]
        lingers = [
            asyncio.ensure_future(deletions.linger({ONE}, KEYS[:1], 0.01, lambda at=at: over[at]))
            for at in range(2)
        ]

        def dead() -> set[BlockKey]:
            with deletions.watch(ONE, KEYS) as watch:
                return watch.dead

        await asyncio.sleep(0.05)
        assert dead() == set(KEYS if others else KEYS[:1])
        assert len(deletions._deletes) == others + (1 if others else 2)
        over[0] = True  # beyond the bound, the second one goes on with what the first has begun
        await asyncio.sleep(0.05)
        assert dead()
        over[1] = True
        async with asyncio.timeout(5):
            await asyncio.gather(*lingers)
        assert not dead()
        assert len(deletions._deletes) == others
        for each in lingering:
            each.cancel()
        await asyncio.gather(*lingering, return_exceptions=True)

    asyncio.run(run())


def test_deletes_of_many_namespaces_linger_as_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions_module, "LINGERING_MAX", 0)
    monkeypatch.setattr(deletions_module, "WHOLE_MAX", 4)

    async def run() -> None:
        deletions = Deletions()
        lingering = [
            asyncio.ensure_future(deletions.linger({NamespaceId(bytes([at]) * 32)}, None, 60.0))
            for at in range(50)
        ]
        await asyncio.sleep(0.01)
        assert len(deletions._deletes) == len(deletions._whole) == 5
        with deletions.watch(NamespaceId(bytes([49]) * 32), KEYS) as watch:
            assert watch.dead == set(KEYS)
        for each in lingering:
            each.cancel()
        await asyncio.gather(*lingering, return_exceptions=True)
        assert not deletions._whole
        assert not deletions._deletes

    asyncio.run(run())


class Counted(list[BlockKey]):
    """Keys that count how often all of them are walked through."""

    walks = 0

    def __iter__(self) -> Iterator[BlockKey]:
        self.walks += 1
        return super().__iter__()


def test_work_does_not_walk_through_all_that_is_deleted() -> None:
    """A delete may linger for as long as etcd is away."""
    deletions, keys = Deletions(), Counted(KEYS)
    with deletions.deleting({ONE}, keys):
        begun = keys.walks
        for _ in range(3):
            with deletions.watch(ONE, KEYS[:1]) as watch:
                assert watch.dead == set(KEYS[:1])
    assert keys.walks == begun
