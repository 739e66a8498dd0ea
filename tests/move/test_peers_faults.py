"""What is held against a host, for how long, and a host that cannot be dialled."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.metrics import Metrics
from kvstore.model.member import Member
from kvstore.move.peers import BACKOFF_MIN_S, DEMERITS_S, Peer, Peers
from kvstore.peer.base import PeerCorrupt, PeerSlow
from kvstore.peer.tcp import TcpLink, dial
from tests.peer.fleet import BORROWER, ourselves
from tests.store.peers import member


def peer_at(clock: list[float]) -> Peer:
    return Peer(member(1), Metrics(), lambda: clock[0])


@pytest.mark.parametrize("between_s", [1.0, 299.0])
def test_who_is_wrong_three_times_is_not_asked_for_ten_minutes_from_the_third_on(
    between_s: float,
) -> None:
    clock = [1000.0]
    peer = peer_at(clock)
    for demerits in (1, 2, 3):
        assert not peer.quarantined
        peer.failed(PeerCorrupt("wrong bytes"))
        assert peer.status()["demerits"] == demerits
        clock[0] += between_s
    clock[0] += DEMERITS_S - between_s - 0.1
    assert peer.quarantined
    assert peer.state == "quarantined"
    clock[0] += 0.2
    assert not peer.quarantined
    peer.failed(PeerCorrupt("wrong bytes"))
    assert not peer.quarantined  # it begins anew


def test_what_is_longer_ago_does_not_count() -> None:
    clock = [1000.0]
    peer = peer_at(clock)
    for pause_s in (1.0, DEMERITS_S, 1.0):
        peer.failed(PeerCorrupt("wrong bytes"))
        peer.failed(PeerSlow("no answer"))  # that is no wrong answer
        clock[0] += pause_s
    assert not peer.quarantined


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_name_that_no_host_has_is_dialled_less_and_less_often(host: str) -> None:
    """As a membership would give it that another version of this daemon has let in."""
    clock, dials = [0.0], list[float]()

    async def course() -> None:
        with ThreadPoolExecutor(1) as threads:

            async def dialled(told: Member, deadline: float) -> TcpLink:
                dials.append(clock[0])
                return await dial(
                    (host, 7702),
                    ourselves(BORROWER),
                    threads,
                    expected=told.node,
                    deadline=asyncio.get_running_loop().time() + 5.0,
                )

            peers = Peers(dialled, BORROWER, Metrics(), lambda: clock[0])
            peers.know({member(1).node: member(1)})
            (peer,) = peers
            for _ in range(300):
                peers._look_at(peer.member.node, peer)
                await asyncio.gather(*peers._dialling.values())
                clock[0] += BACKOFF_MIN_S
            assert peer.state == "down"
            assert "no host has that name" in peer.last_error
            await peers.close()

    asyncio.run(course())
    assert 3 <= len(dials) <= 15  # within a minute
