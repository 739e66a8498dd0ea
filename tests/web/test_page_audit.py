"""What the page shows is in the audit log, as the calls of gRPC that tell the same."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.model.tenant import Role
from kvstore.server.audited import AUDITED, AUDITED_STREAMS, QUIET
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from kvstore.web.app import make_app
from kvstore.web.watch import TOLD
from tests.server.test_credentials import Issuer
from tests.web.asking import ask, token_of

METHODS = {
    "who": ("WhoAmI",),
    "status": ("Stats",),
    "live": ("Stats", "History", *TOLD),
    "history": ("History",),
    "requests": ("Outcomes",),
    "tree": ("Tree",),
    "conversations": ("Conversations",),
    "namespaces": ("ListNamespaces",),
    "slow": ("Slow",),
}


def read(log: Path) -> list[dict[str, Any]]:
    text = log.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last may be half written
    return [line for line in map(json.loads, lines) if "method" in line]


def noted(log: Path, **fields: str) -> list[str]:
    """Return the methods of the lines that have these fields."""
    return [line["method"] for line in read(log) if fields.items() <= line.items()]


@contextlib.contextmanager
def live(port: int, token: str, query: str = "") -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {"Authorization": f"Bearer {token}"}
    with contextlib.closing(connection):
        connection.request("GET", f"/api/live{query}", headers=headers)
        with connection.getresponse() as reply:
            yield reply


def test_each_path_is_known_here_by_its_methods() -> None:
    app = cast("Any", make_app(cast("Any", None), "token", ()))
    paths = [route.path for route in app._app.routes]
    assert {path.rpartition("/")[2] for path in paths if path.startswith("/api/")} == {*METHODS}
    assert {*TOLD} <= {*AUDITED, *AUDITED_STREAMS}


@pytest.mark.parametrize("path", METHODS)
def test_what_the_page_shows_is_noted_with_who_saw_it(path: str, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with Daemon(f"security.audit={log}", file=False) as daemon:
        daemon.start()
        port, token = daemon.metrics_port, token_of(daemon)
        if path == "live":
            with live(port, token) as reply:
                assert reply.readline()
        else:
            assert ask(port, f"/api/{path}", token=token).status == 200
        daemon.stop()  # which writes what is queued
        told = [method for method in METHODS[path] if method not in QUIET]
        who = {"principal": "the page's token", "tenant": "default", "peer": "127.0.0.1"}
        outcome = "begun" if path == "live" else "ok"
        assert noted(log) == noted(log, outcome=outcome, **who) == told


def test_an_answer_that_viewers_share_is_noted_for_each(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with Daemon(f"security.audit={log}", file=False) as daemon:
        daemon.start()
        token = token_of(daemon)
        for _ in range(3):
            assert ask(daemon.metrics_port, "/api/tree", token=token).status == 200
        with live(daemon.metrics_port, token) as one, live(daemon.metrics_port, token) as other:
            assert one.readline()
            assert other.readline()
        daemon.stop()
    assert sorted(noted(log)) == sorted(["Tree"] * 3 + [*TOLD] * 2)


class Site:
    """A daemon with credentials, and a reader's."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "audit.jsonl"
        self.issuer = Issuer(directory)
        self.reader = self.issuer.issue(Role.READER)
        self.operator = self.issuer.issue(Role.OPERATOR)
        self.daemon = Daemon(
            f"security.tokens={self.issuer.path}", f"security.audit={self.log}", file=False
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    with site.daemon.start():
        yield site


def test_what_a_role_may_not_see_is_noted_as_refused_with_who_asked(site: Site) -> None:
    port = site.daemon.metrics_port
    refused = [path for path in METHODS if path not in ("who", "requests")]
    for path in refused:
        assert ask(port, f"/api/{path}", token=site.reader).status == 403, path
    assert ask(port, "/api/requests", token=site.reader).status == 200
    site.daemon.stop()
    name = f"token {site.reader.split('_')[1]}"
    firsts = ["Monitor" if path == "live" else METHODS[path][0] for path in refused]
    told = noted(site.log, outcome="refused", reason="role", principal=name, peer="127.0.0.1")
    assert sorted(told) == sorted(firsts)
    assert noted(site.log, outcome="ok", principal=name) == ["Outcomes"]


def test_who_shows_nothing_or_asks_for_another_tenant_is_noted(site: Site) -> None:
    port = site.daemon.metrics_port
    assert ask(port, "/").status == 401  # the form
    assert ask(port, "/api/tree").status == 401
    assert ask(port, "/api/tree?tenant=acme", token=site.operator).status == 403
    assert ask(port, "/api/tree", token="kv_no_token").status == 401
    site.daemon.stop()
    assert noted(site.log, outcome="refused", reason="credential", principal="") == ["page"] * 2
    name = f"token {site.operator.split('_')[1]}"
    assert noted(site.log, outcome="refused", reason="tenant", principal=name) == ["page"]
    assert len(noted(site.log, outcome="refused")) == 3


def test_a_wrong_token_of_the_page_is_noted(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with Daemon(f"security.audit={log}", file=False) as daemon:
        port = daemon.start().metrics_port
        assert ask(port, "/api/status", token="wrong").status == 401
        until(lambda: noted(log, outcome="refused", reason="credential") == ["page"])
        daemon.stop()
