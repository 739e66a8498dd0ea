"""Members by Kubernetes: kmock's emulator is the API server, tests are the kubelets."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.membership import LastMembers, Membership, asking, held
from kvstore.membership import kubernetes as driver
from kvstore.membership import kubernetes_calls as calls
from kvstore.membership.endpoint_slices import ADDRESSES_MAX, Slice, Slices
from kvstore.membership.kubernetes import KubernetesMembership
from kvstore.membership.kubernetes_account import Account, own_account
from kvstore.model.errors import ConfigError
from kvstore.model.member import Member, NodeId
from kvstore.testing.membership import Answering, MembershipContract, Open, new_member, until
from kvstore.testing.ports import free_ports
from tests.tls import Authority

kmock = pytest.importorskip("kmock")
from tests.membership.api_server import SERVICE, Cluster, cluster, slice_of  # noqa: E402

SOON_S = 0.05
SETTLE_S = 20.0


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask often: the tests wait for what a daemon learns in seconds."""
    for module, name, seconds in (
        (asking, "ASK_EVERY_S", SOON_S),
        (asking, "ASK_AGAIN_S", SOON_S),
        (held, "CHECK_EVERY_S", SOON_S),
        (driver, "RETRY_S", SOON_S),
        (driver, "RETRY_S_MAX", 4 * SOON_S),
        (driver, "LIST_EVERY_S", 1.0),  # the emulator may lose a change while a watch begins
        (calls, "WATCH_SPARE_S", SOON_S),
        (calls, "CALL_S", 1.0),
    ):
        monkeypatch.setattr(module, name, seconds)


class Pod:
    """A driver in a pod: ready once it has joined, and not any more when it has left."""

    def __init__(self, one: KubernetesMembership, own: Member, there: Cluster) -> None:
        self.one, self.own, self._there = one, own, there

    async def join(self, member: Member) -> None:
        await self.one.join(member)
        await self._there.ready(member.address)

    async def leave(self) -> None:
        await self._there.gone(self.own.address)
        await self.one.leave()

    async def update(self, member: Member) -> None:
        await self.one.update(member)

    def members(self) -> Mapping[NodeId, Member]:
        return self.one.members()

    def on_change(self, changed: Callable[[], None]) -> None:
        self.one.on_change(changed)

    @property
    def away_s(self) -> float | None:
        return self.one.away_s

    def stats(self) -> dict[str, Any]:
        return self.one.stats()


class TestContract(MembershipContract):
    settle_s = SETTLE_S

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    @asynccontextmanager
    async def fleet(self, addresses: Iterable[str], answering: Answering) -> AsyncIterator[Open]:
        async with cluster(self.directory) as there:

            def opened(member: Member, directory: Path) -> Membership:
                one = KubernetesMembership(
                    there.account,
                    SERVICE,
                    hello=answering.hello,
                    ping=answering.ping,
                    last=LastMembers(directory, "default"),
                )
                return Pod(one, member, there)

            yield opened


class Fleet:
    """One driver, two other daemons, and the API server."""

    def __init__(self, there: Cluster) -> None:
        self.there = there
        self.answering = Answering()
        self.own, *self.others = [new_member(f"127.0.0.1:{port}") for port in free_ports(3)]
        self.one = self.open(there.account)

    def open(self, account: Account, last: LastMembers | None = None) -> KubernetesMembership:
        return KubernetesMembership(
            account, SERVICE, hello=self.answering.hello, ping=self.answering.ping, last=last
        )

    async def start(self) -> None:
        for member in self.others:
            await self.answering.up(member)
            await self.there.ready(member.address)
        await self.there.ready(self.own.address)
        await self.one.join(self.own)
        await until(lambda: self.whole() and self.there.watches, SETTLE_S)

    def whole(self) -> bool:
        return self.one.members().keys() == {member.node for member in self.others}

    async def stays_whole(self, for_s: float) -> None:
        ends = time.monotonic() + for_s
        while time.monotonic() < ends:
            assert self.whole()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        await self.one.leave()
        await self.answering.close()


def run(directory: Path, test: Callable[[Fleet], Awaitable[None]], *, start: bool = True) -> None:
    async def main() -> None:
        async with cluster(directory) as there:
            fleet = Fleet(there)
            try:
                if start:
                    await fleet.start()
                await test(fleet)
            finally:
                await fleet.stop()

    asyncio.run(main())


