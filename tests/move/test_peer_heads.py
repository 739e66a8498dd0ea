"""How much is known of the heads of peers: what is allowed, when they come and when they go."""

from __future__ import annotations

import asyncio
from random import Random

import numpy as np
import pytest

from kvstore.decide.heads import HEAD_TOKENS, head_of
from kvstore.model.block import Group, Namespace
from kvstore.model.member import NodeId
from kvstore.move.peer_heads import (
    AGAIN_S,
    FALL_S,
    PAUSE_S,
    SNAPSHOT_S,
    SNAPSHOTS_MAX,
    PeerHeads,
)
from kvstore.peer.base import HeadsAsk, HeadsReply
from kvstore.peer.view import BYTES_A_HEAD
from kvstore.testing.samples import sample_keys
from tests.sim.loop import SimLoop

EACH = 1024  # heads of a peer
INSTANCE = "1" * 16
SOON_S = 20 * PAUSE_S


class Link:
    """A link to a peer, half of whose heads are of the next level. asked: levels of snapshots."""

    open = True

    def __init__(self, number: int) -> None:
        drawn = Random(number)
        self._held = [drawn.getrandbits(63) for _ in range(EACH)]
        self.asked: list[int] = []

    async def heads(self, ask: HeadsAsk, *, deadline: float) -> HeadsReply:
        if ask.since >= 0:
            await asyncio.sleep(ask.wait_s)  # nothing changes
            return HeadsReply(INSTANCE, ask.level, 0, snapshot=False)
        await asyncio.sleep(0.01)
        self.asked.append(ask.level)
        told = np.array(sorted(self._held[:: 1 << ask.level]), "<u8")
        return HeadsReply(INSTANCE, ask.level, 0, snapshot=True, heads=told.tobytes())


class EndlessLink:
    """A link to a peer that tells one head after the other, each in a chunk of its own."""

    open = True

    def __init__(self) -> None:
        self.asked = 0

    async def heads(self, ask: HeadsAsk, *, deadline: float) -> HeadsReply:
        self.asked += 1
        await asyncio.sleep(0.1)
        told = np.array([ask.cursor], "<u8").tobytes()
        return HeadsReply(INSTANCE, ask.level, 0, True, ask.cursor + 1, told)


def test_a_snapshot_without_an_end_keeps_no_other_peer_from_being_followed() -> None:
    loop = SimLoop(Random(1))

    async def run() -> None:
        heads, endless = PeerHeads(1 << 20, loop.time), [EndlessLink() for _ in range(8)]
        for number, link in enumerate(endless):
            heads.follow(NodeId(f"{number:032x}"), link)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        heads.follow(NodeId("f" * 32), Link(1))  # type: ignore[arg-type]
        rounds = -(-len(endless) // SNAPSHOTS_MAX)
        await asyncio.sleep(rounds * SNAPSHOT_S + PAUSE_S)
        assert heads.stats()["heads"] == EACH
        asked = sum(link.asked for link in endless)
        await asyncio.sleep(rounds * SNAPSHOT_S + AGAIN_S)
        assert sum(link.asked for link in endless) > asked  # it is tried again
        await heads.close()

    loop.run_until_complete(run())
    assert not loop.unhandled
    loop.close()


def test_it_knows_as_many_heads_as_are_allowed() -> None:
    loop = SimLoop(Random(1))
    allowed = 6 * EACH * BYTES_A_HEAD
    links = {NodeId(f"{number:032x}"): Link(number) for number in range(20)}

    async def run() -> None:
        heads = PeerHeads(allowed, loop.time)
        for node, link in links.items():
            heads.follow(node, link)  # type: ignore[arg-type]
        await asyncio.sleep(SOON_S)
        assert heads.stats() == {
            "heads": 20 * EACH // 4, "bytes": 5 * EACH * BYTES_A_HEAD, "level": 2
        }  # fmt: skip
        await asyncio.sleep(3 * FALL_S)
        assert heads.level == 2  # twice as many would be too many

        for node in [*links][4:]:
            await heads.forget(node)
        await asyncio.sleep(3 * FALL_S)
        assert heads.stats() == {"heads": 4 * EACH, "bytes": 4 * EACH * BYTES_A_HEAD, "level": 0}
        stay = [*links.values()][:4]
        assert all(link.asked[-3:] == [2, 1, 0] for link in stay)
        assert all(len(link.asked) <= 5 for link in stay)  # it went neither up nor down in vain

        for node, link in [*links.items()][4:]:
            heads.follow(node, link)  # type: ignore[arg-type]
        await asyncio.sleep(SOON_S)
        assert heads.level == 2
        await heads.close()

    loop.run_until_complete(run())
    assert not loop.unhandled
    loop.close()


FULL, WINDOW = Group("full", 4096), Group("window", 4096, window_tokens=128)


@pytest.mark.parametrize(
    ("groups", "level", "held", "hit_blocks", "more"),
    [
        ((FULL,), 0, [0, 1, 2], 0, True),
        ((FULL,), 0, [0, 1, 2], 33, True),
        ((FULL,), 0, [0, 1, 2], 48, False),
        ((FULL,), 0, [0, 1, 2], 64, False),
        ((FULL,), 0, [2], 0, False),  # nobody can go on from nothing with the third head
        ((FULL,), 0, [2], 33, True),
        ((FULL,), 0, [], 0, False),
        ((FULL, WINDOW), 0, [2], 0, False),
        ((WINDOW,), 0, [2], 0, True),  # only the last window is needed
        ((FULL,), 1, [1], 0, True),  # nobody tells the first head
        ((FULL,), 1, [1], 32, False),
    ],
)
def test_a_prefix_is_looked_for_where_its_next_head_is_known(
    groups: tuple[Group, ...], level: int, held: list[int], hit_blocks: int, more: bool
) -> None:
    step = HEAD_TOKENS // 16
    keys = sample_keys("prefix", 4 * step + 5)
    namespace = Namespace(16, groups, (("model", "heads"),))

    async def run() -> None:
        heads = PeerHeads(1 << 20, lambda: 0.0)
        heads.level = level
        numbers = [head_of(keys[(number + 1) * step - 1]) for number in held]
        await heads.view.replace(3, np.array(sorted(numbers), np.uint64))
        assert heads.knows(keys, namespace, hit_blocks) is more
        assert not heads.knows(sample_keys("other", 70), namespace, 0)
        assert not heads.knows(keys[:3], namespace, 0)  # less than a head

    asyncio.run(run())
