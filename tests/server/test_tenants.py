"""Tenants of one daemon: a store, sockets and files each; none sees anything of another."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.model.block import SALTED
from kvstore.model.errors import ConfigError, InvalidRequest, Unauthorized
from kvstore.model.tenant import Role, tenant_id
from kvstore.settings import load_settings
from kvstore.store.tenants import check_left_over, settings_of_tenant
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.cli.run import kvstore
from tests.server.test_credentials import Issuer

TENANTS = (
    "tenants.acme.dram.guaranteed=16MiB",
    "tenants.acme.file.guaranteed=64MiB",
    "tenants.beta.dram.guaranteed=16MiB",
    "tenants.beta.file.guaranteed=64MiB",
)
NAMESPACE = sample_namespace()
KEYS = sample_keys("tenants", 8)
RECORDS = sample_records(KEYS)


def target_of(daemon: Daemon, tenant: str) -> str:
    return f"unix:{daemon.socket.parent / tenant / 'kvstore.sock'}"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(*TENANTS) as daemon:
        yield daemon.start()
        daemon.stop()


def put(target: str) -> None:
    with Client(target) as client:
        client.register(NAMESPACE)
        assert client.put(NAMESPACE.id, KEYS, RECORDS, durable=True).durable


def test_what_one_tenant_stores_no_other_finds(daemon: Daemon) -> None:
    put(target_of(daemon, "acme"))
    with Client(target_of(daemon, "acme")) as acme, Client(target_of(daemon, "beta")) as beta:
        for client in (acme, beta):
            client.register(NAMESPACE)
        assert acme.get(NAMESPACE.id, KEYS) == RECORDS
        assert beta.get(NAMESPACE.id, KEYS) == [None] * len(KEYS)
        assert beta.match(NAMESPACE.id, KEYS).hit_blocks == 0
        assert beta.admin.scan(limit=10) == []
        assert beta.admin.outcomes(limit=10) == []
        assert beta.admin.stats()["blocks"] == 0
        assert beta.admin.clear() == 0
        assert acme.match(NAMESPACE.id, KEYS).hit_blocks == len(KEYS)
        assert acme.admin.clear() == len(KEYS)


def asked_blocks(client: Client) -> float:
    """Return what the history says that was asked for."""
    history = client.admin.history(1)
    asked = list(history.columns).index("lookup_blocks")
    return sum(sample.values[asked] for sample in history.samples)


def test_what_one_tenant_did_no_other_sees(daemon: Daemon) -> None:
    put(target_of(daemon, "acme"))
    with Client(target_of(daemon, "acme")) as acme, Client(target_of(daemon, "beta")) as beta:
        acme.register(NAMESPACE)
        acme.release(acme.acquire(NAMESPACE.id, KEYS, session_id="acme's").lease_id)
        until(lambda: asked_blocks(acme) == len(KEYS))
        until(lambda: beta.admin.history(1).samples)
        assert asked_blocks(beta) == 0
        for client, there in ((acme, True), (beta, False)):
            blocks = sum(run.blocks for run in client.admin.tree().runs)
            assert blocks == len(KEYS) * there
            assert bool(client.admin.slow().items) is there
            assert client.admin.conversations().known == there
    with Client(daemon.target, arena=False) as operator, pytest.raises(Unauthorized):
        operator.admin.tree()


def test_a_lease_of_one_tenant_is_unknown_to_another(daemon: Daemon) -> None:
    put(target_of(daemon, "acme"))
    with Client(target_of(daemon, "acme")) as acme, Client(target_of(daemon, "beta")) as beta:
        acme.register(NAMESPACE)
        beta.register(NAMESPACE)
        lease = acme.acquire(NAMESPACE.id, KEYS)
        beta.release(lease.lease_id)
        assert acme.admin.stats()["leases"] == 1
        assert acme.release(lease.lease_id)


def test_blocks_survive_a_kill_in_the_tenants_own_directory(daemon: Daemon) -> None:
    put(target_of(daemon, "acme"))
    daemon.kill()
    directories = daemon.directory / "file/tenants"
    assert {each.name for each in directories.iterdir()} == {
        tenant_id("acme").hex(),
        tenant_id("beta").hex(),
    }
    daemon.start()
    with Client(target_of(daemon, "acme")) as acme, Client(target_of(daemon, "beta")) as beta:
        acme.register(NAMESPACE)
        beta.register(NAMESPACE)
        assert acme.get(NAMESPACE.id, KEYS, wait_s=5) == RECORDS
        assert beta.get(NAMESPACE.id, KEYS, wait_s=1) == [None] * len(KEYS)


def test_verify_finds_the_directories_of_all_tenants(daemon: Daemon) -> None:
    for tenant in ("acme", "beta"):
        put(target_of(daemon, tenant))
    daemon.stop()
    root = str(daemon.directory / "file")
    ran = subprocess.run(
        daemon.command("verify", root, "--json"), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(told) == 2
    assert all(tenant_id(name).hex() in ran.stdout for name in ("acme", "beta"))
    daemon.start()


def test_the_daemons_own_socket_is_the_operators(daemon: Daemon) -> None:
    put(target_of(daemon, "acme"))
    with Client(daemon.target, arena=False) as operator:
        assert operator.admin.whoami().role is Role.ADMIN
        stats = operator.admin.stats()
        assert set(stats["tenants"]) == {"acme", "beta"}
        assert stats["blocks"] == stats["tenants"]["acme"]["blocks"] == len(KEYS)
        assert any(each.key == "tenants.acme.weight" for each in operator.admin.settings())
        with pytest.raises(Unauthorized, match="socket of its own"):
            operator.match(NAMESPACE.id, KEYS)
    with Client(daemon.target) as engine, pytest.raises(Unauthorized, match="socket of its own"):
        engine.connect()


def test_a_tenants_socket_gives_no_view_of_the_daemon(daemon: Daemon) -> None:
    with Client(target_of(daemon, "acme")) as acme:
        assert acme.admin.whoami()[::2] == ("acme", Role.OPERATOR)
        for asked in (acme.admin.settings, acme.admin.log_lines):
            with pytest.raises(Unauthorized):
                asked()
        assert "tenants" not in acme.admin.stats()


def test_metrics_have_the_tenant_as_label(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start("server.metrics_open=true")
    put(target_of(daemon, "acme"))
    url = f"http://127.0.0.1:{daemon.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    written = re.findall(r'kvstore_tier_bytes_total\{.*direction="write".*tenant="(\w+)".*\}', text)
    assert set(written) == {"acme"}
    assert text.count("# TYPE kvstore_sessions gauge") == 1
    with urllib.request.urlopen(f"{url}?name[]=kvstore_sessions", timeout=5) as answer:
        told = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    assert len(told) == 2
    assert all(line.startswith("kvstore_sessions{tenant=") for line in told)


def test_without_credentials_the_http_port_tells_nothing_of_a_tenant(daemon: Daemon) -> None:
    put(target_of(daemon, "acme"))
    url = f"http://127.0.0.1:{daemon.metrics_port}"
    for path in ("/metrics", "/metrics?tenant=acme", "/metrics?tenant=nobody"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}{path}", timeout=5)
        told = refused.value.read().decode()
        assert (refused.value.code, "set security.tokens" in told) == (401, True)
    with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
        assert answer.read() == b"ok\n"
    told = kvstore("status", "--target", daemon.target).output
    assert "/metrics takes a credential of the role operator or admin" in told


def test_on_loopback_a_token_reads_the_metrics_of_its_tenant_or_of_all(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    tokens = {
        "operator of acme": issuer.issue(Role.OPERATOR, tenant="acme"),
        "admin": issuer.issue(Role.ADMIN),
    }

    def status(path: str, token: str = "") -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{daemon.metrics_port}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {tokens[token]}")
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    with Daemon(*TENANTS, f"security.tokens={issuer.path}", file=False) as daemon:
        daemon.start()
        pages = ("/metrics", "/metrics?tenant=acme", "/metrics?tenant=beta")
        assert [status(page) for page in pages] == [401, 401, 401]
        assert [status(page, "operator of acme") for page in pages] == [401, 200, 401]
        assert [status(page, "admin") for page in pages] == [200, 200, 200]


def test_sockets_and_directories_have_their_modes(daemon: Daemon) -> None:
    directory = daemon.socket.parent / "acme"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for name in ("kvstore.sock", "kvstore.sock.arena", "kvstore.sock.calls"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


def test_default_named_beside_others_has_the_daemons_own_socket() -> None:
    more = ("tenants.default.dram.guaranteed=16MiB", "tenants.default.file.guaranteed=64MiB")
    with Daemon(*TENANTS, *more) as daemon:
        put(daemon.start().target)
        assert any((daemon.directory / "file").glob("*.segment"))
        with Client(daemon.target) as client:
            assert client.admin.stats()["tenants"]["default"]["blocks"] == len(KEYS)
        daemon.stop()


def test_blocks_of_a_time_without_tenants_are_not_forgotten_silently(tmp_path: Path) -> None:
    (tmp_path / f"{1:016x}-{1:016x}.segment").touch()
    settings = load_settings(None, [f"file.path={tmp_path}", *TENANTS])
    with pytest.raises(ConfigError, match=r"tenants\.default"):
        check_left_over(settings)
    check_left_over(load_settings(None, [f"file.path={tmp_path}"]))


def test_a_tenant_that_requires_salt_takes_no_other_namespace() -> None:
    with Daemon(*TENANTS, "tenants.acme.require_salt=true", file=False) as daemon:
        daemon.start()
        salted = replace(NAMESPACE, identity=(*NAMESPACE.identity, SALTED))
        assert salted.salted
        with Client(target_of(daemon, "acme")) as acme:
            with pytest.raises(InvalidRequest, match="TenantSalt"):
                acme.register(NAMESPACE)
            acme.register(salted)
            assert acme.put(salted.id, KEYS, RECORDS).committed == len(KEYS)
        with Client(target_of(daemon, "beta")) as beta:
            beta.register(NAMESPACE)


def test_a_tenants_settings_are_its_own_part_of_the_daemons() -> None:
    settings = load_settings(None, ["file.path=/tmp/a", "object.url=s3://bucket/kv/", *TENANTS])
    own = settings_of_tenant(settings, settings.tenants[0])
    name = tenant_id("acme").hex()
    assert own.dram.capacity_bytes == 16 << 20
    assert own.file.paths == (f"/tmp/a/tenants/{name}",)
    assert own.object.url == f"s3://bucket/kv/t/{name}"
    assert own.tenants == ()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_another_user_reaches_only_its_own_tenant() -> None:
    owned = ("tenants.acme.unix.uid=4711", "tenants.beta.unix.uid=4712")
    with Daemon(*TENANTS, *owned) as daemon:
        daemon.directory.chmod(0o711)
        daemon.socket.parent.mkdir()
        daemon.socket.parent.chmod(0o711)
        daemon.start()
        assert outcome_as(4711, target_of(daemon, "acme")) == "stored"
        assert outcome_as(4712, target_of(daemon, "acme")) == "Unauthorized"
        assert outcome_as(65534, target_of(daemon, "acme")) == "Unauthorized"
        daemon.stop()


def outcome_as(uid: int, target: str) -> str:
    """Return what a process of another user gets when it puts blocks."""
    code = (
        "import os, sys\n"
        "from kvstore import Client\n"
        "from tests.server.test_tenants import KEYS, NAMESPACE, RECORDS\n"
        f"os.setgid({uid}); os.setuid({uid})\n"
        "try:\n"
        f"    with Client({target!r}) as client:\n"
        "        client.register(NAMESPACE)\n"
        "        done = client.put(NAMESPACE.id, KEYS, RECORDS)\n"
        "    print('stored' if done.committed else 'refused')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    return ran.stdout.strip() or ran.stderr
