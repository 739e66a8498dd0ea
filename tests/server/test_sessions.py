"""Nobody guesses the id of a session or lease, is shown one, or uses one of another process."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc.aio
import pytest

from kvstore import AsyncClient, Client, Part, Span
from kvstore.client.connection import Connection
from kvstore.decide.planner.leases import DAEMON_SESSION
from kvstore.model.errors import Unauthorized
from kvstore.rpc.status import error_of
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

GUESSES = 10_000
NEAR = 500
SPACE = sample_namespace()
KEYS = sample_keys("victim", 4)
UNSHARE = shutil.which("unshare")

# Another process's engine: it stores, leases and reserves, tells its ids, and settles when told.
VICTIM = """
import json, sys
from kvstore import Client, Part, Span
from kvstore.model.checksum import checksum
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

space, keys = sample_namespace(), sample_keys("victim", 4)
with Client(sys.argv[1], name="victim") as client:
    client.register(space)
    client.put(space.id, keys, sample_records(keys))
    lease = client.acquire(space.id, keys)
    more = sample_keys(sys.argv[2], 4)
    spans = [Span(Part(0, 0), 0, 4)]
    reserved = client.reserve(space.id, more, first_block=0, parent=None, spans=spans)
    session = client._client._caller._connection.session
    print(json.dumps([session, lease.lease_id, reserved.lease_id]), flush=True)
    sys.stdin.readline()
    sums = []
    for slot, record in zip(reserved.slots, sample_records(more)):
        client.view(slot)[:] = record
        sums.append(checksum(record))
    done = client.commit(reserved.lease_id, sums)
    print(json.dumps([client.release(lease.lease_id), done.committed]), flush=True)
"""

# A fork holds the links of its parent, which goes on.
FORKS = """
import os, signal, sys, time
from kvstore import Client
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

space, keys = sample_namespace(), sample_keys("parent", 2)
with Client(sys.argv[1]) as client:
    client.register(space)
    client.put(space.id, keys, sample_records(keys))
    lease = client.acquire(space.id, keys).lease_id
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    print(client.release(lease))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(client.release(client.acquire(space.id, keys).lease_id))
"""


class Ids(NamedTuple):
    """What a process holds."""

    session: int
    lease: int
    reservation: int


class Nobody:
    """Watches a connection and does nothing about it."""

    def lost(self, connection: Connection) -> None: ...
    def ended(self, connection: Connection) -> None: ...


@contextmanager
def victim(daemon: Daemon) -> Iterator[tuple[Ids, subprocess.Popen[str]]]:
    """Yield what another process holds, and that process."""
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM, daemon.target, secrets.token_hex(4)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield Ids(*json.loads(process.stdout.readline())), process
        finally:
            process.kill()


def settled(process: subprocess.Popen[str]) -> list[Any]:
    """Let the victim commit and release; returns what it was answered."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return list(json.loads(process.stdout.readline()))


def connected(daemon: Daemon) -> Any:
    return Connection.open(
        daemon.target, token=secrets.token_hex(16), name="thief", timeout_s=5, watcher=Nobody()
    )


async def obeyed(stub: Any, session: int, leases: Sequence[int], method: int) -> bool:
    """Make one call with these ids; say whether it did anything, or told anything."""
    spans = [pb.Span(begin=0, end=1)]
    try:
        match method % 4:
            case 0:
                release = pb.ReleaseRequest(session=session, leases=leases)
                return any((await stub.Release(release, timeout=5)).held)
            case 1:
                commit = pb.CommitRequest(session=session, lease=leases[-1], checksums=[1] * 4)
                return bool((await stub.Commit(commit, timeout=5)).committed)
            case 2:
                joined = b"".join(KEYS)
                acquire = pb.AcquireRequest(session=session, namespace_id=SPACE.id, keys=joined)
                return bool((await stub.Acquire(acquire, timeout=5)).lease)
            case _:
                (key,) = sample_keys("stolen", 1)
                reserve = pb.ReserveRequest(
                    session=session, namespace_id=SPACE.id, keys=key, spans=spans
                )
                return bool((await stub.Reserve(reserve, timeout=5)).lease)
    except grpc.aio.AioRpcError:
        return False


def guesses(own: int, other: Ids, *, real: bool) -> Iterator[tuple[int, list[int]]]:
    """Yield a session and leases to try. real: also the true ids of the other process."""
    if real:
        yield other.session, [other.lease, other.reservation]
        yield own, [other.lease, other.reservation]
    for session in (0, (1 << 64) + DAEMON_SESSION, 1, 2, (1 << 63) - 1, 1 << 63):
        yield session, [other.lease, other.reservation]
    for step in range(1, NEAR + 1):
        for sign in (-1, 1):
            yield other.session + sign * step, [other.lease, other.reservation]
            yield own + sign * step, list(range(own - 10, own + 10))
    while True:
        yield secrets.randbits(63), [secrets.randbits(63)]


