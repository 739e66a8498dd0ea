"""A daemon that may not lend for a moment, as other hosts see it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from kvstore.model.block import Span
from kvstore.model.member import NodeId
from kvstore.peer.base import Loan, PeerBusy
from kvstore.store.lender import SOON_S, StoreLender
from kvstore.testing.samples import sample_keys
from tests.sim.loop import SimLoop
from tests.store.node import FULL, SPEC, Node

KEYS = sample_keys("prefix", 4)


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(None, loop=SimLoop(Random(1))) as node:
        node.store.namespaces.register(SPEC)
        yield node


def asked(node: Node, lender: StoreLender) -> tuple[bool, float]:
    """Ask how much it has; return whether it says busy, and after how long."""
    began = node.loop.time()
    match = node.run(lender.match(SPEC.id, KEYS, 0, False))
    return match.busy, node.loop.time() - began


def test_one_that_lends_again_at_once_costs_no_miss(node: Node) -> None:
    lender = node.store.lender("1" * 16)
    lends = [False]
    lender.may_lend = lambda: lends[0]
    node.loop.call_later(SOON_S / 2, lends.__setitem__, 0, True)
    busy, took_s = asked(node, lender)
    assert not busy
    assert SOON_S / 2 <= took_s < SOON_S


def test_one_that_does_not_lend_holds_up_only_who_asks_first(node: Node) -> None:
    lender = node.store.lender("1" * 16)
    lender.may_lend = lambda: False
    assert asked(node, lender) == (True, pytest.approx(SOON_S, abs=SOON_S / 4))
    assert asked(node, lender) == (True, 0.0)


def lend(node: Node, lender: StoreLender) -> Loan:
    spans = (Span(FULL, 0, len(KEYS)),)
    return node.run(lender.lend(SPEC.id, KEYS, spans, False, NodeId("2" * 32)))


def test_one_that_has_not_applied_deletes_lends_no_record(node: Node) -> None:
    """Who asks for records may have asked for the match before this daemon was registered anew."""
    node.put(KEYS, parts=(FULL,))
    lender, lends = node.store.lender("1" * 16), [False]
    lender.may_lend = lambda: lends[0]
    with pytest.raises(PeerBusy) as refusal:
        lend(node, lender)
    assert refusal.value.reason == "deletes"
    lends[0] = True
    loan = lend(node, lender)
    assert [record is not None and record.view is not None for record in loan.records] == [True] * 4
    loan.release()
