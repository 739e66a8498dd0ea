"""Tenants come and go while the daemon runs: `kvstore tenant add|set|list|delete`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from kvstore import Client
from kvstore.daemon import wire_store
from kvstore.metrics import Metrics
from kvstore.model.errors import ConfigError, InvalidRequest, KVStoreError, Unauthorized
from kvstore.model.tenant import tenant_id
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.server.tenant_admin import TenantAdmin, least_erased
from kvstore.settings import load_settings
from kvstore.store.erasure import places_of
from kvstore.store.live_settings import LiveSettings
from kvstore.store.tenants import Tenant, Tenants
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.tier.file import DiskFailed
from tests.server.every_method import OPTIONS

NAMESPACE = sample_namespace()
KEYS = sample_keys("admin", 8)
RECORDS = sample_records(KEYS)
TENANTS = ("tenants.first.dram.guaranteed=16MiB", "tenants.first.file.guaranteed=64MiB")
SMALL = ("dram.guaranteed=16MiB", "file.guaranteed=64MiB")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(*TENANTS, "server.metrics_open=true") as daemon:
        yield daemon.start()
        daemon.stop()


def kvstore(daemon: Daemon, *arguments: str) -> str:
    ran = subprocess.run(
        daemon.command("tenant", *arguments, "--target", daemon.target),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_tenant_is_added_used_changed_and_deleted(daemon: Daemon) -> None:
    told = json.loads(kvstore(daemon, "add", "late", *SMALL, "--json"))
    with Client(f"unix:{told['socket']}") as client:
        client.register(NAMESPACE)
        assert client.put(NAMESPACE.id, KEYS, RECORDS, durable=True).durable
        assert client.get(NAMESPACE.id, KEYS) == RECORDS
    listed = json.loads(kvstore(daemon, "list", "--json"))
    assert set(listed) == {"first", "late"}
    assert listed["late"]["blocks"] == len(KEYS)

    changed = json.loads(kvstore(daemon, "set", "late", "weight=3", "--json"))["changed"]
    assert changed == [{"key": "tenants.late.weight", "before": "1.0", "after": "3.0"}]

    directory = daemon.directory / "file/tenants" / tenant_id("late").hex()
    assert directory.exists()
    gone = json.loads(kvstore(daemon, "delete", "late", "--yes", "--json"))
    assert gone == {"name": "late", "blocks": len(KEYS), "erased": "none", "left": ""}
    assert not directory.exists()
    assert set(json.loads(kvstore(daemon, "list", "--json"))) == {"first"}
    with Client(f"unix:{told['socket']}") as client, pytest.raises(KVStoreError):
        client.connect()


def test_a_deleted_tenant_that_comes_again_finds_nothing(daemon: Daemon) -> None:
    for _ in range(2):
        path = json.loads(kvstore(daemon, "add", "late", *SMALL, "--json"))["socket"]
        with Client(f"unix:{path}") as client:
            client.register(NAMESPACE)
            assert client.match(NAMESPACE.id, KEYS).hit_blocks == 0
            assert client.put(NAMESPACE.id, KEYS, RECORDS, durable=True).durable
        kvstore(daemon, "delete", "late", "--yes")


def test_a_tenant_of_the_settings_that_was_deleted_can_be_added_again(daemon: Daemon) -> None:
    kvstore(daemon, "delete", "first", "--yes")
    path = json.loads(kvstore(daemon, "add", "first", *SMALL, "--json"))["socket"]
    with Client(f"unix:{path}") as client:
        client.register(NAMESPACE)
        assert client.put(NAMESPACE.id, KEYS, RECORDS, durable=True).durable
        assert client.get(NAMESPACE.id, KEYS) == RECORDS


def test_a_deletion_goes_on_when_who_asked_for_it_is_gone(daemon: Daemon) -> None:
    path = json.loads(kvstore(daemon, "add", "late", *SMALL, "--json"))["socket"]
    go_on = threading.Event()

    def nothing_yet() -> Iterator[pb.PutRequest]:
        go_on.wait(20)
        yield from ()

    def is_running() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.metrics_port}/metrics") as answer:
            return b'kvstore_rpcs_running{tenant="late"} 1.0' in answer.read()

    with channel(path) as late, channel(daemon.socket) as own:
        put = KVStoreStub(late).Put.future(nothing_yet())  # the deletion waits for it
        until(is_running)
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            KVStoreStub(own).DeleteTenant(pb.DeleteTenantRequest(name="late"), timeout=0.5)
        go_on.set()
        put.cancel()
    directory = daemon.directory / "file/tenants" / tenant_id("late").hex()
    until(lambda: not directory.exists(), 20)
    until(lambda: set(json.loads(kvstore(daemon, "list", "--json"))) == {"first"})


def channel(path: Path | str) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{path}", options=OPTIONS)


def test_what_cannot_be_added_changes_nothing(daemon: Daemon) -> None:
    with Client(daemon.target, arena=False) as operator:
        for name, settings, error, says in (
            ("first", [], InvalidRequest, "already"),
            ("default", [], InvalidRequest, "already"),
            ("Bad", [], InvalidRequest, "no tenant's name"),
            ("late", ["dram.guaranteed=1GiB"], ConfigError, "together are guaranteed"),
            ("late", ["colour=red"], ConfigError, "unknown key"),
        ):
            with pytest.raises(error, match=says):
                operator.admin.add_tenant(name, settings)
        assert set(operator.admin.stats()["tenants"]) == {"first"}
        with pytest.raises(InvalidRequest, match="no tenant nobody"):
            operator.admin.delete_tenant("nobody")


def test_only_the_operator_adds_and_deletes(daemon: Daemon) -> None:
    with Client(f"unix:{daemon.socket.parent / 'first/kvstore.sock'}") as client:
        with pytest.raises(Unauthorized):
            client.admin.add_tenant("mine")
        with pytest.raises(Unauthorized):
            client.admin.delete_tenant("first")


def test_a_daemon_without_tenants_says_how_to_have_some() -> None:
    with Daemon(file=False) as daemon, Client(daemon.start().target) as client:
        with pytest.raises(ConfigError, match="in its settings"):
            client.admin.add_tenant("late")
        assert "tenants" not in client.admin.stats()


def test_room_that_others_borrowed_is_given_back_to_a_tenant_that_comes() -> None:
    namespace = sample_namespace("large", 1 << 20)
    with Daemon("dram.capacity=128MiB", *TENANTS[:1], file=False) as daemon:
        daemon.start()
        with Client(f"unix:{daemon.socket.parent / 'first/kvstore.sock'}") as first:
            first.register(namespace)
            number = itertools.count()

            def has_borrowed() -> bool:
                keys = sample_keys(f"borrowed {next(number)}", 8)
                first.put(namespace.id, keys, [bytes(1 << 20)] * 8, wait_s=5)
                return bool(first.admin.stats()["dram"]["used_bytes"] > 90 << 20)

            until(has_borrowed)
            with Client(daemon.target, arena=False) as operator:
                path = operator.admin.add_tenant("late", ["dram.guaranteed=64MiB"])
            with Client(f"unix:{path}") as late:
                late.register(namespace)
                keys = sample_keys("late", 56)
                for at in range(0, 56, 8):
                    done = late.put(
                        namespace.id, keys[at : at + 8], [bytes(1 << 20)] * 8, wait_s=5,
                        first_block=at, parent=keys[at - 1] if at else None,
                    )  # fmt: skip
                    assert done.committed == 8
                assert late.match(namespace.id, keys).hit_blocks == len(keys)
        daemon.stop()


def test_an_erasure_is_no_more_than_the_least_of_its_places() -> None:
    assert least_erased(["backups", "forgotten"]) == "backups"
    assert least_erased(["forgotten", "backups", "none"]) == "backups"
    assert least_erased(["none", "forgotten"]) == "forgotten"
    assert least_erased(["none", "none"]) == least_erased([]) == "none"


def test_settings_that_change_while_a_tenant_comes_stay_changed() -> None:
    certificates = "tenants.first.certificates=engine.example"
    settings = load_settings(None, ["file.path=", *TENANTS[:1], certificates])

    async def main() -> None:
        tenants = Tenants(settings, wire_store, Metrics())
        config = LiveSettings(settings, tenants)
        changes: list[asyncio.Task[object]] = []

        async def host(_: Tenant) -> Path:
            change = config.change(["tenants.first.certificates="])
            changes.append(asyncio.create_task(change))
            await asyncio.wait(changes, timeout=0.2)
            return Path("nowhere")

        async def unhost(_: str, __: float) -> None: ...

        await tenants.start()
        admin = TenantAdmin(tenants, config, host, unhost)
        await admin.add("late", ["dram.guaranteed=16MiB"])
        await asyncio.gather(*changes)
        assert [each.names for each in config.settings.tenants] == [(), ()]
        await tenants.close(0.0)

    asyncio.run(main())


def test_nothing_of_a_tenant_is_deleted_before_its_store_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        settings = load_settings(None, [f"file.path={tmp_path}", *TENANTS])
        tenants = Tenants(settings, wire_store, Metrics(), partial(places_of, None))

        async def host(_: Tenant) -> Path:
            return Path("nowhere")

        async def unhost(_: str, __: float) -> None: ...

        await tenants.start()
        admin = TenantAdmin(tenants, LiveSettings(settings, tenants), host, unhost)
        (tenant,) = tenants
        close, closed = tenant.store.close, []
        directory = tmp_path / "tenants" / tenant_id("first").hex()

        async def fails(*_: float, **__: bool) -> None:
            raise RuntimeError("can't start new thread")

        async def notes(drain_s: float, *, retire: bool) -> None:
            assert directory.exists()
            await close(drain_s, retire=retire)
            closed.append(True)

        for step in ("end_uploads", "close"):
            with monkeypatch.context() as patch:
                patch.setattr(tenant.store, step, fails)
                for _ in range(2):
                    with pytest.raises(RuntimeError):
                        await admin.delete("first")
            assert directory.exists()
        monkeypatch.setattr(tenant.store, "close", notes)
        assert await admin.delete("first") == (0, "none", "")
        assert closed == [True]
        assert not directory.exists()
        await tenants.close(0.0)

    asyncio.run(main())


def test_a_tenant_whose_disk_fails_under_the_close_is_erased_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        settings = load_settings(None, [f"file.path={tmp_path}", *TENANTS])
        tenants = Tenants(settings, wire_store, Metrics(), partial(places_of, None))

        async def host(_: Tenant) -> Path:
            return Path("nowhere")

        async def unhost(_: str, __: float) -> None: ...

        async def fails(*_: float, **__: bool) -> None:
            raise DiskFailed("fdatasync: Input/output error")

        await tenants.start()
        admin = TenantAdmin(tenants, LiveSettings(settings, tenants), host, unhost)
        (tenant,) = tenants
        close = tenant.store.close
        monkeypatch.setattr(tenant.store, "close", fails)
        directory = tmp_path / "tenants" / tenant_id("first").hex()
        assert directory.exists()
        assert await admin.delete("first") == (0, "none", "")
        assert not directory.exists()
        assert tenant.store.arena.reserved_nbytes == 0
        assert tenants.find("first") is tenants.file.part("first") is None
        with contextlib.suppress(DiskFailed):
            await close(0.0)
        await tenants.close(0.0)

    asyncio.run(main())
