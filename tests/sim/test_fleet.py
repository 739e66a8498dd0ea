"""A few seeds with several stores; and each check can fail: the product is broken on purpose."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest

from kvstore.membership.registration import Registration
from kvstore.model.member import NodeId
from kvstore.move.deletions import Watch
from kvstore.move.peers import Peer, Peers
from kvstore.move.sources import Brought, Sources
from kvstore.move.tenant_peers import TenantPeers
from kvstore.store.fleet_deletes import KeptDeletes
from kvstore.store.lender import StoreLender, StoreLoan
from kvstore.tier.file.durability import Durability
from tests.sim.fleet import world
from tests.sim.fleet.link import SimIncoming
from tests.sim.fleet.network import Weather
from tests.sim.fleet.world import run_fleet_seed
from tests.sim.run import stores_of

SHORT_S = 12.0  # of a control's fleets
SEEDS_MAX = 12  # of a control: the first that finds it is enough


def test_a_seed_keeps_every_promise_and_takes_the_same_course_again() -> None:
    outcome = run_fleet_seed(2, 3)
    assert outcome.violations == [], "again: python -m tests.sim.run --seed 2 --stores 3"
    assert outcome.copies > 20, "hosts read from each other"
    assert run_fleet_seed(2, 3) == outcome


def test_a_seed_with_more_hosts_keeps_them_too() -> None:
    again = "again: python -m tests.sim.run --seed 4 --stores 4"
    assert run_fleet_seed(4, 4).violations == [], again


def test_a_thousand_seeds_have_one_store_and_each_number_from_three_to_eight() -> None:
    assert {stores_of(seed) for seed in range(200)} == {1, *range(3, 9)}


def _found(kind: str, words: str = "", *, first: int = 0) -> bool:
    with patch.object(world, "LIFE_S", SHORT_S):
        return any(
            text.startswith(f"{kind}:") and words in text
            for seed in range(first, first + SEEDS_MAX)
            for text in run_fleet_seed(seed, 3).violations
        )


def test_flipped_bits_that_nobody_verifies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimIncoming, "verifies", False)
    monkeypatch.setattr(Weather, "drawn", lambda _: Weather(flipped=0.2))
    assert _found("wrong", "other bytes than were put")


def test_a_delete_that_skips_a_member_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    delete = TenantPeers._delete_at

    async def skips(self: TenantPeers, peer: Peer, *what: Any) -> Any:
        if peer.member.node != NodeId(f"{1:032x}"):
            return await delete(self, peer, *what)
        return self.source(peer).open_link()

    monkeypatch.setattr(TenantPeers, "_delete_at", skips)
    assert _found("resurrected", "in the whole fleet")


def test_a_host_that_was_away_and_does_not_apply_what_is_kept_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(*_: object) -> None:
        """Read what is kept, and apply none of it."""

    monkeypatch.setattr(KeptDeletes, "_apply_all", nothing)
    assert _found("resurrected", "in the whole fleet")


def test_a_copy_that_comes_while_it_is_deleted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "deleted", lambda *_: None)  # no fetch is told of a delete
    monkeypatch.setattr(Weather, "drawn", lambda _: Weather(late_orders=0.7))
    assert _found("resurrected", first=12)  # the second of them


def test_a_sync_that_lies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sync(self: Durability, extents: object = ()) -> None:
        """Say that all is durable."""

    monkeypatch.setattr(Durability, "sync", sync)
    assert _found("lost")


@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        (StoreLoan, "release", "leases"),
        (Peer, "close", "links"),
    ],
)
def test_what_is_left_behind_is_found(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, words: str
) -> None:
    async def nothing(*_: object) -> None:
        """Do not let go."""

    forgets = (lambda *_: None) if where is StoreLoan else nothing
    if where is StoreLoan:
        monkeypatch.setattr(StoreLoan, "held", lambda _: True)
    monkeypatch.setattr(where, name, forgets)
    assert _found("leaked", words)


def test_an_error_without_a_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def match(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(StoreLender, "match", match)
    assert _found("bug", "a bug")


def test_a_second_daemon_that_gets_the_node_id_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Registration._make

    async def takes(self: Registration, own: Any, lease: int) -> Any:
        owner = await make(self, own, lease)
        return None if owner is not None and own.address.startswith("10.0.9.") else owner

    monkeypatch.setattr(Registration, "_make", takes)
    assert _found("bug", "not refused")


def test_a_call_without_an_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.move.tenant_peers.DELETE_S", 20.0)  # longer than the fleet allows
    monkeypatch.setattr(Weather, "drawn", lambda _: Weather(lost=0.3))
    assert _found("hung", "a fleet's delete took", first=36)


def test_a_peer_that_is_not_dialled_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "_is_due", lambda self, peer: peer.link is None and not peer.rtt_s)
    assert _found("hung", "does not use")


def test_a_host_that_nobody_finds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def promote(*_: object) -> Any:
        await asyncio.sleep(0)
        return Brought()

    monkeypatch.setattr(Sources, "promote", promote)
    assert _found("hung", "at rest a host finds 0")
