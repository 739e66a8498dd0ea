"""What somebody can do over TCP without a credential, with another one's, or in between."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from kvstore import Client, KVStoreError
from kvstore.model.tenant import Role
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.rights import RIGHTS
from kvstore.system.token_file import changing, make_token
from kvstore.testing.daemon import Daemon
from tests.hostile.middle import PREFACE, Middle
from tests.hostile.scene import SPACE, Scene, client_of, put, record_of, wrong_among
from tests.server.every_method import ANSWERED, METHODS, OPTIONS, UNAUTHORIZED, ask, bearer
from tests.tls import Authority

REVOKED_S_MAX = 2.0
PAYLOAD_CHUNK = 64


class Site:
    """A daemon over TLS whose tenants acme and beta have tokens, and who connects to it."""

    def __init__(self, scene: Scene, directory: Path) -> None:
        self.scene = scene
        self.directory = directory
        self.authority = Authority(directory / "ours")
        self.server = self.authority.issue("server")
        self.tokens = directory / "tokens"
        self.daemon: Daemon | None = None

    @contextlib.contextmanager
    def serving(self, *overrides: str) -> Iterator[Daemon]:
        settings = (
            "server.listen=127.0.0.1:0",
            f"tls.cert={self.server.cert}",
            f"tls.key={self.server.key}",
            f"security.tokens={self.tokens}",
        )
        with self.scene.daemon(*settings, *overrides) as daemon:
            self.daemon = daemon
            yield daemon

    def issue(self, tenant: str, role: Role, not_after: float = 0.0) -> str:
        token, entry = make_token(tenant, role, not_after=not_after)
        with changing(self.tokens) as entries:
            entries.append(entry)
        return token

    def revoke(self, token: str) -> None:
        with changing(self.tokens) as entries:
            entries[:] = [entry for entry in entries if entry.id != token.split("_")[1]]

    def client(self, token: str, *, address: str = "", ca: Path | None = None) -> Client:
        path = self.directory / f"client-{token.split('_')[1]}"
        path.write_text(token)
        assert self.daemon is not None
        return Client(
            address or self.daemon.address, token_file=path, tls_ca=ca or self.authority.ca
        )

    def channel(self) -> grpc.Channel:
        assert self.daemon is not None
        credentials = grpc.ssl_channel_credentials(self.authority.ca.read_bytes())
        return grpc.secure_channel(self.daemon.address, credentials, options=OPTIONS)


@contextlib.contextmanager
def _site(scene: Scene) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="kv-site-") as place:
        yield Site(scene, Path(place))


def calls_without_a_right(scene: Scene) -> None:
    """Every method is called with no, a wrong, an expired, a revoked and another's credential."""
    with _site(scene) as site:
        right = {role: site.issue("acme", role) for role in Role}
        bad = _bad_credentials(site, right[Role.ADMIN])
        allowed = 0
        with site.serving() as daemon, site.channel() as channel:
            for token in right.values():  # what was right before is never taken for a guess
                until_answered(channel, token)
            for name, metadata in bad.items():
                # Tokens of a tenant that is not here, the others of nobody.
                found = {method: ask(channel, method, metadata) for method in METHODS}
                wrongly = [method for method, told in found.items() if told != UNAUTHORIZED]
                allowed += len(wrongly)
                if wrongly:
                    scene.details[f"allowed: {name}"] = wrongly
            without = _methods_without_right(channel, right)
            with grpc.insecure_channel(daemon.address, options=OPTIONS) as plain:
                allowed += sum(ask(plain, method) == ANSWERED for method in METHODS)
            scene.controls["an admin's token is let in"] = (
                ask(channel, "GetConfig", bearer(right[Role.ADMIN])) == ANSWERED
            )
        scene.count("calls_allowed", allowed)
        scene.count("methods_without_right", without)


def _bad_credentials(site: Site, admin: str) -> dict[str, tuple[tuple[str, str], ...]]:
    revoked = site.issue("acme", Role.ADMIN)
    site.revoke(revoked)
    wrong = admin[:-1] + ("A" if admin[-1] != "A" else "B")
    return {
        "no": (),
        "wrong": bearer(wrong),
        "unknown": bearer(make_token("acme", Role.ADMIN)[0]),
        "expired": bearer(site.issue("acme", Role.ADMIN, not_after=time.time() - 1)),
        "revoked": bearer(revoked),
        "foreign": bearer(site.issue("gamma", Role.ADMIN)),
    }


