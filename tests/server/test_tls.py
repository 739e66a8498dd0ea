"""TLS is what is spoken over TCP, with the files as they are now, and only with right ones."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import Client
from kvstore.model.errors import ConfigError, Unauthorized, Unavailable
from kvstore.model.tenant import Principal, Role
from kvstore.settings import load_settings
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.cli.run import kvstore
from tests.server.every_method import ANSWERED, METHODS, OPTIONS, UNAUTHORIZED, ask, bearer
from tests.server.test_credentials import Issuer
from tests.tls import Authority, Files

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs openssl")


class Site:
    """A daemon that speaks TLS, and what its clients have."""

    def __init__(self, directory: Path, *overrides: str, mutual: bool) -> None:
        self.authority = Authority(directory / "ours")
        self.stranger = Authority(directory / "strangers")
        self.server = self.authority.issue("server")
        self.engine = self.authority.issue("engine", "engine.example")
        self.issuer = Issuer(directory)
        self.token = directory / "token"
        self.token.write_text(self.issuer.issue(Role.WRITER))
        settings = [f"tls.cert={self.server.cert}", f"tls.key={self.server.key}"]
        if mutual:
            ca = f"tls.client_ca={self.authority.ca}"
            settings += [ca, "tls.require_client_cert=true"]
        else:
            settings.append(f"security.tokens={self.issuer.path}")
        self.daemon = Daemon("server.listen=127.0.0.1:0", *settings, *overrides, file=False)

    def client(self, **more: Any) -> Client:
        return Client(self.daemon.address, **({"tls_ca": self.authority.ca} | more))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("tokens"), mutual=False)
    with site.daemon.start():
        yield site


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("mutual"), mutual=True)
    with site.daemon.start():
        yield site


def pair(files: Files) -> dict[str, Path]:
    return {"tls_cert": files.cert, "tls_key": files.key}


def test_a_token_over_tls_is_let_in(tokens: Site) -> None:
    space, keys = sample_namespace(), sample_keys("tls", 3)
    with tokens.client(token_file=tokens.token) as client:
        assert client.admin.whoami().role is Role.WRITER
        client.put(client.register(space), keys, sample_records(keys))
        assert client.get(space.id, keys) == sample_records(keys)
        with pytest.raises(Unauthorized, match="takes the role operator"):
            client.admin.clear()


def test_a_certificate_of_our_authority_is_let_in_by_its_name(mutual: Site) -> None:
    with mutual.client(**pair(mutual.engine)) as client:
        who = Principal("default", "certificate engine.example", Role.WRITER)
        assert client.admin.whoami() == who


def test_nobody_else_is(mutual: Site) -> None:
    foreign = mutual.stranger.issue("engine", "engine.example")
    for shown in ({}, pair(foreign)):
        with mutual.client(**shown) as client, pytest.raises(Unavailable):
            client.admin.whoami()


def test_no_method_is_answered_without_tls(tokens: Site, mutual: Site) -> None:
    for site in (tokens, mutual):
        with grpc.insecure_channel(site.daemon.address, options=OPTIONS) as channel:
            found = {name: ask(channel, name) for name in METHODS}
        assert ANSWERED not in found.values()


def test_no_method_is_answered_over_tls_without_a_token(tokens: Site) -> None:
    credentials = grpc.ssl_channel_credentials(tokens.authority.ca.read_bytes())
    with grpc.secure_channel(tokens.daemon.address, credentials, options=OPTIONS) as channel:
        assert {ask(channel, name) for name in METHODS} == {UNAUTHORIZED}
        right = bearer(tokens.token.read_text())
        assert ask(channel, "WhoAmI", right) == ANSWERED


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"server_name": "elsewhere.example"}, "of another name: see server_name"),
        ({"tls_ca": "stranger"}, "not of the authorities in tls_ca"),
        ({"tls_ca": None}, "no kvstore daemon answers"),
    ],
)
def test_a_client_believes_only_the_daemon_it_means(
    tokens: Site, told: dict[str, Any], words: str
) -> None:
    if told.get("tls_ca") == "stranger":
        told = {"tls_ca": tokens.stranger.ca}
    with tokens.client(**told) as client, pytest.raises(Unavailable, match=words):
        client.admin.ping()


def test_a_client_sends_no_token_in_the_clear(tokens: Site) -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        Client(tokens.daemon.address, token_file=tokens.token)
    with Client(tokens.daemon.target, token_file=tokens.token) as client:
        assert client.admin.whoami().name == "unix socket"  # which needs none


def test_commands_take_the_files_as_options_and_as_variables(
    tokens: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ("--target", tokens.daemon.address)
    files = ("--token-file", str(tokens.token), "--tls-ca", str(tokens.authority.ca))
    assert "role writer" in kvstore("whoami", *target, *files).output
    assert kvstore("whoami", *target).exit_code == 3
    monkeypatch.setenv("KVSTORE_TOKEN_FILE", str(tokens.token))
    in_the_clear = kvstore("whoami", *target)
    assert in_the_clear.exit_code == 2
    assert "in the clear" in in_the_clear.output
    monkeypatch.setenv("KVSTORE_TLS_CA", str(tokens.authority.ca))
    assert "role writer" in kvstore("whoami", *target).output
    assert kvstore("flush", *target).exit_code == 1
    assert kvstore("selftest", *target, "--json").exit_code in (0, 1)


def test_a_client_reads_its_token_again(tokens: Site, tmp_path: Path) -> None:
    path, before = tmp_path / "token", tokens.issuer.issue(Role.WRITER)
    path.write_text(before)
    with tokens.client(token_file=path) as client:
        until(lambda: _is_let_in(client), 5)
        first = client.admin.whoami().name
        path.write_text(tokens.issuer.issue(Role.READER))
        until(lambda: _is_let_in(client) and client.admin.whoami().name != first, 5)
        tokens.issuer.revoke(before)
        time.sleep(2.0)
        assert client.admin.whoami().role is Role.READER


def _is_let_in(client: Client) -> bool:
    try:
        client.admin.whoami()
    except Unauthorized:
        return False
    return True


def test_a_token_file_that_is_half_written_leaves_the_last_token_in_use(
    tokens: Site, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text(tokens.token.read_text())
    with tokens.client(token_file=path) as client:
        assert client.admin.whoami().role is Role.WRITER
        for spoilt in ("", None):
            path.unlink() if spoilt is None else path.write_text(spoilt)
            for _ in range(6):
                assert client.admin.whoami().role is Role.WRITER
                time.sleep(0.15)
        path.write_text(tokens.issuer.issue(Role.READER))
        until(lambda: _is_let_in(client) and client.admin.whoami().role is Role.READER, 5)


def test_a_file_without_a_token_is_an_error_that_says_so(tokens: Site, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path, words in ((tmp_path / "absent", "cannot be read"), (empty, "no token in it")):
        with tokens.client(token_file=path) as client, pytest.raises(Unauthorized, match=words):
            client.admin.ping()


def s_client(site: Site, *options: str) -> str:
    assert OPENSSL is not None
    done = subprocess.run(
        [OPENSSL, "s_client", "-connect", site.daemon.address, "-CAfile", str(site.authority.ca),
         "-alpn", "h2", *options],
        input="", capture_output=True, text=True, errors="replace", timeout=20, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@needs_openssl
def test_old_versions_of_tls_are_refused(tokens: Site) -> None:
    for version in ("-tls1_2", "-tls1_3"):
        assert "Verify return code: 0 (ok)" in s_client(tokens, version)
    for old in ("-tls1", "-tls1_1"):
        found = s_client(tokens, old, "-cipher", "ALL:@SECLEVEL=0")
        assert "Cipher is (NONE)" in found or "alert" in found


@needs_openssl
def test_a_new_certificate_is_served_without_a_restart_and_a_bad_one_is_not(tokens: Site) -> None:
    def serial() -> str:
        lines = s_client(tokens, "-showcerts").split("-----BEGIN CERTIFICATE-----")[1]
        return lines.partition("-----END")[0]

    first = serial()
    tokens.authority.issue("server")
    second = serial()
    assert second != first
    good = tokens.server.cert.read_bytes()
    tokens.server.cert.write_bytes(tokens.engine.cert.read_bytes())  # not of this key
    until(lambda: "certificate=not_reloaded" in tokens.daemon.output(), 5)
    assert serial() == second
    tokens.server.cert.write_bytes(good)
    assert serial() == second


def test_rotations_fail_no_call(tokens: Site) -> None:
    """Ten new pairs of the daemon while calls and streams run, each call counted."""
    space, keys = sample_namespace(), sample_keys("rotation", 8)
    with tokens.client(token_file=tokens.token) as client:
        client.put(client.register(space), keys, sample_records(keys))
        failed: list[Exception] = []
        calls = [0]
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                try:
                    client.match(space.id, keys)
                    assert client.get(space.id, keys) == sample_records(keys)
                except Exception as error:
                    failed.append(error)
                calls[0] += 2

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for _ in range(10):
            tokens.authority.issue("server")
            time.sleep(0.6)
        over.set()
        for worker in workers:
            worker.join()
    assert failed == []
    assert calls[0] > 100


def test_a_client_takes_a_new_certificate_of_its_own_without_failing_a_call(mutual: Site) -> None:
    files = mutual.authority.issue("rotating", "before.example")
    with mutual.client(**pair(files)) as client:
        assert client.admin.whoami().name == "certificate before.example"
        mutual.authority.issue("rotating", "after.example")
        until(lambda: client.admin.whoami().name == "certificate after.example", 5)
        files.cert.write_text("-----BEGIN nothing")
        for _ in range(15):
            assert client.admin.whoami().name == "certificate after.example"
            time.sleep(0.1)


def opened(url: str, context: ssl.SSLContext, **headers: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_metrics_port_speaks_https(tokens: Site) -> None:
    context = ssl.create_default_context(cafile=str(tokens.authority.ca))
    url = f"https://127.0.0.1:{tokens.daemon.metrics_port}"
    assert opened(f"{url}/healthz", context) == (200, "ok\n")
    assert opened(f"{url}/metrics", context)[0] == 401
    operator = f"Bearer {tokens.issuer.issue(Role.OPERATOR)}"
    until(lambda: opened(f"{url}/metrics", context, Authorization=operator)[0] == 200, 5)
    assert "kvstore_rpc_seconds" in opened(f"{url}/metrics", context, Authorization=operator)[1]
    plain = f"http://127.0.0.1:{tokens.daemon.metrics_port}/metrics"
    with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
        urllib.request.urlopen(plain, timeout=5).read()


def test_beyond_loopback_metrics_take_a_credential_and_probes_do_not(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    listens = ("server.metrics_listen=0.0.0.0:0", "server.listen=0.0.0.0:0")
    site = Site(tmp_path, *listens, f"security.audit={audit}", mutual=False)
    with site.daemon.start():
        with site.client(token_file=site.token) as client:
            assert client.admin.whoami().role is Role.WRITER
        context = ssl.create_default_context(cafile=str(site.authority.ca))
        url = f"https://127.0.0.1:{site.daemon.metrics_port}"
        assert opened(f"{url}/readyz", context)[0] == 200
        assert opened(f"{url}/metrics", context)[0] == 401
        writer = site.token.read_text()
        assert opened(f"{url}/metrics", context, Authorization=f"Bearer {writer}")[0] == 401
        operator = site.issuer.issue(Role.OPERATOR)
        until(
            lambda: opened(f"{url}/metrics", context, Authorization=f"Bearer {operator}")[0] == 200,
            5,
        )
        _, told = opened(f"{url}/metrics", context, Authorization=f"Bearer {operator}")
        refused = 'method="metrics",reason="role"} 1.0'
        assert refused in told
        until(lambda: '"method":"metrics","outcome":"refused"' in audit.read_text())
        assert writer.strip() not in audit.read_text()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tls.cert=/c"], "go together"),
        (["tls.client_ca=/c", "tls.cert=/c", "tls.key=/k"], "require_client_cert"),
        (["tls.client_ca=/c", "tls.require_client_cert=true"], "needs TLS"),
        (["server.listen=0.0.0.0:7700"], "not a loopback address"),
        (["server.listen=0.0.0.0:7700", "server.listen_open=true"], "not a loopback address"),
        (["server.listen=0.0.0.0:7700", "tls.cert=/c", "tls.key=/k"], "not a loopback address"),
        (["server.listen=0.0.0.0:7700", "security.tokens=/t"], "not a loopback address"),
        (["server.metrics_listen=0.0.0.0:7701"], "not a loopback address"),
        (["server.metrics_open=true", "security.tokens=/t"], "without credentials"),
        (["server.listen=127.0.0.1:7700", "tls.cert=/c", "tls.key=/k"], "listen_open"),
        (
            ["server.listen=127.0.0.1:7700", "security.tokens=/t", "server.listen_open=true"],
            "leave it out",
        ),
        (
            ["server.listen=here.example:1", "security.tokens=/t", "tls.cert=/c", "tls.key=/k"],
            "no IP address",
        ),
        (["tls.client_role=root"], "choose one of"),
    ],
)
def test_settings_that_would_let_anybody_in_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(None, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["server.listen=0.0.0.0:7700", "tls.cert=/c", "tls.key=/k", "security.tokens=/t"],
        [
            *("server.listen=[::]:7700", "tls.cert=/c", "tls.key=/k", "tls.client_ca=/a"),
            "tls.require_client_cert=true",
        ],
        ["server.listen=127.0.0.1:7700", "security.tokens=/t"],
    ],
)
def test_settings_that_ask_for_credentials_are_taken(overrides: list[str]) -> None:
    load_settings(None, overrides)


@pytest.mark.parametrize("spoilt", ["absent", "mismatch", "passphrase"])
def test_a_daemon_does_not_start_with_a_pair_that_is_none(tmp_path: Path, spoilt: str) -> None:
    site = Site(tmp_path, mutual=False)
    if spoilt == "absent":
        os.unlink(site.server.key)
    elif spoilt == "mismatch":
        site.server.key.write_bytes(site.engine.key.read_bytes())
    else:
        if OPENSSL is None:
            pytest.skip("needs openssl")
        locked = [OPENSSL, "pkey", "-in", str(site.server.key), "-aes256", "-passout", "pass:x"]
        done = subprocess.run(locked, capture_output=True, check=True)
        site.server.key.write_bytes(done.stdout)
    with site.daemon:
        site.daemon.start(wait=False)
        assert site.daemon.wait() == 2
        assert str(site.server.key) in site.daemon.output()
        assert "Traceback" not in site.daemon.output()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A daemon of two tenants, told apart by certificates and by tokens."""
    directory = tmp_path_factory.mktemp("several")
    issuer = Issuer(directory)
    issuer.issue(Role.WRITER, tenant="acme")
    overrides = (
        'tenants.acme.certificates=["engine.acme.example"]',
        "tenants.globex.certificates=engine.globex.example",
        f"security.tokens={issuer.path}",
        "dram.capacity=256MiB",
        "tls.client_role=operator",
        "server.metrics_listen=0.0.0.0:0",
    )
    site = Site(directory, *overrides, mutual=True)
    with site.daemon.start():
        yield site


