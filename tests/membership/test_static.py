"""Members by a list of addresses: who answers there is one, for as long as it is listed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.membership import LastMembers, Membership, asking
from kvstore.membership import static as driver
from kvstore.membership.static import StaticMembership
from kvstore.model.member import Member, NodeId
from kvstore.testing.membership import Answering, MembershipContract, Open, new_member, until
from kvstore.testing.ports import free_ports

SOON_S = 0.05


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask often: the tests wait for what a daemon learns in seconds."""
    monkeypatch.setattr(driver, "RESOLVE_EVERY_S", SOON_S)
    for name in ("ASK_EVERY_S", "ASK_AGAIN_S"):
        monkeypatch.setattr(asking, name, SOON_S)


class TestContract(MembershipContract):
    forgets = False

    @asynccontextmanager
    async def fleet(self, addresses: Iterable[str], answering: Answering) -> AsyncIterator[Open]:
        listed = list(addresses)

        def opened(member: Member, directory: Path) -> Membership:
            last = LastMembers(directory, "default")
            return StaticMembership(listed, hello=answering.hello, last=last)

        yield opened


class Names:
    """A resolver whose answers the test gives; None: it does not know the name."""

    def __init__(self, *ips: str) -> None:
        self.ips: list[str] | None = list(ips)
        self.wait_s = 0.0

    def __call__(self, host: str, port: int) -> list[str]:
        time.sleep(self.wait_s)  # where a real one blocks
        if self.ips is None:
            raise OSError("no such name")
        return self.ips


def run(test: Callable[[Answering], Awaitable[None]]) -> None:
    async def main() -> None:
        answering = Answering()
        try:
            await test(answering)
        finally:
            await answering.close()

    asyncio.run(main())


def port() -> int:
    (found,) = free_ports(1)
    return found


def test_a_name_stands_for_all_its_addresses() -> None:
    async def test(answering: Answering) -> None:
        names, at = Names("127.0.0.1", "127.0.0.2"), port()
        first, second, third = [new_member(f"127.0.0.{host}:{at}") for host in (1, 2, 3)]
        for each in (first, second, third):
            await answering.up(each)
        one = StaticMembership([f"dns:fleet:{at}"], hello=answering.hello, resolve=names)
        await one.join(first)
        try:
            assert dict(one.members()) == {second.node: second}
            names.ips = ["127.0.0.1", "127.0.0.3"]
            await until(lambda: dict(one.members()) == {third.node: third})
        finally:
            await one.leave()

    run(test)


def test_a_resolver_that_fails_loses_no_member() -> None:
    async def test(answering: Answering) -> None:
        names, at = Names("127.0.0.1", "127.0.0.2"), port()
        first, second = [new_member(f"127.0.0.{host}:{at}") for host in (1, 2)]
        await answering.up(second)
        one = StaticMembership([f"dns:fleet:{at}"], hello=answering.hello, resolve=names)
        await one.join(first)
        try:
            names.ips = None
            await until(lambda: one.away_s is not None)
            assert "fleet" in one.stats()["error"]
            assert second.node in one.members()
            names.ips = ["127.0.0.2"]
            await until(lambda: one.away_s is None)
            assert second.node in one.members()
        finally:
            await one.leave()

    run(test)


def test_a_resolver_that_hangs_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.membership.addresses.RESOLVE_S", SOON_S)

    async def test(answering: Answering) -> None:
        names, at = Names("127.0.0.2"), port()
        names.wait_s = 0.5
        second = new_member(f"127.0.0.2:{at}")
        await answering.up(second)
        one = StaticMembership([f"dns:fleet:{at}"], hello=answering.hello, resolve=names)
        began = time.monotonic()
        await one.join(new_member(f"127.0.0.1:{at}"))
        assert time.monotonic() - began < 0.4
        try:
            assert one.away_s is not None
            await until(one.members)
            await until(lambda: one.away_s is None)
        finally:
            await one.leave()

    run(test)


