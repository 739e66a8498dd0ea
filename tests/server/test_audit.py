"""The audit log tells who was refused and who changed what, and holds nobody up."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import Client
from kvstore.model.tenant import Role
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.server import audit as audit_module
from kvstore.server.audit import (
    QUEUE_MAX,
    REFUSALS_MAX,
    AuditLog,
    FileSink,
    JournalSink,
    Refusals,
    open_audit,
)
from kvstore.server.audited import AUDITED, AUDITED_STREAMS, QUIET
from kvstore.settings import SecuritySettings
from kvstore.system.audit_chain import audit_key, last_line, read_head, split_lines, verify
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.transport.call_wire import METHODS as CALLS
from kvstore.transport.call_wire import Frame, Kind
from tests.cli.run import kvstore
from tests.server.every_method import METHODS, OPTIONS, UNAUTHORIZED, ask, bearer
from tests.server.test_credentials import Issuer

KEY = b"k" * 32
NOBODY = 65534


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]  # the last line may be half written
    return [json.loads(line) for line in whole.splitlines()]


def of_method(path: Path, method: str) -> list[dict[str, Any]]:
    return [line for line in read(path) if line.get("method") == method]


class Site:
    def __init__(self, directory: Path) -> None:
        self.log = directory / "audit.jsonl"
        self.issuer = Issuer(directory)
        self.token = self.issuer.issue(Role.WRITER)
        self.daemon = Daemon(
            "server.listen=127.0.0.1:0",
            f"security.tokens={self.issuer.path}",
            f"security.audit={self.log}",
            file=False,
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    with site.daemon.start():
        yield site


def test_what_changes_or_reveals_is_told_with_who_and_what_came_of_it(site: Site) -> None:
    space, keys = sample_namespace(), sample_keys("audit", 4)
    with Client(site.daemon.target, name="engine") as client:
        client.put(client.register(space), keys, sample_records(keys))
        client.admin.delete(space.id, keys[:1])
        list(client.submit(_scanned).result())
        client.admin.configure(["server.log_level=debug"])
        client.admin.clear()
    until(lambda: of_method(site.log, "Clear"), 5)
    (cleared,) = of_method(site.log, "Clear")
    assert cleared["tenant"] == "default"
    assert cleared["principal"] == "unix socket"
    assert (cleared["outcome"], cleared["deleted"], cleared["namespace"]) == ("ok", 3, "all")
    (deleted,) = of_method(site.log, "Delete")
    assert (deleted["keys"], deleted["deleted"], deleted["corrupt"]) == (1, 1, False)
    assert of_method(site.log, "Scan")[0]["items"] == 3
    assert of_method(site.log, "SetConfig")[0]["changed"] == ["server.log_level"]
    assert of_method(site.log, "OpenSession")[0]["client"] == "engine"
    assert of_method(site.log, "RegisterNamespace")
    text = site.log.read_text()
    for key in keys:
        assert key.hex()[:16] not in text
    assert site.log.stat().st_mode & 0o777 == 0o600


async def _scanned(remote: Any) -> list[Any]:
    return [item async for item in remote.admin.scan()]


def test_refusals_are_told_and_beyond_ten_a_second_summed(site: Site) -> None:
    with grpc.insecure_channel(site.daemon.address, options=OPTIONS) as channel:
        assert ask(channel, "Clear", bearer(site.token)) == UNAUTHORIZED
        for _ in range(200):
            ask(channel, "Match")
    until(lambda: any(line.get("event") == "refusals" for line in read(site.log)), 5)
    (role,) = of_method(site.log, "Clear")
    assert (role["outcome"], role["reason"], role["peer"]) == ("refused", "role", "127.0.0.1")
    assert role["principal"] == f"token {site.token.split('_')[1]}"
    time.sleep(1.5)
    single = of_method(site.log, "Match")
    summed = sum(line["more"] for line in read(site.log) if line.get("event") == "refusals")
    assert len(single) + summed == 200
    assert len(single) <= 60
    assert site.token not in site.log.read_text()


def test_each_method_is_audited_or_known_to_be_quiet() -> None:
    told = [*AUDITED, *AUDITED_STREAMS, *QUIET]
    assert sorted(told) == sorted(METHODS)


def test_what_shows_others_requests_and_the_daemons_settings_is_told(site: Site) -> None:
    with Client(site.daemon.target) as client:
        client.register(sample_namespace())
        client.acquire(sample_namespace().id, sample_keys("audit", 4), request_id="of somebody")
        client.admin.outcomes()
        client.admin.tree()
        client.admin.conversations()
        client.admin.namespaces()
        client.admin.slow()
        client.admin.log_lines(5)
        client.submit(_configured).result()
    until(lambda: of_method(site.log, "GetConfig"), 5)
    assert of_method(site.log, "Outcomes")[0]["items"] == 1
    assert of_method(site.log, "ListNamespaces")[0]["items"] == 1
    assert of_method(site.log, "LogLines")[0]["lines"] > 0
    for method in ("Tree", "Conversations", "Slow"):
        assert of_method(site.log, method)[0]["outcome"] == "ok"
    assert "of somebody" not in site.log.read_text()


async def _configured(remote: Any) -> Any:
    return await remote.admin.settings()


def test_a_refusal_on_a_socket_tells_the_users_process(site: Site) -> None:
    """Of a session that it has not joined, and of an arena of another user."""
    token = "t" * 16
    with (
        Client(site.daemon.target, token=token) as client,
        grpc.insecure_channel(site.daemon.target, options=OPTIONS) as channel,
    ):
        client.register(sample_namespace())
        request = pb.OpenSessionRequest(rpc_version=RPC_VERSION, token=token)
        session = KVStoreStub(channel).OpenSession(request).session
        release = next(number for number, each in enumerate(CALLS) if each.name == "Release")
        body = pb.ReleaseRequest(session=session, leases=[1]).SerializeToString()
        frame = Frame(Kind.REQUEST, 1, body, release, 5.0).encode()
        pid = said(f"{site.daemon.socket}.calls", socket.SOCK_STREAM, frame, os.getuid())
    until(lambda: of_method(site.log, "Release"), 5)
    assert of_method(site.log, "Release")[0]["peer"] == f"unix uid={os.getuid()} pid={pid}"
    if os.getuid() == 0:
        for path in (site.daemon.socket.parent, Path(f"{site.daemon.socket}.arena")):
            path.chmod(0o777)
        site.daemon.socket.parent.parent.chmod(0o711)
        pid = said(f"{site.daemon.socket}.arena", socket.SOCK_SEQPACKET, b"", NOBODY)
        until(lambda: of_method(site.log, "ArenaLink"), 5)
        assert of_method(site.log, "ArenaLink")[0]["peer"] == f"unix uid={NOBODY} pid={pid}"


def said(path: str, kind: socket.SocketKind, data: bytes, uid: int) -> int:
    """Say something to a socket as another process, of a user; return its id when it got an
    answer."""
    code = (
        "import os, socket, sys; os.setuid(int(sys.argv[4]))\n"
        "with socket.socket(socket.AF_UNIX, int(sys.argv[2])) as link:\n"
        "    link.settimeout(10); link.connect(sys.argv[1])\n"
        "    data = bytes.fromhex(sys.argv[3])\n"
        "    if data: link.send(data)\n"  # what nobody reads would reset the link
        "    assert link.recv(1); print(os.getpid())"
    )
    command = [sys.executable, "-S", "-c", code, path, str(int(kind)), data.hex(), str(uid)]
    return int(subprocess.run(command, capture_output=True, timeout=30, check=True).stdout)


def test_all_processes_of_a_user_are_one_in_what_is_told_of_refusals() -> None:
    refusals = Refusals(lambda: 1.0)
    told = [refusals.note(f"unix uid=7 pid={pid}", "acme") for pid in range(REFUSALS_MAX + 5)]
    assert told.count(True) == REFUSALS_MAX
    assert refusals.note("unix uid=8 pid=1", "acme")
    assert refusals.sums(everything=True) == [(("unix uid=7", "acme"), 5)]


def test_refusals_of_one_tenant_hide_none_of_another(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    tenants = [f"tenants.{name}.dram.guaranteed=16MiB" for name in ("noisy", "quiet")]
    with Daemon(f"security.audit={log}", *tenants, file=False) as daemon:
        daemon.start()
        for tenant, times in (("noisy", 100), ("quiet", 1)):
            path = daemon.socket.parent / tenant / "kvstore.sock"
            with grpc.insecure_channel(f"unix:{path}", options=OPTIONS) as channel:
                for _ in range(times):
                    assert ask(channel, "GetConfig") == UNAUTHORIZED
        until(lambda: any(line.get("event") == "refusals" for line in read(log)), 5)
        (quiet,) = (line for line in of_method(log, "GetConfig") if line["tenant"] == "quiet")
        assert (quiet["outcome"], quiet["peer"]) == ("refused", "unix")
        summed = [line["tenant"] for line in read(log) if line.get("event") == "refusals"]
        assert set(summed) == {"noisy"}
        daemon.stop()


def test_changes_of_credentials_are_told(site: Site) -> None:
    site.issuer.issue(Role.READER)
    until(lambda: any(line.get("what") == "tokens" for line in read(site.log)), 5)
    site.issuer.path.write_text("nonsense")
    until(lambda: any(line.get("outcome", "ok") != "ok" for line in read(site.log)), 5)


def test_a_log_is_whole_over_restarts_and_rotation_and_a_cut_shows(site: Site) -> None:
    words = ("audit", "verify", "--key", f"{site.log}.key")
    with Client(site.daemon.target) as client:
        client.admin.clear()
    site.daemon.stop()
    site.daemon.start()
    old = site.log.with_suffix(".1")
    os.rename(site.log, old)
    with Client(site.daemon.target) as client:
        client.admin.clear()
        client.admin.clear()
    until(lambda: site.log.exists() and len(of_method(site.log, "Clear")) == 2, 5)
    head = Path(f"{site.log}.key.head")
    until(lambda: read_head(head) == last_line(site.log), 5)
    site.daemon.kill()
    both = (str(old), str(site.log))
    assert kvstore(*words, *both).exit_code == 0
    assert json.loads(kvstore(*words, *both, "--json").output)["whole"]
    assert kvstore(*words, str(site.log)).exit_code == 0
    lines = site.log.read_bytes().splitlines(keepends=True)
    for spoilt in (
        lines[:-1],
        [lines[0], *lines[2:]],
        [line.replace(b'"deleted":0', b'"deleted":1') for line in lines],
    ):
        site.log.write_bytes(b"".join(spoilt))
        found = kvstore(*words, *both)
        assert found.exit_code == 1, found.output
        assert "missing" in found.output or "changed" in found.output
    site.log.write_bytes(b"".join(lines))
    assert kvstore(*words, *both).exit_code == 0
    assert kvstore("audit", "verify").exit_code == 2
    shown = kvstore("audit", "show", str(site.log), "-n", "2").output
    assert len(shown.splitlines()) == 2
    assert "method=Clear outcome=ok deleted=0 namespace=all" in shown
    assert "not a line" in kvstore("audit", "show", str(site.daemon.log)).output


def test_what_a_line_names_is_no_command_to_a_terminal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(json.dumps({"seq": 1, "time": 1.0, "client": "a\nevent=start\x1b[2J"}) + "\n")
    shown = kvstore("audit", "show", str(log)).output
    assert shown.endswith("client=a?event=start?[2J\n")
    assert len(shown.splitlines()) == 1


def test_a_second_daemon_that_is_refused_leaves_the_log_alone(site: Site) -> None:
    with Client(site.daemon.target) as client:
        client.admin.clear()
        arguments = [
            f"--set=server.socket={site.daemon.socket}",
            f"--set=security.audit={site.log}",
        ]
        command = [sys.executable, "-m", "kvstore.cli", "serve", *arguments]
        second = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert second.returncode == 2, second.stderr
        client.admin.clear()
    until(lambda: len(of_method(site.log, "Clear")) == 2, 5)
    site.daemon.stop()
    assert kvstore("audit", "verify", str(site.log)).output.endswith("lines, whole\n")
    assert [line["event"] for line in read(site.log) if "event" in line] == ["start", "stop"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_drops_lines_and_says_how_many(small_disk: Path, tmp_path: Path) -> None:
    counts = {"written": 0, "dropped": 0}

    def count(result: str, lines: int) -> None:
        counts[result] += lines

    path, ballast = small_disk / "audit.jsonl", small_disk / "ballast"
    settings = SecuritySettings(audit=str(path), audit_key=str(tmp_path / "key"))
    log = open_audit(settings, count)
    assert log is not None
    log.start(pid=1)
    until(lambda: counts["written"] == 1)
    ballast.write_bytes(bytes(3 * 4096 - 512))
    began = time.monotonic()
    for number in range(300):
        log.event("noise", text="x" * 100, number=number)
        if number % 30 == 0:
            time.sleep(0.005)
    assert time.monotonic() - began < 2.0, "nobody waits for the disk"
    until(lambda: counts["written"] + counts["dropped"] == 301)
    assert counts["dropped"] > 0
    ballast.unlink()
    log.event("after")
    log.close()
    lines = read(path)
    assert sum(line.get("dropped", 0) for line in lines) == counts["dropped"]
    found = verify(
        split_lines([path.read_bytes()]), audit_key(tmp_path / "key"),
        read_head(tmp_path / "key.head"),
    )  # fmt: skip
    assert found.faults == ()
    assert found.lines == counts["written"]


def test_a_queue_that_is_full_drops_and_counts(tmp_path: Path) -> None:
    """Of a log whose thread does not run, as if its disk hung."""
    counts = {"written": 0, "dropped": 0}

    def count(result: str, lines: int) -> None:
        counts[result] += lines

    log = AuditLog(FileSink(tmp_path / "log"), KEY, tmp_path / "head", count)
    for _ in range(QUEUE_MAX + 7):
        log.event("noise")
    assert counts["dropped"] == 7


def test_a_head_that_cannot_be_noted_costs_no_line(tmp_path: Path) -> None:
    path, counts = tmp_path / "log", {"written": 0, "dropped": 0}

    def count(result: str, lines: int) -> None:
        counts[result] += lines

    log = AuditLog(FileSink(path), KEY, tmp_path / "gone/head", count)
    log.start(pid=1)
    for number in range(3):
        log.event("noise", number=number)
        until(lambda number=number: counts["written"] >= 2 + number)  # type: ignore[misc]
    log.close()
    assert counts == {"written": 5, "dropped": 0}
    assert verify(path.read_bytes().splitlines(), KEY).faults == ()


def test_the_journal_gets_the_same_lines(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(path)
        journal.settimeout(5)
        log = AuditLog(JournalSink(path), KEY, tmp_path / "head", lambda *_: None)
        log.start(pid=1)
        log.event("noise")
        log.close()
        got = [journal.recv(1 << 16) for _ in range(3)]
    assert all(b"SYSLOG_IDENTIFIER=kvstore-audit\n" in each for each in got)
    lines = [each.partition(b"MESSAGE=")[2] for each in got]
    assert verify([line.rstrip(b"\n") for line in lines], KEY).faults == ()


def test_a_journal_that_stops_in_the_middle_breaks_no_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"written": 0, "dropped": 0}

    def count(result: str, lines: int) -> None:
        counts[result] += lines

    def received() -> list[bytes]:
        with contextlib.suppress(BlockingIOError):
            while True:
                got.append(journal.recv(1 << 16).partition(b"MESSAGE=")[2].rstrip(b"\n"))
        return got

    path, got = str(tmp_path / "journal"), list[bytes]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(path)
        journal.setblocking(False)
        with monkeypatch.context() as short:
            short.setattr(audit_module, "CLOSE_S", 0.1)  # how long a line waits for the journal
            sink = JournalSink(path)
        log = AuditLog(sink, KEY, tmp_path / "head", count)
        for number in range(QUEUE_MAX - 1):  # more than the journal's socket holds
            log.event("noise", number=number)
        log.start(pid=1)
        until(lambda: sum(counts.values()) == QUEUE_MAX, 10)
        assert counts["written"] == len(received()) > 0
        log.event("after")
        log.close()
        lines = [json.loads(line) for line in received()]
    assert counts["written"] == len(lines)
    assert sum(line.get("dropped", 0) for line in lines) == counts["dropped"] > 0
    assert verify(got, KEY, read_head(tmp_path / "head")).faults == ()


def test_a_journal_that_is_not_there_drops_and_counts(tmp_path: Path) -> None:
    dropped = []
    sink = JournalSink(str(tmp_path / "nobody"))
    log = AuditLog(sink, KEY, tmp_path / "head", lambda *told: dropped.append(told))
    log.start()
    log.close()
    assert sum(count for result, count in dropped if result == "dropped") == 2
