"""Members that stay for their answers alone: for how long they are borrowed from."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvstore.membership import LastMembers, encode_member
from kvstore.membership.etcd import TRUSTED_S, EtcdMembership
from kvstore.model.member import Member
from kvstore.rpc.etcd import etcd_pb2 as pb
from kvstore.settings import ClusterSettings
from kvstore.testing.etcd import INSTALL, Etcd, has_etcd
from kvstore.testing.membership import Answering, new_member, until
from tests.membership.test_etcd import PREFIX, Fleet, crash, run, settings

if not has_etcd():
    pytest.skip(INSTALL, allow_module_level=True)


async def left_alone(own: Etcd, fleet: Fleet) -> tuple[EtcdMembership, Member]:
    """Return the first member, and the last one: it answers, but it does not reach etcd any more,
    which has dropped its key soon after an outage."""
    one, cut_off = fleet.joined[0], fleet.members.pop()
    await crash(fleet.joined.pop())
    own.pause()
    await one.update(fleet.members[0])  # so it notices
    await until(lambda: one.away_s is not None)
    own.resume()
    await until(lambda: one.away_s is None)
    key = PREFIX.format(fleet=fleet.settings.fleet) + cut_off.node
    await asyncio.to_thread(own.delete, key)
    await until(lambda: cut_off.node in one.stats()["held"])
    return one, cut_off


def test_who_was_held_for_a_ttl_is_doubtful_whatever_becomes_of_etcd() -> None:
    with Etcd() as own:
        fleet = Fleet(settings(own.start(), etcd_ttl_s=4.0), count=2)

        async def test() -> None:
            one, cut_off = await left_alone(own, fleet)
            settled = one.settling()
            await one.refresh()  # as who deletes does
            assert not settled()
            await until(settled)
            assert set(one.doubtful) == {cut_off.node}
            own.pause()
            await until(lambda: one.away_s is not None)
            assert set(one.doubtful) == {cut_off.node}
            assert not one.settling()()
            own.resume()
            await until(lambda: one.away_s is None)
            assert set(one.doubtful) == {cut_off.node}

        run(fleet, test)


def test_nobody_is_trusted_for_as_long_as_a_long_ttl() -> None:
    with Etcd() as own:
        fleet = Fleet(settings(own.start(), etcd_ttl_s=600.0), count=2)

        async def test() -> None:
            one, cut_off = await left_alone(own, fleet)
            assert not one.doubtful
            one._outage._now = lambda: time.monotonic() + TRUSTED_S
            assert set(one.doubtful) == {cut_off.node}

        run(fleet, test)


def test_a_member_of_an_earlier_start_that_etcd_does_not_have_is_doubtful(tmp_path: Path) -> None:
    """What was deleted before this start is not kept from coming by anything else."""
    with Etcd() as own:
        fleet = Fleet(settings(own.start()), count=1)
        living = new_member(fleet.members[0].address)
        last = LastMembers(tmp_path, fleet.settings.fleet)
        last.write([living])

        async def main() -> None:
            await fleet.answering.up(living)
            one = fleet.open(last)
            await one.join(new_member("127.0.0.1:1"))
            try:
                assert set(one.members()) == set(one.doubtful) == {living.node}
            finally:
                await one.leave()
                await fleet.answering.close()

        asyncio.run(main())


def test_lists_that_overtake_each_other_are_no_sign_of_an_emptied_etcd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each delete lists the members. One that is late tells nothing new: if it did, deletes that
    come again and again would be forbidden for ever, and who has joined would be lost."""
    one_there, joined = new_member("127.0.0.1:1"), new_member("127.0.0.1:2")
    shared = ClusterSettings(membership="etcd", etcd=("http://127.0.0.1:1",))

    async def main() -> None:
        one = EtcdMembership(shared, ping=Answering().ping)
        replies: list[asyncio.Future[pb.RangeResponse]] = []

        async def listed(*_: object, **__: object) -> pb.RangeResponse:
            replies.append(asyncio.get_running_loop().create_future())
            return await replies[-1]

        def reply(revision: int, *members: Member) -> pb.RangeResponse:
            kvs = [
                pb.KeyValue(key=one._begin + each.node.encode(), value=encode_member(each))
                for each in members
            ]
            return pb.RangeResponse(header=pb.Header(revision=revision), kvs=kvs)

        async def lists(*answers: tuple[int, pb.RangeResponse]) -> None:
            """Begin as many, and answer them in this order."""
            asking = [asyncio.ensure_future(one.refresh()) for _ in answers]
            await asyncio.sleep(0)
            for at, answer in answers:
                replies[at].set_result(answer)
                await asking[at]
            replies.clear()

        monkeypatch.setattr(one._calls, "list", listed)
        for late in (0, 1):
            settled = one.settling()
            await lists(
                (1 - late, reply(20 + late, one_there, joined)),
                (late, reply(19 + late, one_there)),
            )
            assert set(one.members()) == {one_there.node, joined.node}
            assert settled()
            assert not one._outage.shields(60.0)
        await lists((0, reply(3, one_there)))
        assert one._outage.shields(60.0)  # this one was emptied
        assert set(one.stats()["held"]) == {joined.node}
        settled = one.settling()
        await lists((0, reply(4, one_there)))
        assert not settled()
        await lists((0, reply(5, one_there, joined)))
        assert settled()  # nobody is held, however lately etcd was away

    asyncio.run(main())
