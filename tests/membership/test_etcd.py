"""Members by a real etcd that is killed, paused, emptied, asks for passwords, loses its leader."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.membership import LastMembers, Membership, NodeIdTaken, encode_member
from kvstore.membership.etcd import EtcdMembership
from kvstore.model.errors import ConfigError, Unavailable
from kvstore.model.member import Member, State
from kvstore.model.tenant import NO_TENANT_ID
from kvstore.settings import ClusterSettings
from kvstore.store.fleet_deletes import KeptDeletes
from kvstore.testing.etcd import INSTALL, Etcd, has_etcd
from kvstore.testing.membership import Answering, MembershipContract, Open, new_member, until
from kvstore.testing.ports import free_ports
from tests.store.node import SPEC, Node, chain
from tests.tls import Authority

if not has_etcd():
    pytest.skip(INSTALL, allow_module_level=True)

TTL_S = 2
A = chain(1, 16)
KEPT_S = TTL_S + 1.0  # for which a test looks whether members stay
PREFIX = "/kvstore/v1/{fleet}/nodes/"


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    """An etcd that tests share; each has a fleet of its own, and lets it run."""
    with Etcd() as etcd:
        yield etcd.start()


def settings(etcd: Etcd, **changes: Any) -> ClusterSettings:
    return ClusterSettings(
        **{
            "membership": "etcd",
            "etcd": etcd.endpoints,
            "etcd_ttl_s": float(TTL_S),
            "fleet": "f-" + secrets.token_hex(4),
            **changes,
        }
    )


async def crash(one: EtcdMembership) -> None:
    """End a daemon: its key stays until it expires."""
    for task in one._tasks:
        task.cancel()
    await asyncio.gather(*one._tasks, return_exceptions=True)
    await one._calls.close()


class TestContract(MembershipContract):
    @pytest.fixture(autouse=True)
    def _etcd(self, etcd: Etcd) -> None:
        self.etcd = etcd

    @asynccontextmanager
    async def fleet(self, addresses: Iterable[str], answering: Answering) -> AsyncIterator[Open]:
        shared = settings(self.etcd)

        def opened(member: Member, directory: Path) -> Membership:
            return EtcdMembership(
                shared, ping=answering.ping, last=LastMembers(directory, shared.fleet)
            )

        yield opened

    async def crash(self, one: Membership) -> None:
        assert isinstance(one, EtcdMembership)
        await crash(one)


class Fleet:
    """Daemons with one etcd. Each answers at its address."""

    def __init__(self, shared: ClusterSettings, count: int = 3) -> None:
        self.settings = shared
        self.answering = Answering()
        self.members = [new_member(f"127.0.0.1:{port}") for port in free_ports(count)]
        self.joined: list[EtcdMembership] = []

    def open(self, last: LastMembers | None = None) -> EtcdMembership:
        return EtcdMembership(self.settings, ping=self.answering.ping, last=last)

    async def start(self) -> None:
        for member in self.members:
            await self.answering.up(member)
            self.joined.append(self.open())
            await self.joined[-1].join(member)
        await until(self.whole)

    def whole(self) -> bool:
        """Whether every daemon knows every other one."""
        nodes = {member.node for member in self.members}
        return all({*one.members(), own.node} == nodes for one, own in self._pairs())

    def registered(self) -> bool:
        """Whether etcd knows all, and nobody is there for its answers alone."""
        return all(one.away_s is None and not one.stats()["held"] for one in self.joined)

    def _pairs(self) -> list[tuple[EtcdMembership, Member]]:
        return list(zip(self.joined, self.members, strict=True))

    async def stays_whole(self, for_s: float) -> None:
        until_ = time.monotonic() + for_s
        while time.monotonic() < until_:
            assert self.whole()
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for one in self.joined:
            await one.leave()
        await self.answering.close()


def run(
    fleet: Fleet,
    test: Callable[[], Awaitable[None]],
    runs: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> None:
    async def main() -> None:
        try:
            await fleet.start()
            await test()
        finally:
            await fleet.stop()

    runs(main())


def test_a_daemon_that_dies_is_gone_after_its_ttl(etcd: Etcd) -> None:
    fleet = Fleet(settings(etcd))

    async def test() -> None:
        await asyncio.sleep(TTL_S + 0.5)  # longer than the doubt after a start
        one, member = fleet.joined.pop(), fleet.members.pop()
        await crash(one)  # though its address answers: etcd was never away, so its word counts
        assert not fleet.whole()
        await until(fleet.whole, 3 * TTL_S)
        await fleet.stays_whole(0.5)
        assert all(member.node not in each.members() for each in fleet.joined)

    run(fleet, test)


def test_an_etcd_that_is_paused_loses_no_member() -> None:
    with Etcd() as own:
        fleet = Fleet(settings(own.start()))

        async def test() -> None:
            own.pause()
            await fleet.stays_whole(KEPT_S)
            assert all(one.away_s is not None for one in fleet.joined)
            own.resume()
            await until(fleet.registered)
            await fleet.stays_whole(KEPT_S)

        run(fleet, test)


@pytest.mark.parametrize("emptied", [False, True], ids=["with-its-data", "emptied"])
def test_an_etcd_that_is_killed_and_restarted_loses_no_member(emptied: bool) -> None:
    with Etcd() as own:
        fleet = Fleet(settings(own.start()))

        async def test() -> None:
            own.kill()
            await until(lambda: all(one.away_s is not None for one in fleet.joined))
            if emptied:
                own.empty()
            await asyncio.to_thread(own.start)
            await until(fleet.registered)
            await fleet.stays_whole(KEPT_S)
            prefix = PREFIX.format(fleet=fleet.settings.fleet)
            keys = await asyncio.to_thread(own.values, prefix)
            assert set(keys) == {prefix + member.node for member in fleet.members}

        run(fleet, test)


def test_who_dies_while_etcd_is_away_does_not_stay() -> None:
    with Etcd() as own:
        fleet = Fleet(settings(own.start()))

        async def test() -> None:
            own.kill()
            own.empty()
            await until(lambda: all(one.away_s is not None for one in fleet.joined))
            one, member = fleet.joined.pop(), fleet.members.pop()
            await crash(one)
            await fleet.answering.down(member.address)
            await asyncio.to_thread(own.start)
            await until(fleet.whole, 15.0)
            assert fleet.registered()

        run(fleet, test)


def test_three_etcds_go_on_without_their_leader() -> None:
    with Etcd(3) as own:
        leader = own.start().leader()
        endpoints = [own.endpoints[leader], *own.endpoints[:leader], *own.endpoints[leader + 1 :]]
        fleet = Fleet(replace(settings(own), etcd=tuple(endpoints)))

        async def test() -> None:
            assert {one.stats()["endpoint"] for one in fleet.joined} == {endpoints[0]}
            own.pause(leader)
            began = time.monotonic()
            now = replace(fleet.members[0], state=State.DRAINING)
            await fleet.joined[0].update(now)
            others = fleet.joined[1:]
            await until(lambda: all(one.members().get(now.node) == now for one in others), 20.0)
            assert time.monotonic() - began < 15.0
            assert fleet.whole()
            own.resume(leader)
            await fleet.stays_whole(TTL_S)

        run(fleet, test)


def test_a_start_without_etcd_meets_the_last_members(tmp_path: Path) -> None:
    with Etcd() as own:
        fleet = Fleet(settings(own), count=2)
        living, dead = [new_member(member.address) for member in fleet.members]
        last = LastMembers(tmp_path, fleet.settings.fleet)
        last.write([living, dead])

        async def main() -> None:
            await fleet.answering.up(living)
            one = fleet.open(last)
            began = time.monotonic()
            await one.join(new_member("127.0.0.1:1"))
            try:
                assert time.monotonic() - began < 3.0
                assert set(one.members()) == {living.node, dead.node}
                assert one.away_s is not None
                assert not one.stats()["registered"]
                await asyncio.to_thread(own.start)
                await until(lambda: set(one.members()) == {living.node}, 15.0)
                await until(lambda: one.stats()["registered"])
                assert one.stats()["held"] == [living.node]
            finally:
                await one.leave()
                await fleet.answering.close()
            assert last.read() == [living]

        asyncio.run(main())


def test_a_node_id_is_free_again_when_its_owner_is_dead(etcd: Etcd) -> None:
    """A daemon that was moved, with its disk: its key at the old address expires."""
    fleet = Fleet(settings(etcd), count=1)

    async def test() -> None:
        (one,), (member,) = fleet.joined, fleet.members
        await crash(one)
        await fleet.answering.down(member.address)
        moved = replace(member, address="127.0.0.1:1", instance=secrets.token_hex(8))
        fleet.joined = [fleet.open()]
        await fleet.joined[0].join(moved)
        assert fleet.joined[0].stats()["registered"]

    run(fleet, test)


def test_a_daemon_whose_key_was_taken_says_so_and_takes_it_back(etcd: Etcd) -> None:
    fleet = Fleet(settings(etcd), count=1)

    async def test() -> None:
        (one,), (member,) = fleet.joined, fleet.members
        key = PREFIX.format(fleet=fleet.settings.fleet) + member.node
        other = replace(member, address="10.0.0.9:7702", instance=secrets.token_hex(8))
        await asyncio.to_thread(etcd.put, key, encode_member(other))
        await until(lambda: other.address in one.stats()["error"])
        assert not one.stats()["registered"]
        await asyncio.to_thread(etcd.delete, key)
        await until(lambda: one.stats()["registered"] and not one.stats()["error"])

    run(fleet, test)


def test_who_may_be_registered_without_knowing_it_lends_nothing(etcd: Etcd) -> None:
    """Etcd makes its key, and the answer is lost; so is the one that would take the key back."""
    fleet = Fleet(settings(etcd), count=2)

    async def test() -> None:
        one, other = fleet.joined
        own, calls = fleet.members[0], one._calls
        kept = KeptDeletes(
            one,
            one.deletes_of(NO_TENANT_ID),
            node=own.node,
            deletes=node.store.deletes,
            told=None,  # type: ignore[arg-type]
            note=None,
            metrics=node.metrics,
        )
        await kept.start()
        assert kept.current
        ask, take_back, lent = calls.txn, calls.revoke, list[bool]()

        async def asked(request: Any, *, timeout_s: float) -> Any:
            reply = await ask(request, timeout_s=timeout_s)
            if not reply.succeeded:  # so nobody has come to know of it by this one
                return reply
            await until(lambda: own.node in other.members())  # so others borrow from it by now
            lent.append(kept.current)
            await kept._try()  # it may have read before others knew of it
            lent.append(kept.current)
            raise Unavailable("the answer is lost")

        async def not_taken_back(lease: int, *, timeout_s: float) -> None:
            raise Unavailable("the answer is lost")

        await asyncio.sleep(TTL_S + 0.5)  # longer than the doubt after a start
        calls.txn, calls.revoke = asked, not_taken_back  # type: ignore[method-assign]
        key = PREFIX.format(fleet=fleet.settings.fleet) + own.node
        await asyncio.to_thread(etcd.delete, key)
        await until(lambda: lent)
        await other.deletes_of(NO_TENANT_ID).write(SPEC.id, A[:1])
        await until(lambda: len(lent) >= 4)
        assert not any(lent)
        calls.txn, calls.revoke = ask, take_back  # type: ignore[method-assign]
        await until(lambda: one.stats()["registered"])
        assert not kept.current
        assert await kept._try()
        assert kept.current
        assert node.planner.index.get(SPEC.id, A[0]) is None
        kept.close()

    with Node(None) as node:
        node.put(A, 0, 4)
        run(fleet, test, node.loop.run_until_complete)


def test_rubbish_in_etcd_is_counted_and_left_out(etcd: Etcd) -> None:
    fleet = Fleet(settings(etcd), count=2)
    prefix = PREFIX.format(fleet=fleet.settings.fleet)
    good = new_member("127.0.0.1:1")
    rubbish = {
        "0" * 32: encode_member(good),  # another node's
        "1" * 32: b"\xff\xfe",
        "2" * 32: b"[" * 5000,
        "../x": b"{}",
        "\udcff": b"",
    }

    async def test() -> None:
        for name, value in rubbish.items():
            key = (prefix + name).encode("utf-8", "surrogateescape")
            await asyncio.to_thread(etcd.put, key, value)
        await until(lambda: all(o.stats()["bad_entries"] == len(rubbish) for o in fleet.joined))
        assert fleet.whole()

    run(fleet, test)


# ---- what etcd refuses ---------------------------------------------------------------------------


def refused(shared: ClusterSettings) -> str:
    """Return why a daemon does not start."""

    with pytest.raises(ConfigError) as error:
        starts(shared)
    return str(error.value)


def starts(shared: ClusterSettings) -> dict[str, Any]:
    """Return the stats of a daemon that was able to register."""

    async def main() -> dict[str, Any]:
        one = EtcdMembership(shared, ping=Answering().ping)
        await one.join(new_member("127.0.0.1:1"))
        try:
            return one.stats()
        finally:
            await one.leave()

    return asyncio.run(main())


def password(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_an_etcd_with_users(tmp_path: Path) -> None:
    right = password(tmp_path / "right", "not-a-secret-5a\n")
    wrong = password(tmp_path / "wrong", "not-a-secret-5b")
    user = {"etcd_user": "kvstore", "etcd_password_file": right}
    with Etcd() as own:
        own.start().add_user("kvstore", "not-a-secret-5a", "/kvstore/v1/mine/")
        shared = settings(own, fleet="mine", **user)
        assert starts(shared)["registered"]
        assert "set cluster.etcd_user" in refused(replace(shared, etcd_user=""))
        assert "etcd_password_file" in refused(replace(shared, etcd_password_file=wrong))
        assert "etcd_user=other" in refused(replace(shared, etcd_user="other"))
        assert "may not read and write" in refused(replace(shared, fleet="another"))


def test_a_token_that_etcd_has_forgotten_is_asked_for_again(tmp_path: Path) -> None:
    path = password(tmp_path / "right", "not-a-secret-5a")
    with Etcd(**{"auth-token-ttl": "1"}) as own:
        own.start().add_user("kvstore", "not-a-secret-5a", "/kvstore/v1/mine/")
        fleet = Fleet(
            settings(own, fleet="mine", etcd_user="kvstore", etcd_password_file=path), count=2
        )

        async def test() -> None:
            tokens = [one._calls._token for one in fleet.joined]
            for _ in range(5):  # one that has expired is good until etcd has looked for such
                own.pause()  # nobody uses a token meanwhile
                await until(lambda: all(one.away_s is not None for one in fleet.joined))
                await asyncio.sleep(2.0)
                own.resume()
                await until(fleet.registered)
                now = [one._calls._token for one in fleet.joined]
                if all(one != before for one, before in zip(now, tokens, strict=True)):
                    return
            pytest.fail("old tokens are still in use")

        run(fleet, test)


def test_a_password_is_not_read_where_others_may_and_not_sent_in_the_clear(
    tmp_path: Path, etcd: Etcd
) -> None:
    path = tmp_path / "open"
    path.write_text("not-a-secret-5a")
    path.chmod(0o644)
    shared = settings(etcd, etcd_user="kvstore", etcd_password_file=str(path))
    assert "chmod 600" in refused(shared)
    path.chmod(0o600)
    assert "in the clear" in refused(replace(shared, etcd="http://etcd-0:2379"))
    path.write_text("")
    assert "is empty" in refused(shared)


def test_an_etcd_with_tls_and_certificates(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    server, client = authority.issue("etcd"), authority.issue("daemon")
    stranger = other.issue("daemon")
    shown = {"etcd_cert": str(client.cert), "etcd_key": str(client.key)}
    with Etcd(tls=(server.cert, server.key, authority.ca)) as own:
        own.start()
        shared = settings(own, etcd_ca=str(authority.ca), **shown)
        deadline = time.monotonic() + 20
        while not starts(shared)["registered"]:  # there is no other way to see that it is up
            assert time.monotonic() < deadline
        assert "cluster.etcd_ca" in refused(replace(shared, etcd_ca=str(other.ca)))
        assert "https://" in refused(replace(shared, etcd="http://127.0.0.1:1"))
        strange = replace(shared, etcd_cert=str(stranger.cert), etcd_key=str(stranger.key))
        for each in (strange, replace(shared, etcd_cert="", etcd_key="")):
            assert "cluster.etcd_cert" in why_not(each)


def test_tls_with_an_etcd_that_has_none(etcd: Etcd, tmp_path: Path) -> None:
    shared = settings(etcd, etcd_ca=str(Authority(tmp_path).ca))
    tls = tuple(each.replace("http:", "https:") for each in etcd.endpoints)
    assert "write http://" in why_not(replace(shared, etcd=tls))


def why_not(shared: ClusterSettings) -> str:
    """Return why a daemon is not registered, whether or not that keeps it from starting."""
    try:
        return str(starts(shared)["error"])
    except ConfigError as error:
        return str(error)


def test_a_second_daemon_that_waits_for_a_key_is_bounded(etcd: Etcd) -> None:
    """Its owner renews, and does not answer us: across a partition of the network, say."""
    fleet = Fleet(settings(etcd), count=1)

    async def test() -> None:
        (member,) = fleet.members
        await fleet.answering.down(member.address)
        double = replace(member, address="127.0.0.1:1", instance=secrets.token_hex(8))
        began = time.monotonic()
        with pytest.raises(NodeIdTaken):
            await fleet.open().join(double)
        assert TTL_S <= time.monotonic() - began < 4 * TTL_S

    run(fleet, test)
