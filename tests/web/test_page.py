"""The page is for who has its token, or a credential; everybody else gets nothing of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.model.tenant import Role
from kvstore.system.page_token import make_page_token, page_token_path, read_page_token
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.web.watch import VIEWERS_MAX
from tests.cli.run import kvstore
from tests.server.test_credentials import Issuer
from tests.tls import Authority
from tests.web.asking import ask, token_of

API = (
    "who",
    "status",
    "live",
    "history",
    "requests",
    "tree",
    "conversations",
    "namespaces",
    "slow",
)
PRIVATE = ("/", "/page.js", *(f"/api/{name}" for name in API))


def test_everything_but_metrics_and_probes_wants_the_token(daemon: Daemon, token: str) -> None:
    port = daemon.metrics_port
    for path in PRIVATE:
        for wrong in ("", "x", token[:-1], token + "x", "é" * 10):
            shown = {"Authorization": f"Bearer {wrong}".encode().decode("latin-1")} if wrong else {}
            answer = ask(port, path, **shown)
            assert answer.status == 401, path
            assert b"uptime" not in answer.body
    assert ask(port, f"/?token={token[:-1]}").status == 401
    assert ask(port, "/", Cookie=f"kvstore_page_{port}={token}").status == 401
    for path in ("/metrics", "/healthz", "/readyz"):
        assert ask(port, path).status == 200


def test_the_printed_address_lets_a_browser_in_and_is_not_kept(daemon: Daemon, token: str) -> None:
    port = daemon.metrics_port
    answer = ask(port, f"/?token={token}")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert token not in cookie
    pair = cookie.partition(";")[0]
    assert b"<title>kvstore</title>" in ask(port, "/", Cookie=pair).body
    assert ask(port, "/api/who", Cookie=pair).json()["role"] == "admin"
    form = ask(port, "/login", method="POST", body=f"token={token}")
    assert (form.status, form.headers["set-cookie"]) == (303, cookie)
    assert ask(port, "/login", method="POST", body="token=no").status == 401
    assert ask(port, "/login", method="POST", body=f"token={token}&a=1&b&c&d").status == 400
    assert ask(port, "/login", method="POST", body="x" * 5000).status == 413
    assert token not in daemon.output()


def test_another_name_and_another_site_are_refused_and_counted(daemon: Daemon, token: str) -> None:
    port = daemon.metrics_port
    strange = ("localhost:99999", f"localhost:{'9' * 5000}", "[::1", "[", "localhost:")
    for host in ("evil.example", "127.0.0.1.evil.example", "", "127.0.0.2:80", *strange):
        for path in PRIVATE:
            assert ask(port, path, token=token, Host=host).status == 400, (host, path)
    for host in ("localhost", f"localhost:{port}", "127.0.0.1:9", f"LOCALHOST:{port}", "[::1]:7"):
        assert ask(port, "/api/who", token=token, Host=host).status == 200, host
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://[::1", "Sec_Fetch_Mode": "navigate"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"},
    ):
        assert ask(port, "/api/status", token=token, **headers).status == 403, headers
    own = {"Origin": f"http://127.0.0.1:{port}", "Sec_Fetch_Site": "same-origin"}
    assert ask(port, "/api/status", token=token, **own).status == 200
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert ask(port, "/", **link).status == 401
    counted = ask(port, "/metrics?name[]=kvstore_rpc_errors_total").body.decode()
    for reason in ("host", "origin", "credential"):
        assert f'error="Unauthorized",method="page",reason="{reason}"' in counted
    assert "Traceback" not in daemon.output()


def test_a_browser_is_told_to_do_no_more_than_the_page_does(daemon: Daemon, token: str) -> None:
    for path in ("/", "/page.js", "/api/status", "/api/none", "/login"):
        headers = ask(daemon.metrics_port, path, token=token).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        assert not [name for name in headers if name.startswith("access-control")]
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(daemon.metrics_port, "/api/status", token=token, method=method).status == 405
    assert ask(daemon.metrics_port, "/api/status", token=token, method="POST").status == 405


def test_the_api_tells_what_the_commands_tell(daemon: Daemon, token: str) -> None:
    space, keys = sample_namespace("page"), sample_keys("page", 6)
    with Client(daemon.target, name="vllm page") as client:
        client.put(client.register(space), keys[:4], sample_records(keys[:4]))
        lease = client.acquire(space.id, keys, request_id="chatcmpl-page", session_id="chat-page")
        client.release(lease.lease_id)

        def api(path: str) -> object:
            answer = ask(daemon.metrics_port, f"/api/{path}", token=token)
            assert answer.status == 200, answer.body
            return answer.json()

        status = api("status")
        stats = client.admin.stats()
        assert isinstance(status, dict)
        assert status["dram"]["blocks"] == stats["dram"]["blocks"]
        assert status["healthy"]
        assert "totals" not in status
        [request] = api("requests?id=chatcmpl-page")  # type: ignore[misc, var-annotated]
        assert (request["asked"], request["hit"], request["client"]) == (6, 4, "vllm page")
        assert request["ranges"] == [[0, 4, "dram"], [4, 6, ""]]
        assert request["ended"]["reason"] == "never_stored"
        known = {each["namespace"]: each for each in api("namespaces")}  # type: ignore[attr-defined]
        assert known[space.id.hex()]["hit_blocks"] == 4
    for wrong in ("tree?prefix=zz", "history?step_s=-1", "requests?limit=x", "history?since=a"):
        assert ask(daemon.metrics_port, f"/api/{wrong}", token=token).status == 400


class Stream:
    """The stream of a viewer."""

    def __init__(self, port: int, token: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        headers = {"Authorization": f"Bearer {token}"}
        self.connection.request("GET", "/api/live", headers=headers)
        self.reply = self.connection.getresponse()

    def frame(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.reply.readline())
        return found

    def close(self) -> None:
        self.reply.close()
        self.connection.close()


def is_served(port: int, token: str) -> bool:
    with contextlib.closing(Stream(port, token)) as stream:
        return stream.reply.status == 200


def test_viewers_are_bounded_and_places_come_free(daemon: Daemon, token: str) -> None:
    port = daemon.metrics_port
    viewers = [Stream(port, token) for _ in range(VIEWERS_MAX)]
    try:
        assert {viewer.reply.status for viewer in viewers} == {200}
        assert viewers[-1].frame()["full"]
        refused = ask(port, "/api/live", token=token)
        assert refused.status == 503
        assert "16 viewers" in refused.json()["error"]
        # Probes and others are answered, and push no viewer out.
        for _ in range(40):
            assert ask(port, "/healthz").status == 200
        assert all("at" in viewer.frame() for viewer in viewers)
    finally:
        for viewer in viewers:
            viewer.close()
    until(lambda: is_served(port, token), 5)
    counted = ask(port, "/metrics?name[]=kvstore_rpc_errors_total").body.decode()
    assert 'error="Unavailable",method="page",reason="viewers"' in counted


def test_of_several_tenants_an_admin_sees_each(tmp_path: Path) -> None:
    with Daemon("tenants.acme.dram.guaranteed=32MiB", file=False) as daemon:
        daemon.start()
        port, token = daemon.metrics_port, token_of(daemon)
        assert list(ask(port, "/api/status", token=token).json()["tenants"]) == ["acme"]
        of_one = ask(port, "/api/status?tenant=acme", token=token).json()
        assert of_one["dram"]["capacity_bytes"] >= 32 << 20
        for tenant, expected in (("none", 403), ("<b>", 400)):
            assert ask(port, f"/api/requests?tenant={tenant}", token=token).status == expected
        with contextlib.closing(Stream(port, token)) as stream:
            frame = stream.frame()
            assert (frame["error"], "history" in frame) == ("", False)


def threads_of(daemon: Daemon) -> set[str]:
    tasks = Path(f"/proc/{daemon.pid}/task")
    return {path.read_text().strip() for path in tasks.glob("*/comm")}


def test_a_daemon_that_nobody_looks_at_has_no_thread_for_it_and_keeps_its_token() -> None:
    with Daemon("server.metrics_listen=127.0.0.1:0", file=False) as daemon:
        daemon.start()
        path = page_token_path(daemon.socket)
        assert path.stat().st_mode & 0o777 == 0o600
        token = token_of(daemon)
        assert "kvstore-page" not in threads_of(daemon)
        told = kvstore("page", "--target", daemon.target).output.strip()
        assert told == daemon.page_address
        with Client(daemon.target) as client:
            told = client.admin.stats()["addresses"]["page"]
        assert told == f"http://127.0.0.1:{daemon.metrics_port}/"
        assert ask(daemon.metrics_port, "/api/who", token=token).status == 200
        with contextlib.closing(Stream(daemon.metrics_port, token)) as watching:
            assert watching.frame()["full"]
            assert daemon.stop() == 0, "a viewer holds no daemon up"
        daemon.start()
        assert token_of(daemon) == token
        daemon.stop()
        path.chmod(0o644)
        daemon.start()
        assert token_of(daemon) != token, "others may have read it"


def test_a_token_file_that_is_none_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "k.sock.page"
    for text in ("", "short", "x" * 44, "é" * 43):
        path.write_text(text)
        path.chmod(0o600)
        assert read_page_token(path) == ""
        token = make_page_token(path)
        assert read_page_token(path) == token
        assert make_page_token(path) == token
    elsewhere = tmp_path / "link.page"
    elsewhere.symlink_to(path)
    assert read_page_token(elsewhere) == ""


@pytest.mark.parametrize("settings", [("server.page=false",), ("server.metrics_listen=",)])
def test_without_a_page_there_is_none(settings: tuple[str, ...]) -> None:
    with Daemon(*settings, file=False) as daemon:
        daemon.start()
        assert daemon.page_address == ""
        assert not page_token_path(daemon.socket).exists()
        assert "has no page" in kvstore("page", "--target", daemon.target).output
        if daemon.metrics_port:
            assert ask(daemon.metrics_port, "/").status == 404


def test_without_the_extra_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hiding = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Hiding(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        hidden = name.partition('.')[0] in ('starlette', 'uvicorn')\n"
        "        return None if hidden else super().find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Hiding if each is PathFinder else each for each in sys.meta_path]\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hiding)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with Daemon(file=False) as daemon:
        daemon.start()
        answer = ask(daemon.metrics_port, "/")
        assert answer.status == 503
        assert b"pip install 'kvstore-tiers[web]'" in answer.body
        assert ask(daemon.metrics_port, "/metrics").status == 200
        assert daemon.page_address == ""


def test_beyond_loopback_the_page_needs_tls() -> None:
    open_to_all = ("server.metrics_listen=0.0.0.0:0", "server.metrics_open=true")
    with Daemon(*open_to_all, file=False) as daemon:
        daemon.start()
        answer = ask(daemon.metrics_port, "/")
        assert (answer.status, b"needs TLS" in answer.body) == (503, True)


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def secured(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    issuer.issue(Role.READER)
    authority = Authority(tmp_path_factory.mktemp("tls"))
    pair = authority.issue("server")
    settings = (
        f"tls.cert={pair.cert}",
        f"tls.key={pair.key}",
        f"security.tokens={issuer.path}",
        "server.metrics_listen=0.0.0.0:0",
        "server.page_hosts=kv.example",
    )
    with Daemon(*settings, file=False) as daemon:
        yield daemon.start()


def test_a_credential_shows_what_its_role_may_see(secured: Daemon, issuer: Issuer) -> None:
    tls = ssl._create_unverified_context()
    port = secured.metrics_port
    tokens = {role: issuer.issue(role) for role in (Role.READER, Role.OPERATOR)}

    def status(path: str, role: Role) -> int:
        return ask(port, f"/api/{path}", token=tokens[role], tls=tls).status

    until(lambda: status("who", Role.OPERATOR) == 200, 5)
    assert secured.page_address == f"https://kv.example:{port}/"
    told = json.loads(kvstore("page", "--json", "--target", secured.target).output)
    assert told == {"address": secured.page_address, "asks_who": True}
    assert status("requests", Role.READER) == 200
    for path in ("status", "live", "history", "tree", "conversations", "namespaces"):
        assert status(path, Role.READER) == 403, path
    for path in ("status", "history", "namespaces"):
        assert status(path, Role.OPERATOR) == 200, path
    assert status("status?tenant=acme", Role.OPERATOR) == 403
    for host, expected in (("kv.example:1", 200), ("other.example", 400)):
        shown = ask(port, "/api/who", token=tokens[Role.READER], tls=tls, Host=host)
        assert shown.status == expected
    form = ask(port, "/login", method="POST", body=f"token={tokens[Role.OPERATOR]}", tls=tls)
    assert form.status == 303
    cookie = form.headers["set-cookie"]
    assert "Secure" in cookie
    assert tokens[Role.OPERATOR] not in cookie
    pair = cookie.partition(";")[0]
    assert ask(port, "/api/status", Cookie=pair, tls=tls).status == 200
    assert ask(port, "/", tls=tls).status == 401
    issuer.revoke(tokens[Role.OPERATOR])
    until(lambda: ask(port, "/api/status", Cookie=pair, tls=tls).status == 401, 5)
    assert ask(port, "/logout", method="POST", Cookie=pair, tls=tls).status == 303
