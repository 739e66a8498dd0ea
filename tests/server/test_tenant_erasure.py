"""A tenant is deleted in every place, or stays: refused, and to be deleted again."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.daemon import wire_store
from kvstore.metrics import Metrics
from kvstore.model.errors import InvalidRequest, KVStoreError
from kvstore.model.tenant import tenant_id
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.settings import ObjectSettings, load_settings
from kvstore.store.live_settings import LiveSettings
from kvstore.store.tenants import Tenant, Tenants
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.seaweed import Seaweed
from kvstore.testing.wait import until
from kvstore.tier.object.connect import connect
from tests.cli.run import kvstore

NAMESPACE = sample_namespace()
KEYS = sample_keys("erasure", 40)
NAMES = ("acme", "beta")
TENANTS = (
    *(f"tenants.{name}.dram.guaranteed=16MiB" for name in NAMES),
    *(f"tenants.{name}.file.guaranteed=64MiB" for name in NAMES),
)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    with Seaweed() as server:
        server.start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def daemon(s3: Seaweed) -> Iterator[Daemon]:
    """Encrypts what it stores, and uploads soon."""
    of_bucket = {**s3.settings(), "timeout_s": 1, "believed_s": 1}
    settings = [f"object.{key}={str(value).lower()}" for key, value in of_bucket.items()]
    with (
        root_key_in_memory() as root,
        Daemon(*TENANTS, *settings, f"security.root_key_file={root}") as daemon,
    ):
        yield daemon.start()


def socket_of(daemon: Daemon, tenant: str) -> str:
    return f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}"


def put(daemon: Daemon, tenant: str) -> None:
    """Store something in every tier."""
    with Client(socket_of(daemon, tenant)) as client:
        client.register(NAMESPACE)
        assert client.put(NAMESPACE.id, KEYS, sample_records(KEYS), durable=True).durable

        def uploaded() -> bool:
            client.admin.flush()
            return int(client.admin.stats()["object"]["physical_bytes"]) > 100_000

        until(uploaded, 30)


async def _names(bucket: Any) -> list[str]:
    return [each.name async for page in bucket.pages("") for each in page]


def in_bucket(s3: Seaweed, tenant: str) -> list[str]:
    """Return what the bucket has of a tenant."""
    of_bucket = s3.settings(f"test/t/{tenant_id(tenant).hex()}")
    return asyncio.run(_names(connect(ObjectSettings(**of_bucket))))


def delete(daemon: Daemon, tenant: str) -> tuple[int, dict[str, Any]]:
    done = kvstore("tenant", "delete", tenant, "--yes", "--json", "--target", daemon.target)
    return done.exit_code, json.loads(done.output)


def test_a_tenant_whose_bucket_does_not_answer_stays_to_be_deleted_again(
    daemon: Daemon, s3: Seaweed
) -> None:
    for tenant in NAMES:
        put(daemon, tenant)
    directory = daemon.directory / "file/tenants" / tenant_id("acme").hex()
    assert s3._process is not None
    s3._process.send_signal(signal.SIGSTOP)
    code, told = delete(daemon, "acme")
    assert (code, told["erased"]) == (1, "none"), "the keys in the bucket are there"
    assert told["left"].startswith("its objects in the bucket")
    assert not directory.exists()
    with Client(socket_of(daemon, "acme")) as client, pytest.raises(KVStoreError):
        client.connect()
    with Client(daemon.target, arena=False) as operator:
        with pytest.raises(InvalidRequest, match="is being deleted"):
            operator.admin.add_tenant("acme", ["dram.guaranteed=16MiB"])
        assert set(operator.admin.stats()["tenants"]) == {"beta"}
    assert "acme: is being deleted" in kvstore("tenant", "list", "--target", daemon.target).output

    s3._process.send_signal(signal.SIGCONT)
    assert any("/keys/" in name or name.startswith("keys/") for name in in_bucket(s3, "acme"))
    code, again = delete(daemon, "acme")
    assert (code, again) == (0, {**told, "erased": "backups", "left": ""})
    assert in_bucket(s3, "acme") == []
    assert in_bucket(s3, "beta") != []
    assert "acme" not in kvstore("tenant", "list", "--target", daemon.target).output
    with Client(daemon.target, arena=False) as operator:
        operator.admin.add_tenant("acme", ["dram.guaranteed=16MiB", "file.guaranteed=64MiB"])
    with Client(socket_of(daemon, "acme")) as client:
        client.register(NAMESPACE)
        assert client.get(NAMESPACE.id, KEYS, wait_s=2) == [None] * len(KEYS)


class Recorded:
    """A place that notes what is done there, and fails on demand."""

    def __init__(self, name: str, calls: list[str], erased: str) -> None:
        self.name = name
        self.fails = ""
        self._calls, self._erased = calls, erased

    async def destroy_keys(self) -> str:
        self._note("destroy_keys")
        return self._erased

    async def empty(self) -> None:
        self._note("empty")

    def _note(self, call: str) -> None:
        self._calls.append(f"{call} {self.name}")
        if call == self.fails:
            raise OSError(f"{call}: Input/output error")


def test_every_key_is_destroyed_before_anything_is_deleted_and_failures_count() -> None:
    settings = load_settings(None, ["file.path=", "tenants.acme.dram.guaranteed=16MiB"])
    calls: list[str] = []
    one, two = Recorded("one", calls, "forgotten"), Recorded("two", calls, "backups")

    async def host(_: Tenant) -> Path:
        raise AssertionError("nothing is added")

    async def unhost(_: str, __: float) -> None: ...

    async def main() -> None:
        tenants = Tenants(settings, wire_store, Metrics(), lambda own, name: (one, two))
        admin = TenantAdmin(tenants, LiveSettings(settings, tenants), host, unhost)
        await tenants.start()
        one.fails = "destroy_keys"
        told = await admin.delete("acme")
        assert calls == ["destroy_keys one", "destroy_keys two", "empty two"]
        assert (told.erased, told.left) == ("none", "one (destroy_keys: Input/output error)")

        calls.clear()
        one.fails = "empty"
        told = await admin.delete("acme")
        assert calls == ["destroy_keys one", "destroy_keys two", "empty one", "empty two"]
        assert (told.erased, told.left) == ("backups", "one (empty: Input/output error)")

        one.fails = ""
        assert (await admin.delete("acme"))[1:] == ("backups", "")
        with pytest.raises(InvalidRequest, match="no tenant acme"):
            await admin.delete("acme")
        await tenants.close(0.0)

    asyncio.run(main())
