"""What goes wrong between two real daemons costs misses: never wrong bytes, a wait beyond what
computing takes, or a lease that nobody holds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from kvstore import Client
from kvstore.model.outcome import Reason
from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_ports
from kvstore.testing.relay import Relay, relay_to
from tests.cluster.fleet import member_settings, met, peers_of, wait_for
from tests.cluster.test_two_daemons import KEYS, clear, hit, put

PACE_S = 0.01  # of computing a block
WORST = 2.0  # of what computing takes; these machines stand still now and then


@dataclass
class Pair:
    lender: Daemon
    borrower: Daemon
    relay: Relay


@pytest.fixture
def delay_s() -> float:
    """How long it takes from one host to the other."""
    return 0.0


@pytest.fixture
def pair(delay_s: float) -> Iterator[Pair]:
    behind, borrowing = free_ports(2)
    with ExitStack() as stack:
        relay = stack.enter_context(relay_to(behind))
        relay.delay_s = delay_s
        lender = stack.enter_context(
            Daemon(*member_settings(behind, [borrowing]), f"cluster.address=127.0.0.1:{relay.port}")
        )
        borrower = stack.enter_context(Daemon(*member_settings(borrowing, [relay.port])))
        lender.start()
        borrower.start()
        wait_for(lambda: met(borrower))
        put(lender)
        yield Pair(lender, borrower, relay)


def raced(pair: Pair, request_id: str = "raced") -> int:
    """Ask as an engine that can compute; return the hit. Waiting and computing take no longer than
    computing alone, but for a little."""
    began = time.monotonic()
    found = hit(pair.borrower, recompute_s_per_block=PACE_S, request_id=request_id)
    took_s = time.monotonic() - began + (len(KEYS) - found) * PACE_S
    assert took_s <= WORST * len(KEYS) * PACE_S
    return found


def ending(daemon: Daemon, request_id: str = "raced") -> Reason | None:
    with Client(daemon.target) as client:
        (outcome,) = client.admin.outcomes(request_id)
        return outcome.ending.reason if outcome.ending is not None else None


def nothing_leaked(*daemons: Daemon) -> bool:
    for each in daemons:
        with Client(each.target) as client:
            stats = client.admin.stats()
            if stats["leases"] or stats["dram"].get("limbo_bytes", 0):
                return False
    return True


def flips(relay: Relay) -> None:
    relay.after, relay.flip = 1 << 20, True


def cuts(relay: Relay) -> None:
    relay.after, relay.cut = 1 << 20, True


def stalls(relay: Relay) -> None:
    relay.after, relay.stall = 1 << 20, True


def crawls(relay: Relay) -> None:
    relay.bytes_per_s = 1 << 20


@pytest.mark.parametrize("fault", [flips, cuts, stalls, crawls])
def test_a_link_that_harms_costs_a_miss(pair: Pair, fault: Callable[[Relay], None]) -> None:
    fault(pair.relay)
    assert raced(pair) < len(KEYS)
    assert ending(pair.borrower) in {
        Reason.PEER_CORRUPT,
        Reason.PEER_GONE,
        Reason.PEER_SLOW,
        Reason.SLOWER,
    }
    pair.relay.flip = pair.relay.cut = pair.relay.stall = False
    pair.relay.bytes_per_s = 0
    wait_for(lambda: nothing_leaked(pair.lender, pair.borrower))
    wait_for(lambda: met(pair.borrower))
    assert hit(pair.borrower) == len(KEYS)  # once it works, and is not asked to be faster


@pytest.mark.parametrize("delay_s", [0.04])
def test_a_host_that_is_far_away_is_asked(pair: Pair) -> None:
    wait_for(lambda: peers_of(pair.borrower)[0]["round_trip_s"])
    assert hit(pair.borrower, request_id="far") == len(KEYS)
    (peer,) = peers_of(pair.borrower)
    assert isinstance(peer["round_trip_s"], float)
    assert peer["round_trip_s"] > 0.08
    assert peer["last_error"] == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lender_that_ends_or_stops_while_it_lends(pair: Pair, number: signal.Signals) -> None:
    pair.relay.bytes_per_s = 20 << 20  # so that it is under way then
    strike = threading.Timer(0.15, os.kill, (pair.lender.pid, number))
    strike.start()
    try:
        raced(pair)
        wait_for(lambda: nothing_leaked(pair.borrower))
        assert hit(pair.borrower, recompute_s_per_block=PACE_S) <= len(KEYS)
    finally:
        strike.join()
        if number == signal.SIGSTOP:
            os.kill(pair.lender.pid, signal.SIGCONT)


def test_who_is_wrong_again_and_again_is_not_asked(pair: Pair) -> None:
    pair.relay.flip_every = 2 << 20
    for _ in range(3):
        assert hit(pair.borrower) < len(KEYS)
        clear(pair.borrower)
    assert peers_of(pair.borrower)[0]["state"] == "quarantined"
    assert hit(pair.lender) == len(KEYS)


def test_two_daemons_with_one_node_id(pair: Pair) -> None:
    node = (pair.lender.directory / "file" / "node_id").read_text()
    (port,) = free_ports(1)
    with Daemon(*member_settings(port, [pair.relay.port])) as copy:
        (copy.directory / "file").mkdir()
        (copy.directory / "file" / "node_id").write_text(node)
        with pytest.raises(RuntimeError, match="has the node id"):
            copy.start()