def status(code: int) -> Callable[[Any], Any]:
    return lambda _: kmock.Response(status=code, payload={"kind": "Status", "code": code})


def listing(*addresses: str, version: str = "1") -> Callable[[Any], Any]:
    items = [slice_of(each) for each in addresses]
    return lambda _: {"metadata": {"resourceVersion": version}, "items": items}


async def silent() -> AsyncIterator[Any]:
    yield b""
    await asyncio.sleep(3600)


def test_a_watch_that_is_silent_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LIST_EVERY_S", 0.2)

    async def test(fleet: Fleet) -> None:
        fleet.there.watch = silent
        late = new_member(f"127.0.0.1:{free_ports(1)[0]}")
        await fleet.answering.up(late)
        await fleet.there.down()  # ends the watch that the emulator serves
        await fleet.there.up()
        watches = fleet.there.watches
        await until(lambda: fleet.there.watches > watches, SETTLE_S)
        await fleet.there.ready(late.address)
        await until(lambda: late.node in fleet.one.members(), SETTLE_S)

    run(tmp_path, test)


def test_what_is_asked_of_the_server(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        listed, watched = fleet.there.asked[:2]
        assert listed == {"labelSelector": f"kubernetes.io/service-name={SERVICE}"}
        assert watched["resourceVersion"] == "77"
        assert float(watched["timeoutSeconds"]) == driver.LIST_EVERY_S
        assert watched["watch"] == "true"

    async def numbered(fleet: Fleet) -> None:
        there = fleet.there
        addresses = [member.address for member in (*fleet.others, fleet.own)]
        there.list = listing(*addresses, version="77")
        await fleet.start()
        await until(lambda: there.watches, SETTLE_S)
        await test(fleet)

    run(tmp_path, numbered, start=False)


def test_a_watch_alone_tells_who_comes_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LIST_EVERY_S", 3600.0)
    monkeypatch.setattr(driver, "SHIELD_S", 0.0)

    async def test(fleet: Fleet) -> None:
        told: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

        async def watch() -> AsyncIterator[Any]:
            yield b""
            while True:
                kind, of = await told.get()
                yield {"type": kind, "object": of}

        fleet.there.list, fleet.there.watch = listing(fleet.own.address), watch
        await fleet.one.join(fleet.own)
        first, second = fleet.others
        for member in fleet.others:
            await fleet.answering.up(member)
        told.put_nowait(("ADDED", slice_of(first.address)))
        told.put_nowait(("BOOKMARK", {"metadata": {"resourceVersion": "9"}}))
        told.put_nowait(("ADDED", slice_of(second.address)))
        await until(fleet.whole, SETTLE_S)
        told.put_nowait(("DELETED", slice_of(first.address)))
        await until(lambda: fleet.one.members().keys() == {second.node}, SETTLE_S)
        told.put_nowait(("MODIFIED", slice_of(second.address, ready=False)))
        await until(lambda: not fleet.one.members(), SETTLE_S)
        assert fleet.there.lists == 1

    run(tmp_path, test, start=False)


@pytest.mark.parametrize("how", ["status", "event", "half", "garbage", "error"])
def test_a_watch_that_is_cut_off_is_no_outage(tmp_path: Path, how: str) -> None:
    async def watch() -> AsyncIterator[Any]:
        yield b""
        if how == "event":
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
        elif how == "error":
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd"}}
        elif how == "garbage":
            yield b'{"type": "ADDED", "object": [1]}\n'
        else:
            yield b'{"type": "DELETED", "object"'

    async def test(fleet: Fleet) -> None:
        there = fleet.there
        there.watch = watch if how != "status" else lambda: status(410)(None)
        await there.down()
        await there.up()
        lists = there.lists
        await until(lambda: there.lists > lists + 2, SETTLE_S)
        assert fleet.whole()
        assert fleet.one.away_s is None

    run(tmp_path, test)


def test_a_rotated_token_is_read_again(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        there = fleet.there
        there.token = "second"
        there.watch = silent
        await there.down()
        await there.up()
        await until(lambda: "refuses the token" in fleet.one.stats()["error"], SETTLE_S)
        assert fleet.whole()
        (tmp_path / "token").write_text("second\n")
        await until(lambda: fleet.one.away_s is None, SETTLE_S)
        assert fleet.whole()

    run(tmp_path, test)


def test_a_server_that_comes_back_empty_is_not_a_fleet_that_died(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        there = fleet.there
        await there.down()
        await until(lambda: fleet.one.away_s is not None, SETTLE_S)
        await fleet.stays_whole(0.3)
        there.list, there.watch = listing(), silent
        await there.up()
        await until(lambda: len(fleet.one.stats()["held"]) == 2, SETTLE_S)
        assert fleet.one.away_s is None
        await fleet.stays_whole(0.3)
        first, second = fleet.others
        await fleet.answering.down(first.address)  # one of them did die
        await until(lambda: fleet.one.members().keys() == {second.node}, SETTLE_S)
        there.list = lambda _: None
        await fleet.answering.up(first)
        await there.down()
        await there.up()
        await until(lambda: fleet.whole() and not fleet.one.stats()["held"], SETTLE_S)

    run(tmp_path, test)


def test_a_server_that_was_emptied_unseen_is_not_a_fleet_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SHIELD_S", 0.3)

    async def test(fleet: Fleet) -> None:
        await asyncio.sleep(0.4)
        for member in (fleet.own, *fleet.others):  # by the watch: this daemon is gone as well
            await fleet.there.gone(member.address)
        await until(lambda: len(fleet.one.stats()["held"]) == 2, SETTLE_S)
        await fleet.stays_whole(0.2)
        assert not fleet.one.stats()["registered"]

    run(tmp_path, test)


def test_who_is_not_ready_is_no_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SHIELD_S", 0.0)

    async def test(fleet: Fleet) -> None:
        first, second = fleet.others
        await fleet.there.ready(first.address, ready=False, serving=True)  # it ends, and serves on
        await fleet.there.ready(second.address, ready=False)
        await until(lambda: fleet.one.members().keys() == {first.node}, SETTLE_S)
        assert not fleet.one.stats()["held"]

    run(tmp_path, test)


def test_a_daemon_that_starts_while_the_server_is_away_meets_those_it_knew(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        for member in fleet.others:
            await fleet.answering.up(member)
        directory = tmp_path / "state"
        ghost = new_member(fleet.own.address)  # of a pod that had this address before
        LastMembers(directory, "default").write([*fleet.others, ghost])
        await fleet.there.down()
        fleet.one = fleet.open(fleet.there.account, LastMembers(directory, "default"))
        await fleet.one.join(fleet.own)
        assert fleet.one.members().keys() >= {member.node for member in fleet.others}
        assert fleet.one.away_s is not None
        await fleet.there.up()
        for member in (fleet.own, *fleet.others):
            await fleet.there.ready(member.address)
        await until(lambda: fleet.one.away_s is None and fleet.one.stats()["registered"], SETTLE_S)
        await until(lambda: fleet.whole() and not fleet.one.stats()["held"], SETTLE_S)

    run(tmp_path, test, start=False)


def test_a_server_that_hangs_ends_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALL_S", 0.3)

    async def test(fleet: Fleet) -> None:
        hung = asyncio.Event()

        async def hang(_: Any) -> None:
            await hung.wait()

        fleet.there.list = hang
        await asyncio.wait_for(fleet.one.join(fleet.own), SETTLE_S)
        assert "in time" in fleet.one.stats()["error"]
        fleet.there.list = listing()
        hung.set()
        await until(lambda: fleet.one.away_s is None, SETTLE_S)
        assert f"={SERVICE}: no such Service" in fleet.one.stats()["error"]

    run(tmp_path, test, start=False)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (403, ["endpointslices", "namespace prod", "[discovery.k8s.io]", "[get, list, watch]"]),
        (401, ["refuses the token"]),
        (404, ["discovery.k8s.io/v1"]),
    ],
)
def test_what_the_server_refuses_names_what_is_missing(
    tmp_path: Path, code: int, words: list[str]
) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.there.list = status(code)
        with pytest.raises(ConfigError) as refused:
            await fleet.one.join(fleet.own)
        for each in ("cluster.membership=kubernetes", *words):
            assert each in str(refused.value)

    run(tmp_path, test, start=False)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense",
        b"[" * 100_000,
        {"items": [{"endpoints": []}]},
        {"items": [{"metadata": {"name": "x"}, "endpoints": [{"addresses": "10.0.0.1"}]}]},
        {"metadata": {"resourceVersion": 7}, "items": []},
    ],
)
def test_an_answer_that_is_none_is_an_outage(tmp_path: Path, answer: Any) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.there.list = lambda _: kmock.Response(status=200, payload=answer)
        await fleet.one.join(fleet.own)
        assert "is not understood" in fleet.one.stats()["error"]
        assert fleet.one.stats()["failed_calls"] == 1

    run(tmp_path, test, start=False)


