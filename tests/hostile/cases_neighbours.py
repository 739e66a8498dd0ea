"""What a tenant, or another user of the host, can do to a neighbour at the daemon's sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import subprocess
import sys
from typing import Any

from kvstore import Client, KVStoreError, Part, Span, checksum
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys
from tests.hostile.probing import probe, worst
from tests.hostile.scene import (
    ANSWER_S,
    NOBODY,
    SPACE,
    UIDS,
    Scene,
    client_of,
    put,
    record_of,
    target_of,
    wrong_among,
)
from tests.server.test_strangers import STRANGER

WRITES = {"Reserve", "Commit", "Put", "Delete", "Clear", "Release", "Hint", "SetConfig"}
PAGES = (
    *("/metrics", "/metrics?tenant=acme", "/metrics?name[]=kvstore_hit_blocks_total"),
    *("/api/status", "/api/status?tenant=acme", "/v1/match?model=m&token_ids=1"),
)
AUC_BOUND = 0.03


def other_users_at_the_sockets(scene: Scene) -> None:
    """Another user, and another tenant's, call every method at a tenant's sockets, and ask the HTTP
    port."""
    with scene.daemon() as daemon, client_of(daemon, "acme", token="v" * 32) as victim:
        keys = put(victim, "victim", 4)
        lease = victim.acquire(SPACE.id, keys)
        told = {
            uid: _asked_as(uid, daemon, victim, lease.lease_id) for uid in (NOBODY, UIDS["beta"])
        }
        for found in told.values():
            for methods in found.values():
                for method, answer in methods.items():
                    if answer != "denied":
                        scene.count("wrote_other" if method in WRITES else "read_other")
        if victim.release(lease.lease_id) != [True]:
            scene.count("wrote_other")
        scene.count("wrong_served", wrong_among(keys, victim.get(SPACE.id, keys)))
        scene.details["calls_denied"] = sum(
            len(m) for found in told.values() for m in found.values()
        )
        own = _asked_as(UIDS["acme"], daemon, victim, lease.lease_id)
        scene.controls["its own user is answered"] = "answered" in own["gRPC"].values()
        pages = {page: _page(daemon, page) for page in ("/readyz", *PAGES)}
        scene.controls["the HTTP port is there"] = pages.pop("/readyz")[0] == 200
        scene.count("read_other", sum(status == 200 for status, _ in pages.values()))
        scene.count("read_other", sum(b"acme" in told for _, told in pages.values()))


def _page(daemon: Daemon, page: str) -> tuple[int, bytes]:
    """Return what the HTTP port tells everybody on this host: it sees no users."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.metrics_port, timeout=ANSWER_S)
    with contextlib.closing(connection):
        connection.request("GET", page)
        answer = connection.getresponse()
        return answer.status, answer.read()


def _asked_as(uid: int, daemon: Daemon, victim: Client, lease: int) -> dict[str, dict[str, str]]:
    """Return what a process of a user gets for every method at the sockets of acme."""
    keys = sample_keys("victim", 1)
    connection: Any = victim._client._caller._connection
    socket = target_of(daemon, "acme").removeprefix("unix:")
    spare = sample_keys(secrets.token_hex(4), 1)
    span = [Span(Part(0, 0), 0, 1)]
    grant = victim.reserve(SPACE.id, spare, first_block=0, parent=None, spans=span)
    ids = {
        "uid": os.getuid(),
        "token": "v" * 32,
        "session": int(connection.session),
        "lease": lease,
        "reservation": grant.lease_id,
        "namespace": SPACE.id.hex(),
        "key": keys[0].hex(),
        "record": record_of(keys[0]).hex(),
        "checksum": checksum(record_of(keys[0])),
        "spec": SPACE.to_json(),
    }
    # It dials as the daemon's user first, to import what it needs; then it is somebody else.
    done = subprocess.run(
        [sys.executable, "-", str(uid), socket, "[]", json.dumps(ids)],
        input=STRANGER,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        check=False,
    )
    victim.release(grant.lease_id)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return {("gRPC" if name.startswith("unix:") else name): said for name, said in found.items()}