def test_what_answers_nothing_or_rubbish_is_no_member() -> None:
    async def test(answering: Answering) -> None:
        good, silent, rubbish = [f"127.0.0.1:{each}" for each in free_ports(3)]

        async def say_rubbish(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'{"node": "../../etc/passwd"}')
            writer.close()

        server = await asyncio.start_server(say_rubbish, *rubbish.split(":"))
        member = new_member(good)
        await answering.up(member)
        one = StaticMembership([good, silent, rubbish], hello=answering.hello)
        await one.join(new_member("127.0.0.1:1"))
        try:
            assert list(one.members()) == [member.node]
            assert one.stats()["silent"] == one.stats()["unknown"] == sorted([silent, rubbish])
            errors = one.stats()["errors"]
            assert list(errors) == sorted([silent, rubbish])
            assert "Connect call failed" in errors[silent]
            assert "no entry of a member" in errors[rubbish]
            await answering.up(new_member(silent))
            await until(lambda: list(one.stats()["errors"]) == [rubbish])
        finally:
            await one.leave()
            server.close()

    run(test)


def test_nobody_waits_for_an_address_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "FIRST_ROUND_S", 0.2)
    monkeypatch.setattr(asking, "ASKED_AT_ONCE", 2)

    async def test(answering: Answering) -> None:
        asked: list[str] = []

        async def hello(address: str) -> Member:
            asked.append(address)
            await asyncio.sleep(3600)
            raise AssertionError

        one = StaticMembership([f"10.0.0.{each}:7702" for each in range(1, 9)], hello=hello)
        began = time.monotonic()
        await one.join(new_member("127.0.0.1:1"))
        assert time.monotonic() - began < 1.5
        assert len(asked) == 2
        await one.leave()

    run(test)


def test_the_list_may_name_this_daemon_by_another_address() -> None:
    async def test(answering: Answering) -> None:
        at = port()
        own = new_member(f"host-1:{at}")
        other = f"127.0.0.2:{at}"
        await answering.up(replace(own, address=other))
        one = StaticMembership([other], hello=answering.hello)
        await one.join(own)
        assert not one.members()
        assert not one.stats()["error"]
        await one.leave()

    run(test)


def test_of_two_others_with_a_node_id_one_is_refused_by_name() -> None:
    async def test(answering: Answering) -> None:
        addresses = [f"127.0.0.1:{each}" for each in free_ports(2)]
        first = new_member(addresses[0])
        double = replace(first, address=addresses[1], instance=secrets.token_hex(8))
        for each in (first, double):
            await answering.up(each)
        one = StaticMembership(addresses, hello=answering.hello)
        await one.join(new_member("127.0.0.1:1"))
        try:
            assert len(one.members()) == 1
            (member,) = one.members().values()
            refused = double if member == first else first
            assert f"{refused.node} at {refused.address}" in one.stats()["error"]
            await answering.down(member.address)  # it was moved to the other host
            await until(lambda: one.members()[first.node] == refused)
            assert not one.stats()["error"]
        finally:
            await one.leave()

    run(test)


def test_members_of_an_earlier_start_are_known_before_they_answer(tmp_path: Path) -> None:
    async def test(answering: Answering) -> None:
        listed, other = [f"127.0.0.1:{each}" for each in free_ports(2)]
        member, removed = new_member(listed), new_member(other)
        LastMembers(tmp_path, "default").write([member, removed])
        one = StaticMembership(
            [listed], hello=answering.hello, last=LastMembers(tmp_path, "default")
        )
        await one.join(new_member("127.0.0.1:1"))
        assert dict(one.members()) == {member.node: member}
        await one.leave()

    run(test)


def test_the_members_are_kept_for_the_next_start(tmp_path: Path) -> None:
    async def test(answering: Answering) -> None:
        member = new_member(f"127.0.0.1:{port()}")
        await answering.up(member)
        last = LastMembers(tmp_path, "default")
        one = StaticMembership([member.address], hello=answering.hello, last=last)
        await one.join(new_member("127.0.0.1:1", node=NodeId("0" * 32)))
        await one.leave()
        assert last.read() == [member]

    run(test)