def test_a_list_beyond_all_bounds_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LIST_NBYTES_MAX", 100)

    async def test(fleet: Fleet) -> None:
        fleet.there.list = listing(fleet.own.address)
        await fleet.one.join(fleet.own)
        assert "more than 100 bytes" in fleet.one.stats()["error"]

    run(tmp_path, test, start=False)


@asynccontextmanager
async def tls_before(there: Cluster, authority: Authority) -> AsyncIterator[int]:
    """Yield a port at which the server speaks TLS."""
    pair = authority.issue("api")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner = await asyncio.open_connection("127.0.0.1", there.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, inner[1]), copy(inner[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


def test_the_server_shows_a_certificate_of_the_cluster(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
        await fleet.there.ready(fleet.own.address)
        async with tls_before(fleet.there, authority) as port:
            pod = {
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                "KUBERNETES_SERVICE_PORT": f"{port}",
            }
            (tmp_path / "ca.crt").write_bytes(other.ca.read_bytes())
            fleet.one = fleet.open(own_account(pod, tmp_path))
            await fleet.one.join(fleet.own)
            assert "does not vouch for" in fleet.one.stats()["error"]
            assert not fleet.there.asked  # and no token was shown
            (tmp_path / "ca.crt").write_bytes(authority.ca.read_bytes())
            await until(lambda: fleet.one.stats()["registered"], SETTLE_S)
            await fleet.one.leave()

    run(tmp_path, test, start=False)


def test_where_there_is_no_pod_the_setting_is_named(tmp_path: Path) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    for environment, words in (
        ({}, "KUBERNETES_SERVICE_HOST is not set"),
        (pod | {"KUBERNETES_SERVICE_PORT": "x"}, "is no port"),
        (pod, "automountServiceAccountToken"),
    ):
        with pytest.raises(ConfigError, match=r"cluster\.membership=kubernetes") as refused:
            own_account(environment, tmp_path)
        assert words in str(refused.value)
    for name, text in (("namespace", "prod"), ("ca.crt", ""), ("token", "a\r\nHost: b")):
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="holds no token"):
        own_account(pod, tmp_path)


def test_slices_are_addresses() -> None:
    def made(name: str, *endpoints: dict[str, Any], port: Any = 7702) -> Slice:
        ports = [{"port": 7701}, {"name": "peer", "port": port}] if port else None
        found = {"metadata": {"name": name}, "endpoints": list(endpoints), "ports": ports}
        return msgspec.convert(found, Slice)

    def at(*addresses: str, **conditions: Any) -> dict[str, Any]:
        return {"addresses": list(addresses), "conditions": conditions}

    slices = Slices()
    slices.replace(
        [
            made("a", at("10.0.0.1", ready=True), at("10.0.0.2"), at("10.0.0.3", ready=False)),
            made("b", at("fd00:0::1"), at("10.0.0.1")),  # one moves from slice to slice
            made("c", at("node.example.com"), at(), at("127.0.0.1\n")),
        ]
    )
    assert slices.addresses() == ["10.0.0.1:7702", "10.0.0.2:7702", "[fd00::1]:7702"]
    assert slices.bad == 3
    slices.put(made("a", at("10.0.0.9")))
    slices.drop(made("c"))
    assert slices.addresses() == ["10.0.0.9:7702", "[fd00::1]:7702", "10.0.0.1:7702"]
    for port in (0, 70000, None):
        slices.replace([made("a", at("10.0.0.1"), port=port)])
        assert slices.addresses() == []
    many = [at(f"10.{each >> 16}.{each >> 8 & 255}.{each & 255}") for each in range(ADDRESSES_MAX)]
    slices.replace([made("a", *many, at("11.0.0.1"))])
    assert len(slices.addresses()) == ADDRESSES_MAX
    assert slices.left_out == 1
