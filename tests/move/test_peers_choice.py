"""Several hosts have the same prefix, or parts of it: who gives it, and what if one does not."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.member import Member
from kvstore.model.outcome import Outcome, Reason
from kvstore.move.load import block_nbytes
from kvstore.move.load_race import LoadRaces
from kvstore.move.peer_source import PeerListing, PeerSource
from kvstore.move.peers import Peer, Peers
from kvstore.peer.base import PeerGone, PeerSlow
from kvstore.testing.membership import until
from tests.store.node import RECORD, SPEC, Node, chain
from tests.store.peers import DirectIncoming, DirectLink, joined, member

A = chain(1, 20)
ONE, TWO = member(1), member(2)


@dataclass
class Three:
    borrower: Node
    lenders: dict[Member, Node]
    peers: Peers
    links: dict[Member, DirectLink]

    def be(self, one: Member, **changes: str) -> None:
        """Let a host say something else of itself."""
        peer = self.peers.get(one.node)
        assert peer is not None
        peer.member = self.links[one].peer = replace(one, **changes)  # type: ignore[arg-type]

    def read_from(self, name: int) -> set[Member]:
        """Let both store a prefix; borrow it, and say who was read from."""
        keys = chain(name, 20)
        for lender in self.lenders.values():
            lender.put(keys, wait_s=20.0)  # their arenas are full of earlier ones, not written yet
        before = {each: link.reads for each, link in self.links.items()}
        assert self.borrower.get(keys, request_id="r") == 20
        return {each for each, link in self.links.items() if link.reads > before[each]}

    def source(self, one: Member) -> PeerSource:
        (tenant,) = self.peers.tenants
        peer = self.peers.get(one.node)
        assert peer is not None
        return tenant.source(peer)

    def outcome(self) -> Outcome:
        (outcome,) = self.borrower.store.report.outcomes("r", 1)
        return outcome


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    with ExitStack() as stack:
        borrower = stack.enter_context(Node(tmp_path / "0"))
        lenders = {
            each: stack.enter_context(Node(tmp_path / each.node, beside=borrower))
            for each in (ONE, TWO)
        }
        peers, links = joined(borrower, lenders)
        yield Three(borrower, lenders, peers, {each: links[each.node] for each in lenders})
        borrower.tending.cancel()  # type: ignore[attr-defined]
        with contextlib.suppress(asyncio.CancelledError):
            borrower.loop.run_until_complete(borrower.tending)  # type: ignore[attr-defined]
        borrower.run(peers.close())


@pytest.mark.parametrize(("near", "far"), [(ONE, TWO), (TWO, ONE)])
def test_of_few_hosts_with_the_same_prefix_a_near_one_gives_it(
    three: Three, near: Member, far: Member
) -> None:
    three.be(far, zone="rack-2")
    three.source(near).races.pace.note(20 * RECORD, 0.02)  # though the other one is faster
    three.source(far).races.pace.note(20 * RECORD, 0.001)
    for name in range(2, 8):
        assert three.read_from(name) == {near}


@pytest.mark.parametrize(("fast", "slow"), [(ONE, TWO), (TWO, ONE)])
def test_of_few_hosts_as_near_the_faster_one_gives_it(
    three: Three, fast: Member, slow: Member
) -> None:
    for each, seconds in ((fast, 0.001), (slow, 10.0)):
        for size in range(12, 24):  # of every size
            three.source(each).races.pace.note(1 << size, seconds)
    for name in range(2, 8):
        assert three.read_from(name) == {fast}


def test_of_few_hosts_alike_all_give(three: Three) -> None:
    found = set[Member]()
    for name in range(2, 22):
        for each in (ONE, TWO):
            three.source(each).races = LoadRaces(three.borrower.metrics, three.borrower.now)
        found |= three.read_from(name)
    assert found == {ONE, TWO}


@pytest.mark.parametrize(("short", "longest"), [(ONE, TWO), (TWO, ONE)])
def test_the_longer_of_two_prefixes_is_the_hit(
    three: Three, short: Member, longest: Member
) -> None:
    three.lenders[short].put(A, 0, 10)
    three.lenders[longest].put(A)
    assert three.borrower.get(A, request_id="r") == 20
    outcome = three.outcome()
    assert (outcome.peer, outcome.peer_blocks, outcome.ending) == (longest.node, 20, None)


@pytest.mark.parametrize("near_has", [20, 10, 1])
def test_who_is_far_away_is_waited_for_if_nobody_near_has_it_all(
    three: Three, monkeypatch: pytest.MonkeyPatch, near_has: int
) -> None:
    monkeypatch.setattr(Peer, "distance_s", 0.1)
    three.lenders[ONE].put(A, 0, near_has)
    three.lenders[TWO].put(A)
    three.links[TWO].faults.delay_s = 0.2
    began = three.borrower.loop.time()
    assert three.borrower.get(A, request_id="r") == 20
    took_s = three.borrower.loop.time() - began
    if near_has == 20:
        assert took_s < 0.2
        assert three.outcome().peer == ONE.node
    else:
        assert took_s > 0.4
        assert three.outcome().peer == TWO.node


def test_who_is_far_away_is_not_waited_for_beyond_a_bound_if_nothing_is_at_stake(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peer, "distance_s", 0.5)
    three.lenders[ONE].put(A, 0, 10)
    three.links[TWO].faults.delay_s = 1.0
    began = three.borrower.loop.time()
    assert three.borrower.get(A) == 10
    assert three.borrower.loop.time() - began < 0.7


@pytest.mark.parametrize("late", [False, True], ids=["failed", "late"])
@pytest.mark.parametrize(("stalled", "other"), [(ONE, TWO), (TWO, ONE)])
def test_who_has_stalled_is_not_read_from_first(
    three: Three, stalled: Member, other: Member, late: bool
) -> None:
    if late:
        link = three.links[stalled]
        ask = link.read

        async def stalls(*args: Any, **more: Any) -> DirectIncoming:
            await asyncio.sleep(0.5)
            return await ask(*args, **more)

        three.lenders[stalled].put(A)
        link.read = stalls  # type: ignore[method-assign]
        assert three.borrower.get(A, wait_s=0.2) == 0
        link.read = ask  # type: ignore[method-assign]
    else:
        three.source(stalled).failed(PeerSlow("nothing came"))
    for name in range(2, 10):
        assert three.read_from(name) == {other}


def test_a_near_host_that_hangs_is_pinged_though_another_one_has_it_all(three: Three) -> None:
    three.borrower.tending.cancel()  # type: ignore[attr-defined]
    three.lenders[ONE].put(A)
    three.links[TWO].faults.delay_s = 5.0
    assert three.borrower.get(A) == 20
    one, two = (three.peers.get(each.node) for each in (ONE, TWO))
    assert one is not None
    assert two is not None
    assert one.pinged_at > 0
    assert two.pinged_at == -math.inf


def test_what_the_bucket_has_served_waits_for_no_host_far_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    with Node(tmp_path / "1", bucket=bucket) as writer:
        writer.put(A, durable=True)
        assert writer.flush()
    with (
        Node(tmp_path / "2", bucket=bucket) as borrower,
        Node(tmp_path / "3", beside=borrower) as lender,
    ):
        peers, links = joined(borrower, {ONE: lender})
        monkeypatch.setattr(Peer, "distance_s", 0.25)
        links[ONE.node].faults.delay_s = 0.9
        began = borrower.loop.time()
        assert borrower.get(A, recompute_s_per_block=1.0) == 20
        assert borrower.loop.time() - began < 0.8
        borrower.tending.cancel()  # type: ignore[attr-defined]
        with contextlib.suppress(asyncio.CancelledError):
            borrower.loop.run_until_complete(borrower.tending)  # type: ignore[attr-defined]
        borrower.run(peers.close())


def dies_after(link: DirectLink, reads: int) -> None:
    """Let a host end when it has given so many windows."""
    ask, given, begun = link.read, list[int](), list[int]()

    async def asked(*args: Any, **more: Any) -> DirectIncoming:
        incoming = await ask(*args, **more)
        fill, number = incoming.fill, len(begun)
        begun.append(number)

        async def filled(targets: Sequence[memoryview | None]) -> None:
            if number < reads:
                await fill(targets)
                given.append(number)
                return
            await until(lambda: len(given) == reads)
            link.faults.dead = True
            await incoming.close()
            raise PeerGone("it was killed")

        incoming.fill = filled  # type: ignore[method-assign]
        return incoming

    link.read = asked  # type: ignore[method-assign]


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of four blocks."""
    monkeypatch.setattr(PeerListing, "start_window_nbytes", 4 * block_nbytes(SPEC, fine=False))


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("given", [0, 1, 4])
def test_what_a_host_that_dies_did_not_give_the_next_one_gives(three: Three, given: int) -> None:
    three.be(TWO, zone="rack-2")
    for lender in three.lenders.values():
        lender.put(A)
    dies_after(three.links[ONE], given)
    assert three.borrower.get(A, request_id="r") == 20
    assert three.links[TWO].reads == 5 - given
    outcome = three.outcome()  # the last window makes it a hit
    assert (outcome.peer, outcome.peer_blocks, outcome.ending) == (TWO.node, 20, None)


@pytest.mark.usefixtures("small_windows")
def test_the_host_that_gave_is_named_and_why_the_other_one_did_not(three: Three) -> None:
    three.lenders[ONE].put(A)
    three.lenders[TWO].put(A, 0, 10)
    three.links[ONE].faults.flips = True
    assert three.borrower.get(A, request_id="r") == 10
    outcome = three.outcome()
    assert (outcome.peer, outcome.peer_blocks) == (TWO.node, 10)
    assert outcome.ending is not None
    assert outcome.ending.reason is Reason.PEER_CORRUPT
