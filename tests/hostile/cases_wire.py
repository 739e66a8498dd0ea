"""What the network shows, and who is let in over it."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import grpc

from kvstore import Client, KVStoreError
from kvstore.model.tenant import Role
from kvstore.server import rights
from kvstore.system.token_file import make_token
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys
from kvstore.testing.wait import until
from tests.hostile.scene import SPACE, Scene, record_of
from tests.hostile.sniffing import PREFACE, Middle, Sniffer
from tests.server.every_method import ANSWERED, METHODS, OPTIONS, UNAUTHORIZED, ask, bearer
from tests.server.test_tls import Site

CANARY = b"kvstore-canary-on-the-wire-8c1f"
REVOKED_WITHIN_S = 2.0
ROTATIONS = 10


def listeners_on_the_network(scene: Scene) -> None:
    """Root listens to a client that puts and gets over TLS with a token."""
    keys = sample_keys("wire", 16)
    record = (CANARY * 1024)[: SPACE.groups[0].record_nbytes]
    with tempfile.TemporaryDirectory() as place:
        site = Site(Path(place), mutual=False)
        token = site.token.read_text()
        canaries = {"payload": CANARY, "token": token.encode(), "key": keys[0], "space": SPACE.id}
        sniffer = Sniffer(canaries)
        with site.daemon.start(), sniffer.listening(), site.client(token_file=site.token) as client:
            client.register(SPACE)
            client.put(SPACE.id, keys, [record] * len(keys))
            if client.get(SPACE.id, keys) != [record] * len(keys):
                scene.count("wrong_served")
        scene.count("canaries_found", len(sniffer.found))
        scene.details["packets"] = sniffer.packets
    control = Sniffer(canaries)
    with Daemon(tcp=True, file=False) as daemon:
        daemon.start()
        with control.listening(), Client(daemon.address) as client:
            client.register(SPACE)
            client.put(SPACE.id, keys, [record] * len(keys))
    scene.controls["plain TCP shows them"] = {"payload", "key", "space"} <= control.found


def a_man_in_the_middle(scene: Scene) -> None:
    """He has a certificate for the daemon's address, of an authority that is not ours."""
    with tempfile.TemporaryDirectory() as place:
        site = Site(Path(place), mutual=False)
        middle = Middle(*site.stranger.issue("middle"))
        with middle.listening():
            for ca, believes in ((site.authority.ca, False), (site.stranger.ca, True)):
                before = len(middle.seen)
                with Client(middle.address, tls_ca=ca, token_file=site.token) as client:
                    try:
                        client.admin.ping()
                        scene.count("read_other")
                    except KVStoreError:
                        pass
                told = any(seen.startswith(PREFACE) for seen in middle.seen[before:])
                if believes:
                    scene.controls["who trusts his authority talks to him"] = told
                else:
                    scene.count("read_other", int(told))


def every_method_by_every_credential(scene: Scene) -> None:
    """Each method of the .proto, with no credential, and with each kind that is no use."""
    with tempfile.TemporaryDirectory() as place:
        site = Site(Path(place), mutual=False)
        right = site.issuer.issue(Role.ADMIN)
        revoked = site.issuer.issue(Role.ADMIN)
        site.issuer.revoke(revoked)
        bad = {
            "no": "",
            "wrong": right[:-1] + ("A" if right[-1] != "A" else "B"),
            "unknown": make_token("default", Role.ADMIN)[0],
            "expired": site.issuer.issue(Role.ADMIN, not_after=time.time() - 1),
            "revoked": revoked,
            "foreign": site.issuer.issue(Role.ADMIN, tenant="acme"),
        }
        with site.daemon.start():
            credentials = grpc.ssl_channel_credentials(site.authority.ca.read_bytes())
            address = site.daemon.address
            with grpc.secure_channel(address, credentials, options=OPTIONS) as channel:
                found = {
                    f"{kind} {name}": ask(channel, name, bearer(token) if token else ())
                    for kind, token in bad.items()
                    for name in METHODS
                }
                allowed = [call for call, answer in found.items() if answer != UNAUTHORIZED]
                scene.count("calls_allowed", len(allowed))
                scene.details["allowed"] = allowed
                time.sleep(1.1)  # after so many guesses, one that is right waits a second
                answers = [ask(channel, name, bearer(right)) for name in METHODS]
                scene.controls["an admin's token is answered"] = UNAUTHORIZED not in answers
        missing = set(METHODS) ^ set(rights.RIGHTS)
        scene.count("methods_without_right", len(missing))


def revoked_tokens(scene: Scene) -> None:
    """A token is revoked while its connection is open and one of its streams runs."""
    rounds = 1 if scene.quick else 5
    slowest = 0.0
    with tempfile.TemporaryDirectory() as place:
        site = Site(Path(place), mutual=False)
        credentials = grpc.ssl_channel_credentials(site.authority.ca.read_bytes())
        with (
            site.daemon.start(),
            grpc.secure_channel(site.daemon.address, credentials, options=OPTIONS) as channel,
        ):
            for _ in range(rounds):
                token = site.issuer.issue(Role.OPERATOR)
                until(lambda t=token: ask(channel, "WhoAmI", bearer(t)) == ANSWERED, 5)
                began = time.monotonic()
                site.issuer.revoke(token)
                until(lambda t=token: ask(channel, "WhoAmI", bearer(t)) == UNAUTHORIZED, 5)
                slowest = max(slowest, time.monotonic() - began)
                scene.controls["it was let in before"] = True
    scene.details["revoked_s"] = round(slowest, 2)
    if slowest > REVOKED_WITHIN_S:
        scene.count("read_other")


def rotated_certificates(scene: Scene) -> None:
    """The daemon's certificate is replaced ten times under calls; none fails."""
    wanted = 1000 if scene.quick else 10_000
    keys = sample_keys("rotation", 4)
    with tempfile.TemporaryDirectory() as place:
        site = Site(Path(place), mutual=False)
        with site.daemon.start(), site.client(token_file=site.token) as client:
            client.register(SPACE)
            client.put(SPACE.id, keys, [record_of(key) for key in keys])
            calls, failed = [0], [0]
            over = threading.Event()

            def work() -> None:
                while not over.is_set() or calls[0] < wanted:
                    calls[0] += 1
                    try:
                        client.match(SPACE.id, keys)
                    except KVStoreError:
                        failed[0] += 1

            workers = [threading.Thread(target=work) for _ in range(2)]
            for worker in workers:
                worker.start()
            for _ in range(ROTATIONS):
                site.authority.issue("server")
                time.sleep(0.5)
                with site.client(token_file=site.token) as fresh:  # a handshake with the new one
                    fresh.admin.ping()
            over.set()
            for worker in workers:
                worker.join()
    scene.details["calls_during_rotation"] = calls[0]
    scene.count("rotation_failed_calls", failed[0])
    scene.controls["calls were made"] = calls[0] >= wanted
