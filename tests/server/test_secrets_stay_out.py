"""A token is nowhere that somebody else may look: logs, settings, counts, spans, `ps`, `/proc`."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from kvstore import Client
from kvstore.client.credentials import client_credentials
from kvstore.model.errors import KVStoreError
from kvstore.server.credentials import evidence_of
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from tests.cli.run import kvstore
from tests.server.every_method import METHODS, OPTIONS, ask, bearer
from tests.server.test_tls import Site


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted as spans."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Canaries:
    """Secrets, and where they must not be."""

    def __init__(self, *tokens: str) -> None:
        self.secrets = [secret for token in tokens for secret in (token, token.split("_", 2)[2])]
        self.searched = 0

    def check(self, where: str, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        assert data, f"{where}: nothing to search"
        self.searched += 1
        for secret in self.secrets:
            assert secret.encode() not in data, f"a token is in {where}"


def spans_to(server: ThreadingHTTPServer) -> str:
    pytest.importorskip("opentelemetry.sdk")
    return f"server.traces_endpoint=http://127.0.0.1:{server.server_address[1]}/v1/traces"


def test_a_token_would_be_found() -> None:
    canaries = Canaries("kvs1_abc_secret")
    for text in ("Bearer kvs1_abc_secret", b"...secret..."):
        with pytest.raises(AssertionError, match="a token is in"):
            canaries.check("here", text)


@pytest.fixture
def log() -> Iterator[logging.StreamHandler[io.StringIO]]:
    """All that is logged in this process."""
    handler, logger = logging.StreamHandler(io.StringIO()), logging.getLogger("kvstore")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_no_token_is_found_anywhere(
    tmp_path: Path, log: logging.StreamHandler[io.StringIO]
) -> None:
    audit = tmp_path / "audit.jsonl"
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.bodies = []  # type: ignore[attr-defined]
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        overrides = [spans_to(collector), "server.log_level=debug", f"security.audit={audit}"]
        site = Site(tmp_path, *overrides, mutual=False)
        right = site.token.read_text()
        wrong = right[:-1] + ("A" if right[-1] != "A" else "B")
        canaries = Canaries(right, wrong)
        with site.daemon.start():
            _use(site, wrong)
            _search_daemon(site.daemon, canaries)
            _search_process(site, canaries)
            site.daemon.stop()
            canaries.check("the log at the end", site.daemon.output())
        for body in collector.bodies:  # type: ignore[attr-defined]
            canaries.check("a span", body)
        canaries.check("the audit log", audit.read_bytes())
        assert right.split("_")[1] in audit.read_text(), "it was used, and is known by its id"
        canaries.check("the file of tokens", site.issuer.path.read_bytes())
        canaries.check("the client's log", log.stream.getvalue())
        collector.shutdown()
    assert canaries.searched > 20


def _use(site: Site, wrong: str) -> None:
    space, keys = sample_namespace(), sample_keys("canary", 2)
    with site.client(token_file=site.token) as client:
        client.put(client.register(space), keys, sample_records(keys))
    credentials = grpc.ssl_channel_credentials(site.authority.ca.read_bytes())
    with grpc.secure_channel(site.daemon.address, credentials, options=OPTIONS) as channel:
        for method in METHODS:
            ask(channel, method, bearer(wrong))
            ask(channel, method, bearer(site.token.read_text()))


def _search_daemon(daemon: Daemon, canaries: Canaries) -> None:
    canaries.check("the log", daemon.output())
    canaries.check("the environment", Path(f"/proc/{daemon.pid}/environ").read_bytes())
    canaries.check("the command line", Path(f"/proc/{daemon.pid}/cmdline").read_bytes())
    with Client(daemon.target) as client:
        canaries.check("the counts", repr(client.admin.stats()))
        canaries.check("the settings", repr(client.admin.settings()))
        canaries.check("the last lines", "\n".join(client.admin.log_lines()))
        canaries.check("the outcomes", repr(client.admin.outcomes()) + ".")
    arguments = [word.removeprefix("--set=") for word in daemon._arguments]
    sets = [word for each in arguments for word in ("--set", each)]
    canaries.check("--print-config", kvstore("serve", *sets, "--print-config").output)
    canaries.check("kvstore status", kvstore("status", "--target", daemon.target).output)


def _search_process(site: Site, canaries: Canaries) -> None:
    """Search what `ps` shows of a command that uses the token, and what errors show."""
    words = ["ping", "-c", "50", "-i", "0.1", "--target", site.daemon.address]
    files = ["--token-file", str(site.token), "--tls-ca", str(site.authority.ca)]
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", *words, *files],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as asking:
        assert asking.stdout is not None
        canaries.check("kvstore ping", asking.stdout.readline())
        canaries.check("ps", Path(f"/proc/{asking.pid}/cmdline").read_bytes())
        canaries.check("its environment", Path(f"/proc/{asking.pid}/environ").read_bytes())
        asking.kill()
    with site.client(token_file=site.token) as client:
        with pytest.raises(KVStoreError) as caught:
            client.admin.clear()
        caller = client._client._caller
        canaries.check("a client", f"{vars(client)} {vars(caller)} {vars(caller._connection)}")
    canaries.check("a traceback", "".join(traceback.format_exception(caught.value)))
    told = client_credentials(site.daemon.address, token_file=site.token, tls_ca="/ca")
    canaries.check("what a client was told", repr(told))
    shown = evidence_of(f"Bearer {site.token.read_text()}", None)
    canaries.check("what the daemon keeps of a call", repr(shown))