def test_a_call_goes_to_the_tenant_of_its_certificate(several: Site) -> None:
    space, keys = sample_namespace(), sample_keys("tenants", 2)
    acme = several.authority.issue("acme", "engine.acme.example")
    globex = several.authority.issue("globex", "engine.globex.example")
    with several.client(**pair(acme)) as client, several.client(**pair(globex)) as other:
        assert client.admin.whoami().tenant == "acme"
        assert other.admin.whoami().tenant == "globex"
        for each in (client, other):
            each.register(space)
        client.put(space.id, keys, sample_records(keys))
        assert client.match(space.id, keys).hit_blocks == 2
        assert other.match(space.id, keys).hit_blocks == 0
        assert other.get(space.id, keys) == [None, None]


def test_certificate_and_token_have_to_be_of_one_tenant(several: Site, tmp_path: Path) -> None:
    acme = several.authority.issue("acme", "engine.acme.example")
    nobody = several.authority.issue("nobody", "elsewhere.example")
    tokens = {}
    for tenant in ("globex", "initech", "default", "acme"):  # who has the last one is waited for
        tokens[tenant] = tmp_path / tenant
        tokens[tenant].write_text(several.issuer.issue(Role.OPERATOR, tenant=tenant))
    with several.client(**pair(acme), token_file=tokens["acme"]) as client:
        until(lambda: _is_let_in(client), 5)
        assert client.admin.whoami().role is Role.OPERATOR
    with several.client(**pair(nobody), token_file=tokens["globex"]) as client:
        assert client.admin.whoami().tenant == "globex"
    for files, token, words in (
        (acme, "globex", "different tenants"),
        (nobody, "initech", "no tenant initech"),
        (nobody, "default", "takes the role admin"),
        (nobody, None, "no valid credential"),
    ):
        shown = pair(files) | ({"token_file": tokens[token]} if token else {})
        with several.client(**shown) as client, pytest.raises(Unauthorized, match=words):
            client.admin.whoami()


