"""How much is known of the heads of peers: what is allowed, when they come and when they go."""

from __future__ import annotations

import asyncio
from random import Random

import numpy as np

from kvstore.model.member import NodeId
from kvstore.move.peer_heads import FALL_S, PAUSE_S, PeerHeads
from kvstore.peer.base import HeadsAsk, HeadsReply
from kvstore.peer.view import BYTES_A_HEAD
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
