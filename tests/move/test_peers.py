"""Hosts that lend to each other: one reads what another has stored, and nothing wrong counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.metrics import Metrics
from kvstore.model.errors import Unavailable
from kvstore.model.member import Member, NodeId, Origin
from kvstore.model.outcome import Reason
from kvstore.move.peer_heads import PeerHeads
from kvstore.move.peers import Peer, Peers
from kvstore.peer.base import HeadsReply, PeerGone
from kvstore.testing.lender import MemoryLender
from kvstore.testing.peer_link import until
from tests.peer.fleet import BORROWER, INSTANCES, ourselves, served
from tests.peer.fleet import LENDER as LENDING
from tests.store.node import FULL, SPEC, WINDOW, Node, chain
from tests.store.peers import DirectLink, Faults, joined, member

A, B = chain(1), chain(2)
LENDER = member(1, engines=("10.0.0.1:8000",))


@dataclass
class Pair:
    lender: Node
    borrower: Node
    peers: Peers
    link: DirectLink


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with Node(tmp_path / "1") as one, Node(tmp_path / "2", beside=one) as two:
        peers, links = joined(two, {LENDER: one})
        yield Pair(one, two, peers, links[LENDER.node])
        two.tending.cancel()  # type: ignore[attr-defined]
        with contextlib.suppress(asyncio.CancelledError):
            two.loop.run_until_complete(two.tending)  # type: ignore[attr-defined]
        two.run(peers.close())


def test_what_one_host_stored_another_reads(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    assert pair.borrower.get(A) == 20
    hits = pair.borrower.metrics.totals()["hit_blocks"]
    assert (hits["dram"], hits["peer"]) == (0, 20)
    assert pair.borrower.get(A) == 20  # of its own now
    assert pair.borrower.metrics.totals()["hit_blocks"]["dram"] == 20
    assert pair.lender.store.report.stats()["leases"] == 0


def test_slots_that_may_still_be_written_into_are_not_given_back(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    two = pair.borrower
    pair.link.faults.stuck = stuck = two.loop.create_future()
    assert two.get(A) == 0
    used = two.store.arena.physical_nbytes
    assert used > 0
    leases = two.store._leases
    for lease in leases._sessions[DAEMON_SESSION].leases.values():
        lease.deadline = 0.0
    leases.expire()
    assert leases.limbo_bytes == used
    pair.link.faults.stuck = None
    assert two.get(A) == 20  # into other slots
    assert leases.limbo_bytes == used
    two.loop.call_soon(stuck.set_result, False)
    two.until(lambda: not leases.limbo_bytes)
    assert two.store.arena.physical_nbytes < 2 * used


def test_only_what_is_missing_is_read(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    pair.borrower.put(A, 0, 12)
    assert pair.borrower.get(A) == 20
    hits = pair.borrower.metrics.totals()["hit_blocks"]
    assert (hits["dram"], hits["peer"]) == (12, 8)


def test_what_lies_in_files_is_read_from_there(pair: Pair) -> None:
    pair.lender.put(A, 0, 20, durable=True)
    for name in range(3, 30):  # it leaves the arena
        pair.lender.put(chain(name), 0, 20, durable=True)
    before = pair.lender.planner.match(SPEC.id, A)
    assert before.hit_blocks == 20 > before.resident_blocks
    assert pair.borrower.get(A) == 20
    assert pair.lender.planner.match(SPEC.id, A).resident_blocks == before.resident_blocks


def test_a_request_that_names_its_source_asks_it(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    for source in (LENDER.node, LENDER.engines[0]):
        assert pair.borrower.get(A, origin=Origin(source)) == 20


def test_nothing_is_borrowed_from_a_member_that_may_have_missed_deletes(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    (tenant,) = pair.peers.tenants
    tenant.doubtful = lambda: {LENDER.node}
    assert pair.borrower.get(A) == 0
    assert pair.borrower.get(A, origin=Origin(LENDER.engines[0])) == 0
    tenant.doubtful = tuple
    assert pair.borrower.get(A) == 20


def test_a_source_of_no_member_is_not_asked(pair: Pair) -> None:

    async def they_left() -> None:
        pair.peers.know({})

    pair.borrower.run(they_left())
    assert pair.borrower.get(A, origin=Origin("10.9.9.9:22")) == 0
    assert pair.borrower.metrics.totals()["peer_refused"] == {"unknown": 1}


def test_a_prefix_still_being_computed_is_waited_for(pair: Pair) -> None:
    pair.lender.put(A, 0, 4)
    two = pair.borrower
    acquiring = two.loop.create_task(
        two.store.gets.acquire(
            DAEMON_SESSION, SPEC.id, A, wait_s=10.0, origin=Origin(LENDER.node, 20)
        )
    )
    two.run(asyncio.sleep(0.05))
    assert not acquiring.done()
    pair.lender.put(A, 4, 20)
    grant = two.run(asyncio.wait_for(acquiring, 10))
    assert grant.hit_blocks == 20
    two.store.release(DAEMON_SESSION, [grant.lease_id])


def test_who_could_compute_waits_for_an_engine_that_is_computing(pair: Pair) -> None:
    pair.lender.put(A, 0, 4)
    two = pair.borrower
    acquiring = two.loop.create_task(
        two.store.gets.acquire(
            DAEMON_SESSION,
            SPEC.id,
            A,
            wait_s=10.0,
            origin=Origin(LENDER.node, 20),
            recompute_s_per_block=0.4,  # what is not there yet: 6.4 s. Patience with a load: 0.6
        )
    )
    two.run(asyncio.sleep(1.0))
    assert not acquiring.done()
    pair.lender.put(A, 4, 20)
    grant = two.run(asyncio.wait_for(acquiring, 10))
    assert grant.hit_blocks == 20
    two.store.release(DAEMON_SESSION, [grant.lease_id])
    (tenant,), (peer,) = pair.peers.tenants, pair.peers
    nbytes = pair.borrower.metrics.totals()["peer_bytes"]["borrowed"]
    assert (
        tenant.source(peer).races.pace.predict(int(nbytes)) is None
    )  # nothing of it was the link's


def test_a_prefix_that_does_not_come_is_a_shorter_hit(pair: Pair) -> None:
    pair.lender.put(A, 0, 8)
    assert pair.borrower.get(A, wait_s=0.3, origin=Origin(LENDER.node, 20)) <= 8
    assert not pair.lender.store._node.arrivals._waiting


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"flips": True}, Reason.PEER_CORRUPT),
        ({"lets_go": True}, Reason.PEER_GONE),
        ({"boasts": 9}, Reason.PEER_GONE),
    ],
)
def test_nothing_wrong_counts(pair: Pair, fault: dict[str, int], reason: Reason) -> None:
    pair.lender.put(A, 0, 15)
    for name, value in fault.items():
        setattr(pair.link.faults, name, value)
    assert pair.borrower.get(A, request_id="r") < 20  # `get` looks at every byte
    (outcome,) = pair.borrower.store.report.outcomes("r", 1)
    assert outcome.ending is not None
    assert outcome.ending.reason == reason
    assert outcome.peer == LENDER.node


def test_who_sends_wrong_bytes_is_told_and_then_not_asked(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    pair.link.faults.flips = True
    for _ in range(3):
        assert pair.borrower.get(A) == 0
    assert set(pair.link.reported) <= set(A[:20])
    assert pair.link.reported
    asked = pair.link.matches
    assert pair.borrower.get(A) == 0
    assert pair.link.matches == asked
    assert pair.peers.stats()[0]["state"] == "quarantined"
    assert pair.lender.get(A) == 20  # its own copies are right


def test_a_dead_host_costs_nothing(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    pair.link.faults.dead = True
    assert pair.borrower.get(A) == 0
    pair.link.faults.dead = False
    pair.borrower.until(lambda: all(peer.usable for peer in pair.peers))
    assert pair.borrower.get(A) == 20


def test_who_computes_faster_than_the_host_answers_does_not_wait_for_it(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    pair.link.faults.delay_s = 0.2
    began = pair.borrower.loop.time()
    assert pair.borrower.get(A, recompute_s_per_block=0.01) < 20
    assert pair.borrower.loop.time() - began < 0.15


@pytest.mark.parametrize(
    ("distance_s", "wait_s", "reach"),
    [(0.1, 5.0, 20), (0.1, 0.1, 0), (0.0, 5.0, 0)],
    ids=["far", "no-time", "hangs"],
)
def test_a_host_far_away_has_the_time_to_say_how_far_it_reaches(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, distance_s: float, wait_s: float, reach: int
) -> None:
    monkeypatch.setattr(Peer, "distance_s", distance_s)
    pair.lender.put(A, 0, 20)
    pair.link.faults.delay_s = 0.2
    began = pair.borrower.loop.time()
    asking = pair.borrower.store.elsewhere(
        SPEC, A, 0, recompute_s_per_block=0.0, refined=False, wait_s=wait_s
    )
    assert pair.borrower.run(asking) == reach
    took_s = pair.borrower.loop.time() - began
    assert (took_s >= 0.2) == bool(reach)


def test_what_is_deleted_on_its_way_does_not_arrive(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    pair.link.faults.delay_s = 0.03
    two = pair.borrower
    acquiring = two.loop.create_task(two.store.gets.acquire(DAEMON_SESSION, SPEC.id, A, wait_s=5.0))
    two.until(lambda: pair.link.reads > 0)
    two.run(two.store.deletes.delete(SPEC.id, A[3:4]))
    grant = two.run(asyncio.wait_for(acquiring, 10))
    two.store.release(DAEMON_SESSION, [grant.lease_id])
    assert two.planner.index.get(SPEC.id, A[3]) is None


def test_blocks_of_a_window_group_come_as_a_resume_needs_them(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    pair.borrower.get(A)
    blocks = [pair.borrower.planner.index.by_key(key) for key in A[:20]]
    assert all(block is not None and block.record(FULL) for block in blocks)
    first = SPEC.groups[WINDOW.group].blocks_needed(20, SPEC.block_tokens).start
    has_window = [block.record(WINDOW) is not None for block in blocks if block is not None]
    assert has_window == [False] * first + [True] * (20 - first)


def test_a_delete_reaches_every_host(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    assert pair.borrower.get(A) == 20
    two = pair.borrower
    assert two.run(two.store.deletes.delete_everywhere(SPEC.id, A[4:5])) == 1
    assert pair.lender.planner.index.get(SPEC.id, A[4]) is None
    assert two.get(A) <= 4
    assert two.run(two.store.deletes.clear_everywhere(None)) > 0
    assert pair.lender.planner.match(SPEC.id, A).hit_blocks == 0


def test_heads_are_followed_over_the_next_link_at_once(pair: Pair) -> None:
    async def lost(*_: object, **more: object) -> HeadsReply:
        pair.link.faults.dead = True  # open no more
        raise PeerGone("the link has ended")

    pair.lender.put(A, 0, 20)
    node = LENDER.node
    old = DirectLink(LENDER, pair.lender.store.lender(LENDER.instance), Faults())
    old.heads = pair.link.heads = lost  # type: ignore[method-assign]
    two, heads = pair.borrower, PeerHeads(1 << 20, pair.borrower.loop.time)

    async def follow(link: DirectLink) -> None:
        heads.follow(node, link)
        await asyncio.sleep(0.01)

    two.run(follow(pair.link))
    assert heads.age_s(node) is None
    del old.heads  # type: ignore[attr-defined]
    two.run(follow(old))
    two.until(lambda: heads.age_s(node) is not None)
    two.run(heads.close())


def test_what_was_deleted_does_not_come_back_from_a_host_that_computes_it_again(
    pair: Pair,
) -> None:
    pair.lender.put(A, 0, 20)
    two = pair.borrower
    two.run(two.store.deletes.delete_everywhere(SPEC.id, A[:20]))
    pair.lender.put(A, 0, 20)
    assert two.get(A) == 0  # for now: a host that had not been told yet would look the same


def test_a_deleted_block_keeps_only_what_is_behind_it_from_coming(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    two = pair.borrower
    two.run(two.store.deletes.delete_everywhere(SPEC.id, A[12:13]))
    pair.lender.put(A, 0, 20)  # it is computed again
    assert two.get(A) == 12
    for key in A[12:20]:
        assert two.planner.index.get(SPEC.id, key) is None


def test_what_is_being_deleted_does_not_come_from_a_host_that_is_told_last(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    two, told = pair.borrower, pair.link.delete

    async def late(*args: Any, **more: Any) -> None:
        await asyncio.sleep(0.3)
        await told(*args, **more)

    pair.link.delete = late  # type: ignore[method-assign]
    deleting = two.loop.create_task(two.store.deletes.delete_everywhere(SPEC.id, A[:20]))
    two.run(asyncio.sleep(0.1))
    assert two.get(A) == 0
    two.run(asyncio.wait_for(deleting, 10))
    assert two.get(A) == 0
    assert two.planner.index.get(SPEC.id, A[0]) is None


def test_after_a_delete_of_everything_nothing_comes_in_a_namespace_that_was_not_known() -> None:
    with Node(None) as one, Node(None, beside=one, registers=False) as two:
        peers, _ = joined(two, {LENDER: one})
        one.put(A, 0, 20)
        two.run(two.store.lender(INSTANCES[BORROWER]).delete(None, None))
        two.store.namespaces.register(SPEC)  # its engine starts
        assert two.get(A) == 0  # the other host is told last
        one.run(one.store.lender(LENDER.instance).delete(None, None))
        assert two.planner.index.get(SPEC.id, A[0]) is None
        two.tending.cancel()  # type: ignore[attr-defined]
        with contextlib.suppress(asyncio.CancelledError):
            two.loop.run_until_complete(two.tending)  # type: ignore[attr-defined]
        two.run(peers.close())


def test_a_host_that_ends_after_it_confirmed_a_delete_has_not(pair: Pair) -> None:
    told = pair.link.delete

    async def then_dies(*args: Any, **more: Any) -> None:
        await told(*args, **more)
        pair.link.faults.dead = True  # its next start does not know what may not come back

    pair.link.delete = then_dies  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="not on 00000000"):
        pair.borrower.run(pair.borrower.store.deletes.delete_everywhere(SPEC.id, A[:1]))


def test_a_delete_that_a_host_did_not_confirm_says_which(pair: Pair) -> None:
    pair.lender.put(A, 0, 20)
    two = pair.borrower
    assert two.get(A) == 20
    pair.link.faults.dead = True
    with pytest.raises(Unavailable, match="deleted on 0 of 1 other daemons, not on 00000000"):
        two.run(two.store.deletes.delete_everywhere(SPEC.id, A[:1]))
    assert two.planner.index.get(SPEC.id, A[0]) is None


def test_garbage_that_nobody_waits_for_is_held_against_a_host() -> None:
    async def main() -> None:
        async with served(ourselves(LENDING), MemoryLender()) as found:
            metrics = Metrics()
            peers = Peers(
                lambda member, deadline: found.dial(ourselves(BORROWER)),
                BORROWER,
                metrics,
                time.monotonic,
            )
            peers.know({LENDING: member_of(LENDING)})
            running = asyncio.create_task(peers.run())
            (peer,) = peers
            for demerits in (1, 2):
                await until(lambda: peer.usable)
                found.server._borrowers[BORROWER][-1].link._transport.write(b"\xff" * 64)  # type: ignore[union-attr]
                await until(lambda wanted=demerits: peer.status()["demerits"] == wanted)
            assert metrics.totals()["peer_refused"] == {"garbage": 2}
            running.cancel()
            await peers.close()

    asyncio.run(main())


def member_of(node: NodeId) -> Member:
    return Member(node, INSTANCES[node], "127.0.0.1:1")


def test_many_peers_are_pinged_a_few_at_a_time_and_not_more_often_than_it_costs() -> None:
    """Of 100 hosts that were all linked at once; a virtual clock."""
    now, pings = [0.0], list[float]()

    class Answering:
        open, worn, fault, medium = True, False, None, "tcp"

        def __init__(self, told: Member) -> None:
            self.peer = told

        async def ping(self, deadline: float) -> float:
            pings.append(now[0])
            return 0.001

        async def close(self) -> None: ...

    async def dial(told: Member, deadline: float) -> Any:
        return Answering(told)

    members = {each.node: each for each in map(member, range(1, 101))}

    async def course() -> None:
        peers = Peers(dial, NodeId("f" * 32), Metrics(), lambda: now[0])
        peers.know(members)
        for _ in range(120 * 5):
            for node, peer in list(peers._peers.items()):
                peers._look_at(node, peer)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            now[0] += 0.2
        await peers.close()

    asyncio.run(course())
    late = [at for at in pings if at > 60]
    assert 20 < len(late) / 60 < 30  # a second
    assert max(late.count(at) for at in set(late)) <= 20  # of 100, at one moment