def ids_of_another_tenant(scene: Scene) -> None:
    """A tenant names sessions, leases, reservations and keys of another, those it knows too."""
    guesses = 1000 if scene.quick else 10_000
    with (
        scene.daemon() as daemon,
        client_of(daemon, "acme") as victim,
        client_of(daemon, "beta") as thief,
    ):
        keys = put(victim, "victim", 8)
        thief.register(SPACE)
        lease = victim.acquire(SPACE.id, keys)
        known = [lease.lease_id]
        draws = [1 + secrets.randbelow((1 << 63) - 1) for _ in range(guesses)]
        near = [lease.lease_id + step for step in range(-50, 51)]
        for at in range(0, len(draws), 500):
            thief.release(*known, *near, *draws[at : at + 500])
        if victim.admin.stats()["leases"] != 1 or victim.release(lease.lease_id) != [True]:
            scene.count("wrote_other")
        scene.count("read_other", sum(each is not None for each in thief.get(SPACE.id, keys)))
        if thief.admin.delete(SPACE.id, keys) or thief.admin.clear():
            scene.count("wrote_other")
        found = victim.get(SPACE.id, keys)
        scene.count("wrote_other", sum(each is None for each in found))
        scene.count("wrong_served", wrong_among(keys, found))
        scene.details["guesses"] = guesses
        scene.controls["the victim may delete them itself"] = victim.admin.delete(
            SPACE.id, keys
        ) == len(keys)


def probing_for_prefixes(scene: Scene) -> None:
    """A tenant asks for prefixes that another has stored, and for some that nobody has."""
    prompts = 500 if scene.quick else 2000
    draw = random.Random(1)
    with (
        scene.daemon("limits.batch_keys_max=8192") as daemon,
        client_of(daemon, "acme") as victim,
        client_of(daemon, "beta") as thief,
    ):
        stored = [put(victim, f"stored {n}", 1) for n in range(prompts)]
        absent = [sample_keys(f"absent {n}", 1) for n in range(prompts)]
        thief.register(SPACE)
        between = probe(thief, SPACE.id, stored, absent, draw)
        control = probe(victim, SPACE.id, stored, absent, draw)
        scene.details["probe_auc"] = {"between": worst(between), "same_tenant": worst(control)}
        scene.details["ways"] = between
        # With fewer probes chance alone is wider: four standard errors of an AUC.
        bound = max(AUC_BOUND, 4 * (1 / (6 * prompts)) ** 0.5)
        if abs(worst(between) - 0.5) > bound:
            scene.count("read_other")
        scene.controls["the same tenant tells them apart"] = abs(worst(control) - 0.5) >= 0.49


def floods_of_another_tenant(scene: Scene) -> None:
    """A tenant asks for more than there is of everything; its neighbour's blocks stay right."""
    rounds = 20 if scene.quick else 200
    with (
        scene.daemon(beside=_put_and_get) as daemon,
        client_of(daemon, "acme") as victim,
        client_of(daemon, "beta") as thief,
    ):
        keys = put(victim, "victim", 16)
        for n in range(rounds):
            try:
                thief.register(SPACE)
                more = sample_keys(f"flood {n}", 512)
                thief.put(SPACE.id, more, [record_of(key) for key in more], wait_s=0.0)
                thief.acquire(SPACE.id, more, wait_s=0.0)  # and never released
            except KVStoreError:
                continue
            if n % 10 == 0:
                found = victim.get(SPACE.id, keys)
                scene.count("wrong_served", wrong_among(keys, found))
                scene.count("wrote_other", sum(each is None for each in found))
        scene.controls["its own blocks were evicted"] = None in thief.get(
            SPACE.id, sample_keys("flood 0", 512)
        )


def _put_and_get(client: Client) -> None:
    """What an engine does: it stores a block and reads it."""
    keys = sample_keys("beside", 1)
    client.put(SPACE.id, keys, [record_of(key) for key in keys], wait_s=0.0)
    client.get(SPACE.id, keys, wait_s=0.0)
