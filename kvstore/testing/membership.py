"""The contract every driver of the fleet's members keeps. Subclass it, say how one is opened."""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvstore.membership import Membership, NodeIdTaken, decode_member, encode_member
from kvstore.membership.entry import ENTRY_NBYTES_MAX
from kvstore.model.member import Member, NodeId, State
from kvstore.testing.ports import free_ports

POLL_S = 0.01
ASK_S = 2.0

Open: TypeAlias = Callable[[Member, Path], Membership]


def new_member(address: str, **changes: Any) -> Member:
    """Return a member with a new node id and instance."""
    node, instance = NodeId(secrets.token_hex(16)), secrets.token_hex(8)
    return replace(Member(node, instance, address, version="1.0", zone="r1"), **changes)


async def until(true: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until `true()` is. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - of what is looked at, nothing tells
            await asyncio.sleep(POLL_S)


class Answering:
    """What stands for daemons that others ask: real servers on loopback that say who they are.

    Each answers a connection with its member as JSON. hello and ping are what drivers ask by.
    """

    def __init__(self) -> None:
        self._servers: dict[str, asyncio.Server] = {}
        self.members: dict[str, Member] = {}
        self.asked = 0

    async def up(self, member: Member) -> None:
        """Answer for a member at its address, from now on or with another word."""
        self.members[member.address] = member
        if member.address not in self._servers:
            host, port = member.address.rsplit(":", 1)

            async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                self.asked += 1
                writer.write(encode_member(self.members[member.address]))
                writer.close()

            self._servers[member.address] = await asyncio.start_server(answer, host, int(port))

    async def down(self, address: str) -> None:
        """Answer no more."""
        server = self._servers.pop(address, None)
        if server is not None:
            # Nobody more is let in first: whoever is while a server closes is never closed.
            for each in server.sockets:
                asyncio.get_running_loop().remove_reader(each.fileno())
            await asyncio.sleep(POLL_S)
            server.close()
            await server.wait_closed()

    async def close(self) -> None:
        for address in list(self._servers):
            await self.down(address)

    async def hello(self, address: str) -> Member:
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(ASK_S):
                return decode_member(await reader.read(ENTRY_NBYTES_MAX))
        finally:
            writer.close()

    async def ping(self, member: Member) -> bool:
        return (await self.hello(member.address)).node == member.node


class MembershipContract:
    """Subclass and override `fleet`. settle_s: within which all know what has changed.

    forgets: a member that has left is no member any more; a list of addresses does not forget.
    """

    settle_s = 10.0
    forgets = True

    def fleet(
        self, addresses: Iterable[str], answering: Answering
    ) -> AbstractAsyncContextManager[Open]:
        """Make a fleet without members, whose daemons will have some of `addresses`."""
        raise NotImplementedError("yield what opens the membership of one of its daemons")

    async def crash(self, one: Membership) -> None:
        """End a daemon without a word to anybody, as far as that can be done in one process."""
        await one.leave()

    def run(self, test: Callable[[Scene], Awaitable[None]]) -> None:
        """Run a test with a fleet of its own."""

        async def main() -> None:
            answering = Answering()
            addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
            with tempfile.TemporaryDirectory(prefix="kv-") as directory:
                async with self.fleet(addresses, answering) as opened:
                    scene = Scene(addresses, answering, opened, Path(directory))
                    try:
                        await test(scene)
                    finally:
                        await scene.close()

        asyncio.run(main())

    def test_members_know_each_other_and_not_themselves(self) -> None:
        async def test(scene: Scene) -> None:
            first, second, third = [await scene.join(scene.new(at)) for at in range(3)]
            for one in (first, second, third):
                others = {node: m for node, m in scene.all.items() if scene.joined[node] is not one}
                await until(partial(_knows, one, others), self.settle_s)
                assert one.away_s is None

        self.run(test)

    def test_what_was_returned_does_not_change(self) -> None:
        async def test(scene: Scene) -> None:
            first = await scene.join(scene.new(0))
            before = first.members()
            await scene.join(scene.new(1))
            await until(first.members, self.settle_s)
            assert not before

        self.run(test)

    def test_all_are_told_what_a_member_is_now(self) -> None:
        async def test(scene: Scene) -> None:
            first = await scene.join(scene.new(0))
            member = scene.new(1)
            await scene.join(member)
            await until(first.members, self.settle_s)
            now = replace(member, state=State.DRAINING, engines=("10.0.0.9:8000",), arena_bytes=5)
            await scene.update(now)
            await until(lambda: first.members().get(member.node) == now, self.settle_s)

        self.run(test)

    def test_changes_are_told(self) -> None:
        async def test(scene: Scene) -> None:
            first = await scene.join(scene.new(0))
            seen: list[int] = []
            first.on_change(lambda: seen.append(len(first.members())))
            await scene.join(scene.new(1))
            await until(lambda: seen and seen[-1] == 1, self.settle_s)

        self.run(test)

    def test_who_is_told_may_fail(self) -> None:
        async def test(scene: Scene) -> None:
            first = await scene.join(scene.new(0))

            def fails() -> None:
                raise ValueError("the user's own bug")

            first.on_change(fails)
            for at in (1, 2):
                await scene.join(scene.new(at))
            await until(lambda: len(first.members()) == 2, self.settle_s)

        self.run(test)

    def test_a_member_that_leaves(self) -> None:
        async def test(scene: Scene) -> None:
            first = await scene.join(scene.new(0))
            member = scene.new(1)
            await scene.join(member)
            await until(first.members, self.settle_s)
            await scene.leave(member)
            if self.forgets:
                await until(lambda: not first.members(), self.settle_s)
            else:
                await until(lambda: member.address in first.stats()["silent"], self.settle_s)
                assert member.node in first.members()

        self.run(test)

    def test_another_start_takes_the_place_of_the_one_before(self) -> None:
        async def test(scene: Scene) -> None:
            first = await scene.join(scene.new(0))
            member = scene.new(1)
            await scene.join(member)
            await until(first.members, self.settle_s)
            await self.crash(scene.joined.pop(member.node))
            await scene.answering.down(member.address)
            again = replace(member, instance=secrets.token_hex(8))
            await scene.join(again)
            await until(lambda: first.members().get(member.node) == again, self.settle_s)

        self.run(test)

    def test_a_second_daemon_with_a_node_id_is_refused_and_told_by_whom(self) -> None:
        async def test(scene: Scene) -> None:
            first = await scene.join(scene.new(0))
            member = scene.new(1)
            await scene.join(member)
            await until(first.members, self.settle_s)
            double = replace(member, instance=secrets.token_hex(8), address=scene.addresses[2])
            with pytest.raises(NodeIdTaken) as refused:
                await scene.join(double, known=False)
            assert refused.value.address == member.address
            assert member.address in str(refused.value)
            assert first.members()[member.node] == member

        self.run(test)

    def test_who_left_may_leave_again(self) -> None:
        async def test(scene: Scene) -> None:
            member = scene.new(0)
            one = await scene.join(member)
            await scene.leave(member)
            await one.leave()

        self.run(test)

    def test_what_status_shows_is_json(self) -> None:
        async def test(scene: Scene) -> None:
            first = await scene.join(scene.new(0))
            await scene.join(scene.new(1))
            await until(first.members, self.settle_s)
            shown = json.loads(json.dumps(first.stats()))
            assert shown["members"] == 1
            assert shown["registered"]
            assert shown["away_s"] is None
            assert not shown["error"]

        self.run(test)


def _knows(one: Membership, others: Mapping[NodeId, Member]) -> bool:
    return one.members() == others


class Scene:
    """The daemons of one test. all: the members that joined, by node id."""

    def __init__(
        self, addresses: list[str], answering: Answering, opened: Open, directory: Path
    ) -> None:
        self.addresses = addresses
        self.answering = answering
        self.all: dict[NodeId, Member] = {}
        self.joined: dict[NodeId, Membership] = {}
        self._opened = opened
        self._directory = directory

    def new(self, at: int) -> Member:
        """Return a member for one of the addresses."""
        return new_member(self.addresses[at])

    async def join(self, member: Member, *, known: bool = True) -> Membership:
        """Let a daemon join. known: note it as one of the fleet."""
        directory = self._directory / member.instance
        directory.mkdir()
        one = self._opened(member, directory)
        if known:
            await self.answering.up(member)
        await one.join(member)
        self.all[member.node], self.joined[member.node] = member, one
        return one

    async def update(self, member: Member) -> None:
        await self.answering.up(member)
        await self.joined[member.node].update(member)

    async def leave(self, member: Member) -> None:
        await self.joined.pop(member.node).leave()
        await self.answering.down(member.address)

    async def close(self) -> None:
        for one in self.joined.values():
            await one.leave()
        await self.answering.close()