def test_no_method_is_answered_by_another_tenants_credential(several: Site, tmp_path: Path) -> None:
    acme = several.authority.issue("acme", "engine.acme.example")
    credentials = grpc.ssl_channel_credentials(
        several.authority.ca.read_bytes(), acme.key.read_bytes(), acme.cert.read_bytes()
    )
    foreign = several.issuer.issue(Role.ADMIN, tenant="globex")
    with grpc.secure_channel(several.daemon.address, credentials, options=OPTIONS) as channel:
        until(lambda: ask(channel, "WhoAmI") == ANSWERED, 5)
        found = {name: ask(channel, name, bearer(foreign)) for name in METHODS}
    assert found == dict.fromkeys(METHODS, UNAUTHORIZED)


def test_a_certificate_that_is_taken_out_of_the_map_is_refused_within_two_seconds(
    several: Site,
) -> None:
    files = several.authority.issue("leaving", "leaving.acme.example")
    names = ["engine.acme.example", "leaving.acme.example"]
    operator = Client(several.daemon.target, arena=False)
    with operator as admin, several.client(**pair(files)) as client:
        admin.admin.configure([f"tenants.acme.certificates={json.dumps(names)}"])
        assert client.admin.whoami().tenant == "acme"
        recording = client.submit(_recorded)
        admin.admin.configure([f"tenants.acme.certificates={json.dumps(names[:1])}"])
        with pytest.raises(Unauthorized, match="no valid credential"):
            client.admin.whoami()
        with pytest.raises(Unauthorized):
            recording.result(2.0)