@pytest.mark.parametrize("way", ["calls", "grpc"])
def test_guessed_and_foreign_ids_are_never_obeyed(daemon: Daemon, way: str) -> None:
    async def attack(other: Ids) -> int:
        own = await connected(daemon)
        assert len({own.session, *other}) == 4
        stub = own.stub if way == "calls" else rpc.KVStoreStub(own.channel)
        tried = count = 0
        for session, leases in guesses(own.session, other, real=way == "calls"):
            # One's own session is named for the others' leases only.
            for method in range(2 if session == own.session else 4):
                count += await obeyed(stub, session, leases, method)
                tried += 1
            if tried >= GUESSES:
                break
        assert await obeyed(stub, own.session, [0], 3), "its own session"
        await own.close()
        return count

    with victim(daemon) as (ids, process):
        assert asyncio.run(attack(ids)) == 0
        assert settled(process) == [[True], 4]


def test_a_foreign_session_is_refused_as_such_and_counted(daemon: Daemon) -> None:
    async def name(session: int) -> Exception | None:
        own = await connected(daemon)
        try:
            await own.stub.Release(pb.ReleaseRequest(session=session, leases=[1]), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error_of(error, "")
        finally:
            await own.close()
        return None

    with victim(daemon) as (ids, _):
        assert isinstance(asyncio.run(name(ids.session)), Unauthorized)
    with Client(daemon.target) as client:
        assert client.admin.stats()["totals"]["rpc_errors"]["Release/Unauthorized/"] >= 1


class Hidden(Daemon):
    """A daemon that sees no process ids of its clients: it lives in a PID namespace of its own."""

    def command(self, *arguments: str) -> list[str]:
        assert UNSHARE is not None
        own = super().command(*arguments)
        return [UNSHARE, "--user", "--map-current-user", "--pid", "--fork", "--kill-child", *own]


def _may_unshare() -> bool:
    with Hidden(file=False) as hidden:
        try:
            hidden.start()
        except RuntimeError:
            return False
        return True


def test_a_link_without_a_process_id_keeps_the_first_session_it_names() -> None:
    if UNSHARE is None or not _may_unshare():
        pytest.skip("no PID namespace can be made here")

    async def attack(daemon: Daemon, other: Ids) -> list[bool]:
        own = await connected(daemon)
        first = await obeyed(own.stub, own.session, [0], 3)
        stolen = [await obeyed(own.stub, other.session, [other.lease], n) for n in range(4)]
        again = await obeyed(own.stub, own.session, [0], 2)
        await own.close()
        return [first, again, *stolen]

    with Hidden(file=False) as daemon:
        daemon.start()
        with victim(daemon) as (ids, process):
            assert asyncio.run(attack(daemon, ids)) == [True, True, False, False, False, False]
            assert settled(process) == [[True], 4]


def test_a_process_that_has_forked_keeps_its_session(daemon: Daemon) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, daemon.target],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "[True]\n[True]\n", done.stderr


def test_a_client_goes_on_after_its_session_ended_and_after_a_restart() -> None:
    token = secrets.token_hex(16)
    with Daemon() as daemon, Client(daemon.start().target, token=token) as client:
        client.register(SPACE)
        client.put(SPACE.id, KEYS, sample_records(KEYS), durable=True)
        with Client(daemon.target, token=token) as other:
            other.connect()
        until(lambda: client.release(client.acquire(SPACE.id, KEYS).lease_id) == [True])
        daemon.kill()
        daemon.start()
        until(lambda: client.available, 10.0)
        assert client.release(client.acquire(SPACE.id, KEYS).lease_id) == [True]


def test_no_id_is_shown_to_anybody() -> None:
    with Daemon() as daemon, Client(daemon.start().target, name="engine") as client:
        client.register(SPACE)
        client.put(SPACE.id, KEYS, sample_records(KEYS))

        async def ask(asking: AsyncClient) -> tuple[int, int, pb.Lookup]:
            recording = asking.admin.record()
            assert not (await anext(recording)).lookups
            grant = await asking.acquire(SPACE.id, KEYS, request_id="r")
            (lookup,) = (await anext(recording)).lookups
            connection = await asking._caller.connected()
            await asking.release(grant.lease_id)
            return connection.session, grant.lease_id, lookup

        session, lease, lookup = client.submit(ask).result(20)
        assert lookup.session == 1
        shown = [
            json.dumps(client.admin.stats()),
            repr(client.admin.outcomes()),
            repr(client.admin.explain(SPACE.id, KEYS)),
            str(lookup),
            _metrics(daemon),
        ]
        client.close()
        daemon.stop()
        shown.append(daemon.output())
        assert "session='engine #1' state=ended" in daemon.output()
        assert not [text for text in shown for id_ in (session, lease) if str(id_) in text]


def _metrics(daemon: Daemon) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{daemon.metrics_port}/metrics", timeout=5) as reply:
        return str(reply.read().decode())


def test_a_client_waits_with_others_of_its_session(daemon: Daemon) -> None:
    """Two clients of one process and token: each has its own links into the same session."""
    token = secrets.token_hex(16)
    with Client(daemon.target, token=token) as one, Client(daemon.target, token=token) as two:
        namespace_id = one.register(SPACE)
        two.register(SPACE)
        keys = sample_keys("shared", 2)
        one.put(namespace_id, keys, sample_records(keys))
        spans = [Span(Part(0, 0), 0, 2)]
        grant = one.acquire(namespace_id, keys, spans=spans)
        assert two.release(grant.lease_id) == [True]