def _methods_without_right(channel: grpc.Channel, right: dict[Role, str]) -> int:
    """Count methods in no table, and calls that a role got without the right to them."""
    count = len(set(METHODS) ^ set(RIGHTS))
    for role, token in right.items():
        for method in METHODS:
            if RIGHTS[method] > role:
                count += ask(channel, method, bearer(token)) != UNAUTHORIZED
    return count


def until_answered(channel: grpc.Channel, token: str, timeout_s: float = 5.0) -> None:
    """Return when the daemon knows the token."""
    deadline = time.monotonic() + timeout_s
    while ask(channel, "WhoAmI", bearer(token)) != ANSWERED and time.monotonic() < deadline:
        time.sleep(0.02)


def revoked_credentials(scene: Scene) -> None:
    """A token is revoked while a connection is open, a stream runs and another one is read."""
    with _site(scene) as site, site.serving():
        slowest = 0.0
        for _ in range(1 if scene.quick else 5):
            token = site.issue("acme", Role.OPERATOR)
            with site.channel() as channel:
                until_answered(channel, token)
                stream = channel.unary_stream("/kvstore.rpc.v1.KVStore/Record")(
                    pb.RecordRequest(share=1.0).SerializeToString(),
                    metadata=bearer(token),
                    timeout=60,
                )
                next(stream)
                site.revoke(token)
                began = time.monotonic()
                while ask(channel, "WhoAmI", bearer(token)) == ANSWERED:
                    time.sleep(0.005)
                with contextlib.suppress(grpc.RpcError, StopIteration):
                    while True:
                        next(stream)
                slowest = max(slowest, time.monotonic() - began)
        scene.details["revoked_s"] = round(slowest, 3)
        if slowest > REVOKED_S_MAX:
            scene.count("read_other")
        scene.controls["it was let in before"] = True


def rotations_of_certificates(scene: Scene) -> None:
    """The daemon's certificate is replaced ten times while clients make calls."""
    calls_min = 500 if scene.quick else 10_000
    with _site(scene) as site, site.serving():
        token = site.issue("acme", Role.WRITER)
        with site.channel() as channel:
            until_answered(channel, token)
        failed: list[str] = []
        made = [0]
        over = threading.Event()
        with site.client(token) as client:
            keys = put(client, "rotation", 4)

            def work() -> None:
                while not over.is_set():
                    try:
                        scene.count("wrong_served", wrong_among(keys, client.get(SPACE.id, keys)))
                        client.match(SPACE.id, keys)
                    except KVStoreError as error:
                        failed.append(str(error))
                    made[0] += 2

            def connect() -> None:
                while not over.is_set():
                    try:
                        with site.client(token) as fresh:
                            fresh.match(SPACE.id, keys)
                    except KVStoreError as error:
                        failed.append(str(error))
                    made[0] += 1

            workers = [threading.Thread(target=each) for each in (work, work, work, connect)]
            for worker in workers:
                worker.start()
            for rotation in range(1, 11):
                site.authority.issue("server")
                while made[0] < rotation * calls_min // 10:
                    time.sleep(0.02)
                time.sleep(0.3)
            over.set()
            for worker in workers:
                worker.join()
        scene.count("rotation_failed_calls", len(failed))
        scene.details["rotation_calls"] = made[0]
        if failed:
            scene.details["rotation_failures"] = failed[:3]
        scene.controls["calls were made"] = made[0] >= calls_min


def tokens_left_behind(scene: Scene) -> None:
    """Who may read logs, /proc, counts, settings and files of the daemon looks for tokens there."""
    overrides = ("server.log_level=debug",)
    with _site(scene) as site:
        audit = site.directory / "audit"
        with site.serving(*overrides, f"security.audit={audit}") as daemon:
            right = site.issue("acme", Role.ADMIN)
            wrong = right[:-1] + ("A" if right[-1] != "A" else "B")
            with site.channel() as channel:
                until_answered(channel, right)
                for token in (right, wrong):
                    for method in METHODS:
                        ask(channel, method, bearer(token))
            with site.client(right) as client:
                put(client, "tokens", 2)
            places = _places_to_look(daemon) | {"the log": daemon.output().encode()}
        places["the audit log"] = audit.read_bytes()
        places["the tokens' file"] = site.tokens.read_bytes()
        secrets = [part.encode() for token in (right, wrong) for part in token.split("_", 2)[2:]]
        found = [name for name, data in places.items() if any(each in data for each in secrets)]
        scene.count("canaries_found", len(found))
        scene.details["tokens_in"] = found
        kept = (site.directory / f"client-{right.split('_')[1]}").read_bytes()
        scene.controls["a client's own file has it"] = secrets[0] in kept
        scene.controls["there is something to search"] = all(places.values())