async def _recorded(remote: Any) -> list[Any]:
    return [batch async for batch in remote.admin.record()]


def test_a_tenant_comes_and_goes_over_tcp_too(several: Site, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(several.issuer.issue(Role.OPERATOR, tenant="initech"))
    nobody = several.authority.issue("nobody", "elsewhere.example")
    with (
        Client(several.daemon.target, arena=False) as admin,
        several.client(**pair(nobody), token_file=token) as client,
    ):
        with pytest.raises(Unauthorized):
            client.admin.whoami()
        admin.admin.add_tenant("initech", ["dram.guaranteed=24MiB"])
        until(lambda: _is_let_in(client), 5)
        recording = client.submit(_recorded)
        admin.admin.delete_tenant("initech")
        with pytest.raises(Unauthorized, match="no tenant initech"):
            client.admin.whoami()
        with pytest.raises(Unauthorized):
            recording.result(2.0)


def test_a_tenants_operator_reads_its_own_metrics_and_an_admin_all(several: Site) -> None:
    context = ssl.create_default_context(cafile=str(several.authority.ca))
    url = f"https://127.0.0.1:{several.daemon.metrics_port}/metrics"
    tokens = {
        role: several.issuer.issue(role, tenant="acme")
        for role in (Role.WRITER, Role.OPERATOR, Role.ADMIN)
    }

    def status(tenant: str, role: Role) -> int:
        path = f"{url}?tenant={tenant}" if tenant else url
        return opened(path, context, Authorization=f"Bearer {tokens[role]}")[0]

    until(lambda: status("", Role.ADMIN) == 200, 5)
    assert [status("acme", role) for role in tokens] == [401, 200, 200]
    assert [status("globex", role) for role in tokens] == [401, 401, 200]
    assert [status("", role) for role in tokens] == [401, 401, 200]
    assert status("nobody", Role.ADMIN) == 404
    headers = {"Authorization": f"Bearer {tokens[Role.ADMIN]}"}
    told = opened(url, context, **headers)[1]
    assert 'kvstore_credential_reloads_total{result="ok",what="tokens"}' in told
    own = opened(f"{url}?tenant=acme", context, **headers)[1]
    assert "kvstore_dram_bytes" in own
    assert "globex" not in own
