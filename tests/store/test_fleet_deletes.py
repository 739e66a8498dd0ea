"""Deletes that etcd keeps, as one store applies them: again after a failure, but none twice."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from kvstore.membership.etcd_deletes import Delete, Found
from kvstore.membership.state_files import AppliedDeletes
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import ConfigError, Unavailable
from kvstore.model.member import NodeId
from kvstore.model.tenant import TenantId
from kvstore.move.peers import Peers
from kvstore.move.tenant_peers import TenantPeers
from kvstore.peer.lenders import Lenders
from kvstore.store import fleet_deletes
from kvstore.store.fleet_deletes import LOOK_S, RETRY_S, KeptDeletes
from kvstore.store.tenant_in_fleet import TenantInFleet
from kvstore.store.tenants import Tenant
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.tier.file import DeviceState
from kvstore.tier.file.devices import admission
from kvstore.tier.object.names import TOMBSTONES
from tests.sim.loop import SimLoop
from tests.store.node import FULL, SPEC, Node, chain

NODE = NodeId("1" * 32)
ROUND_TRIP_S = 0.001
A, B = chain(1, 16), chain(2, 16)


class Engine:
    """The membership: this daemon is registered, and etcd answers."""

    def __init__(self) -> None:
        self.claims = 1
        self.claiming = False
        self.away_s: float | None = None
        self.told: list[Callable[[], None]] = []

    def on_claim(self, told: Callable[[], None]) -> Callable[[], None]:
        self.told.append(told)
        return lambda: self.told.remove(told)


class Etcd:
    """What etcd keeps. reads: how often it was asked. refusal: what it says instead."""

    token_s = 1e6

    def __init__(self) -> None:
        self.revision, self.reads, self.renewed = 500, 0, ""
        self.deletes: list[Delete] = []
        self.refusal: Exception | None = None

    def keep(self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None) -> None:
        self.revision += 1
        killed = tuple(keys) if keys is not None else None
        self.deletes.append(Delete(namespace_id, killed, self.revision))

    async def read(self, after: int) -> Found:
        self.reads += 1
        await asyncio.sleep(ROUND_TRIP_S)
        if self.refusal is not None:
            raise self.refusal
        return Found(self.revision, [each for each in self.deletes if each.revision > after])

    async def token(self, node: NodeId) -> str:
        return self.renewed

    async def renew(self, node: NodeId, token: str) -> None:
        self.renewed = token


def kept_of(
    node: Node,
    etcd: Etcd,
    engine: Engine,
    note: AppliedDeletes | None,
    now: Callable[[], float] | None = None,
) -> KeptDeletes:
    return KeptDeletes(
        engine,  # type: ignore[arg-type]
        etcd,  # type: ignore[arg-type]
        node=NODE,
        deletes=node.store.deletes,
        told=None,  # type: ignore[arg-type]
        note=note,
        metrics=node.metrics,
        now=now or node.now,
    )


async def run_for(kept: KeptDeletes, seconds: float) -> None:
    running = asyncio.ensure_future(kept.run())
    await asyncio.sleep(seconds)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def tombstones_in(bucket: Path) -> int:
    return sum(each.is_file() for each in (bucket / TOMBSTONES).rglob("*"))


# ---- pauses --------------------------------------------------------------------------------------


@pytest.fixture
def sim() -> Iterator[Node]:
    with Node(None, loop=SimLoop(Random(1))) as node:
        yield node


@pytest.mark.parametrize("looks", [False, True], ids=["", "told-of-deletes"])
def test_a_member_that_cannot_apply_deletes_pauses_longer_each_time(
    sim: Node, *, looks: bool
) -> None:
    etcd, engine = Etcd(), Engine()
    kept = kept_of(sim, etcd, engine, None)

    async def test() -> None:
        await kept.start()
        etcd.reads, etcd.refusal = 0, ConfigError("etcd: authentication failed")
        running = asyncio.ensure_future(kept.run())
        for _ in range(600):
            await asyncio.sleep(0.1)
            if looks:
                kept.look()
        assert 5 <= etcd.reads <= 5 + 60.0 / LOOK_S
        assert kept.current  # it goes on with what it has
        engine.claims, etcd.refusal = 2, None
        kept.look()
        await asyncio.sleep(RETRY_S / 10)
        assert kept.current  # who is registered anew is not kept waiting
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    sim.loop.run_until_complete(test())


def test_it_is_tried_again_as_soon_as_etcd_answers(sim: Node) -> None:
    etcd, engine = Etcd(), Engine()
    kept = kept_of(sim, etcd, engine, None)

    async def test() -> None:
        etcd.refusal, engine.away_s = Unavailable("no endpoint answers"), 0.0
        running = asyncio.ensure_future(kept.run())
        await asyncio.sleep(60.0)
        assert not kept.current
        etcd.refusal = engine.away_s = None
        await asyncio.sleep(2 * RETRY_S)
        assert kept.current
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    sim.loop.run_until_complete(test())


def test_nothing_is_lent_while_nobody_knows_whether_this_daemon_is_registered(sim: Node) -> None:
    etcd, engine = Etcd(), Engine()
    kept = kept_of(sim, etcd, engine, None)

    async def test() -> None:
        await kept.start()
        running = asyncio.ensure_future(kept.run())
        engine.claiming = True  # etcd is asked
        assert not kept.current
        etcd.reads = 0
        kept.look()
        await asyncio.sleep(2 * LOOK_S)
        assert (
            1 <= etcd.reads <= 4
        )  # what it applies meanwhile is not enough, and no reason to hurry
        assert not kept.current
        engine.claims, engine.claiming = 2, False  # and has answered
        assert not kept.current
        for told in engine.told:
            told()
        await asyncio.sleep(RETRY_S)
        assert kept.current
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    sim.loop.run_until_complete(test())


# ---- what is applied -----------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_deletes, "RETRY_S", 0.01)
    monkeypatch.setattr(fleet_deletes, "LOOK_S", 0.04)
    monkeypatch.setattr(admission, "RETRY_S", 0.05)
    monkeypatch.setattr(admission, "RETRY_MAX_S", 0.1)


@pytest.mark.usefixtures("soon")
def test_a_delete_that_one_disk_does_not_take_is_applied_once(tmp_path: Path) -> None:
    disks = FaultyDisk(syncs=False), FaultyDisk(syncs=False)
    bucket, paths = tmp_path / "bucket", [tmp_path / "a", tmp_path / "b"]
    with Node(paths, disks=disks, bucket=bucket, hang_s=5.0) as node:
        for keys in (A, B):
            node.put(keys, durable=True, wait_s=5.0)
        etcd, engine, buried = Etcd(), Engine(), list[int]()
        kept = kept_of(node, etcd, engine, None)
        node.run(kept.start())
        bury = node.write_behind.bury

        async def counted(
            namespaces: Collection[NamespaceId], keys: Sequence[BlockKey] | None
        ) -> None:
            buried.append(len(keys or ()))
            await bury(namespaces, keys)

        node.write_behind.bury = counted  # type: ignore[method-assign]
        disks[0].fault = lambda call: failing(call, errno.EIO)(call)
        etcd.keep(SPEC.id, A[8:])
        etcd.keep(SPEC.id, B[12:])
        etcd.reads = 0
        node.run(run_for(kept, 0.5))
        assert etcd.reads > 5
        assert node.get(A) == 8
        assert node.get(B) == 12  # one that fails keeps no other back
        node.put(A, 8, 16)  # it is computed again
        node.run(run_for(kept, 0.2))
        assert node.get(A) == 16
        assert buried == [8, 4]
        assert tombstones_in(bucket) == 2
        assert len(node.store.deletes._lingering) == 2
        assert "applied" not in node.metrics.totals().get("fleet_deletes", {})

        disks[0].fault = None
        assert node.file is not None
        first = node.file.devices[0]
        node.until(lambda: first.state is DeviceState.OK)
        node.run(run_for(kept, 0.2))
        assert etcd.renewed
        assert node.get(A) == 16
        assert buried == [8, 4]
        assert tombstones_in(bucket) == 2
    with Node(paths, disks=[FaultyDisk(syncs=False) for _ in paths]) as node:
        node.recall()
        assert node.get(B) == 12  # the disk that failed has its tombstone


@pytest.mark.usefixtures("soon")
def test_who_was_away_for_too_long_drops_its_files_once(tmp_path: Path) -> None:
    note = AppliedDeletes(tmp_path, "default")
    note.write(5, ["another"])
    with Node(tmp_path / "a") as node:
        node.put(A, durable=True, wait_s=5.0)
        etcd, engine = Etcd(), Engine()
        kept, read = kept_of(node, etcd, engine, note), etcd.read

        async def refused(after: int) -> Found:
            if after != 1 << 62:
                raise Unavailable("no endpoint answers")
            return await read(after)

        etcd.read = refused  # type: ignore[method-assign]
        node.run(run_for(kept, 0.1))
        assert node.get(A) == 0
        node.put(A)
        node.run(run_for(kept, 0.1))
        assert node.get(A) == 16
        etcd.read = read  # type: ignore[method-assign]
        node.run(run_for(kept, 0.1))
        assert kept.current
        assert node.get(A) == 16


@pytest.mark.usefixtures("soon")
def test_who_was_in_another_fleet_for_too_long_drops_its_files(tmp_path: Path) -> None:
    AppliedDeletes(tmp_path, "default").write(5, ["gone since"])
    AppliedDeletes(tmp_path, "another").write(3, ["there"])
    with Node(tmp_path / "a") as node:
        node.put(A, durable=True, wait_s=5.0)
        kept = kept_of(node, Etcd(), Engine(), AppliedDeletes(tmp_path, "default"))
        node.run(kept.start())
        assert kept.current
        assert node.get(A) == 0


@pytest.mark.usefixtures("soon")
def test_who_joins_another_fleet_keeps_its_files(tmp_path: Path) -> None:
    AppliedDeletes(tmp_path, "another").write(3, ["there"])
    with Node(tmp_path / "a") as node:
        node.put(A, durable=True, wait_s=5.0)
        kept = kept_of(node, Etcd(), Engine(), AppliedDeletes(tmp_path, "default"))
        node.run(kept.start())
        assert node.get(A) == 16


# ---- the token -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [True, False], ids=["emptied", "only-its-key"])
def test_who_is_registered_anew_renews_its_token_at_once(tmp_path: Path, *, lost: bool) -> None:
    etcd, engine, note = Etcd(), Engine(), AppliedDeletes(tmp_path, "default")
    with Node(tmp_path / "a") as node:
        node.put(A, durable=True, wait_s=5.0)
        kept = kept_of(node, etcd, engine, note)
        node.run(kept.start())
        etcd.renewed, engine.claims = "", 2
        if lost:
            etcd.revision = 3
        node.run(kept.start())
        assert kept.current
        found = note.read()
        assert found is not None
        assert (found.revision, found.tokens) == (etcd.revision, [etcd.renewed])
    with Node(tmp_path / "a") as node:  # and so a restart keeps what it has
        node.recall()
        kept = kept_of(node, etcd, engine, note)
        node.run(kept.start())
        assert node.get(A) == 16


@pytest.mark.parametrize("lost", [True, False], ids=["emptied", "only-its-key"])
def test_a_token_that_could_not_be_renewed_is_renewed_later(tmp_path: Path, *, lost: bool) -> None:
    etcd, engine, note = Etcd(), Engine(), AppliedDeletes(tmp_path, "default")
    with Node(None) as node:
        kept, renew = kept_of(node, etcd, engine, note), etcd.renew
        node.run(kept.start())

        async def refused(node: NodeId, token: str) -> None:
            raise Unavailable("no endpoint answers")

        etcd.renewed, etcd.renew = "", refused  # type: ignore[method-assign]
        if lost:
            etcd.revision = 3
        else:
            etcd.keep(SPEC.id, A[:1])
        assert not node.run(kept._try())
        etcd.renew = renew  # type: ignore[method-assign]
        assert node.run(kept._try())
        found = note.read()
        assert found is not None
        assert (found.revision, found.tokens) == (etcd.revision, [etcd.renewed])


# ---- a namespace that nobody has registered ------------------------------------------------------


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("how", ["told", "kept", "kept-everything"])
def test_a_delete_is_not_done_while_a_directory_that_may_have_its_blocks_is_away(
    tmp_path: Path, how: str
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with Node(paths) as node:
        node.put(A[:1], parts=(FULL,), durable=True, wait_s=5.0)
        block = node.planner.index.by_key(A[0])
        assert block is not None
        frame = block.records[0].frame
        assert frame is not None
        home = frame.extent.mount.device.path
    home.rename(tmp_path / "away")
    home.mkdir()
    with Node(paths, registers=False) as node:
        assert not list(node.planner.index.namespaces)
        if how == "told":
            with pytest.raises(Unavailable, match="out of use"):
                node.run(node.store.lender("1" * 16).delete(SPEC.id, A[:1]))
        else:
            etcd = Etcd()
            etcd.keep(*((SPEC.id, A[:1]) if how == "kept" else (None, None)))
            kept = kept_of(node, etcd, Engine(), None)
            assert not node.run(kept._try())
        home.rmdir()
        (tmp_path / "away").rename(home)
        assert node.file is not None
        devices = node.file.devices
        node.until(lambda: all(each.state is DeviceState.OK for each in devices))
        if how != "told":
            assert node.run(kept._try())
        node.recall()
        assert node.planner.index.get(SPEC.id, A[0]) is None


def test_a_delete_for_which_there_was_no_thread_is_done_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with Node(tmp_path / "kv") as node:
        node.put(A, 0, 4, parts=(FULL,))
        assert node.flush()
        assert node.write_behind.file is not None
        (device,) = node.write_behind.file.devices
        assert device.mount is not None
        burial = node.store.deletes.burial(SPEC.id, A[:2])
        with monkeypatch.context() as patch:
            patch.setattr(device.mount.tier._executor, "submit", refused)
            with pytest.raises(Unavailable, match="takes no work"):
                node.run(burial.run())
        assert device.state is not DeviceState.OK
        for _ in range(100):
            if device.state is DeviceState.OK:
                break
            node.run(asyncio.sleep(0.1))
        assert node.run(burial.run()) == 2
        assert not device.missed


class EtcdMembers(Engine):
    """The same, as a fleet has it: see `KeepsDeletes`."""

    doubtful: Collection[NodeId] = ()

    def __init__(self, etcd: Etcd) -> None:
        super().__init__()
        self._etcd = etcd

    def deletes_of(self, tenant: TenantId) -> Etcd:
        return self._etcd

    async def refresh(self) -> None: ...

    def settling(self) -> Callable[[], bool]:
        return lambda: True


def test_a_tenant_that_has_left_hears_of_no_registration(sim: Node) -> None:
    members = EtcdMembers(Etcd())
    peers = Peers(None, NODE, sim.metrics, sim.now)  # type: ignore[arg-type]
    here = TenantInFleet(Tenant("late", None, sim.store, sim.metrics), Lenders(), "1" * 16)
    here.join(NODE, TenantPeers(peers, sim.metrics, sim.now), dict)

    async def test() -> None:
        await here.apply_deletes(members, NODE, "fleet", None)  # type: ignore[arg-type]
        assert here.kept is not None
        assert members.told == [here.kept.look]
        assert sim.store.deletes.settling == members.settling
        await here.close()
        assert members.told == []

    sim.run(test())