def _places_to_look(daemon: Daemon) -> dict[str, bytes]:
    """Return what there is to read of a daemon that runs, by its name."""
    process = Path(f"/proc/{daemon.pid}")
    found = {name: (process / name).read_bytes() for name in ("environ", "cmdline", "maps")}
    with Client(daemon.target, arena=False) as operator, client_of(daemon, "acme") as acme:
        for name, told in (
            ("counts", operator.admin.stats()),
            ("a tenant's counts", acme.admin.stats()),
            ("settings", operator.admin.settings()),
            ("last lines", operator.admin.log_lines()),
            ("outcomes", acme.admin.outcomes()),
        ):
            found[name] = f"{told!r}.".encode()
    words = [each for each in found["cmdline"].decode().split("\0") if each.startswith("--set=")]
    command = daemon.command("serve", *words, "--print-config")
    found["--print-config"] = subprocess.run(command, capture_output=True, check=True).stdout
    return found


class _Relay:
    """Listens on loopback, hands on what it gets, and keeps it: a wire that is listened to."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                other = socket.create_connection(("127.0.0.1", self._port))
                for source, target in ((one, other), (other, one)):
                    threading.Thread(
                        target=self._hand_on, args=(source, target), daemon=True
                    ).start()

    def _hand_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def listeners_on_the_wire(scene: Scene) -> None:
    """A relay keeps all bytes between client and daemon; another one speaks TLS by its own CA."""
    with _site(scene) as site, site.serving() as daemon:
        token = site.issue("acme", Role.WRITER)
        with site.channel() as channel:
            until_answered(channel, token)
        with contextlib.closing(_Relay(daemon.port)) as relay:
            with site.client(token, address=f"127.0.0.1:{relay.port}") as client:
                keys = put(client, "wire", 2)
                scene.count("wrong_served", wrong_among(keys, client.get(SPACE.id, keys)))
            found = _canaries_in(bytes(relay.seen), keys, token)
            moved = len(relay.seen)
        scene.controls["the relay saw the calls"] = moved > sum(len(record_of(key)) for key in keys)
        scene.count("canaries_found", found)
        scene.controls["canaries are seen in the clear"] = _seen_in_the_clear(scene)


def _canaries_in(data: bytes, keys: Any, token: str) -> int:
    """Count secrets in bytes: of records, keys and the token."""
    canaries = [token.encode(), *keys]
    for key in keys:
        record = record_of(key)
        canaries += [record[at : at + PAYLOAD_CHUNK] for at in range(0, len(record) - 64, 997)]
    return sum(canary in data for canary in canaries)


def _seen_in_the_clear(scene: Scene) -> bool:
    """The control: the same over plaintext TCP."""
    with Daemon(file=False, tcp=True) as daemon:
        daemon.start()
        with contextlib.closing(_Relay(daemon.port)) as relay:
            with Client(f"127.0.0.1:{relay.port}") as client:
                keys = put(client, "wire", 2)
            return _canaries_in(bytes(relay.seen), keys, "no token") > len(keys)


def a_man_in_the_middle(scene: Scene) -> None:
    """He has a certificate for the daemon's address, of an authority that is not ours, or one of
    ours for another name."""
    with _site(scene) as site, site.serving():
        token = site.issue("acme", Role.WRITER)
        strangers = Authority(site.directory / "strangers")
        for pair, ca, believed in (
            (strangers.issue("middle"), site.authority.ca, False),
            (site.authority.issue("elsewhere", "elsewhere.example"), site.authority.ca, False),
            (strangers.issue("middle"), strangers.ca, True),
        ):
            with Middle(pair).listening() as middle:
                with site.client(token, address=middle.address, ca=ca) as client:
                    try:
                        client.admin.ping()
                        scene.count("wrong_served")
                    except KVStoreError:
                        pass
                told = any(seen.startswith(PREFACE) for seen in middle.seen)
            if believed:
                scene.controls["who trusts his authority talks to him"] = told
            else:
                scene.count("read_other", int(told))
