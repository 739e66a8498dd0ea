"""Another user of the host: no method of the .proto is answered or obeyed, at whatever address.

The methods and their messages come from the descriptor, so a new one is covered by itself; the same
calls by the daemon's own user are all answered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client, Part, Span, checksum
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.transport.call_wire import METHODS

NOBODY = 65534
SPACE = sample_namespace()
ALL = [method.name for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods]
HOT = [method.name for method in METHODS]
KNOWN = [
    "OpenSession",
    "RegisterNamespace",
    "Match",
    "Acquire",
    "Reserve",
    "Commit",
    "Release",
    "Put",
    "Get",
    "Delete",
    "Clear",
    "Flush",
    "Stats",
    "Scan",
    "ListNamespaces",
    "Outcomes",
    "Explain",
    "Record",
    "History",
    "Tree",
    "Conversations",
    "Slow",
    "Monitor",
    "GetConfig",
    "SetConfig",
    "LogLines",
    "Hint",
]

# Imports everything as itself, becomes the user it is told, and makes every call at every address.
STRANGER = r"""
import asyncio, contextlib, json, os, secrets, socket, sys
import grpc
from google.protobuf import message_factory
from kvstore.client.calls import CallStub
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.transport.arena_wire import Hello, Welcome, receive, send
from kvstore.transport.call_wire import METHODS

uid, path = int(sys.argv[1]), sys.argv[2]
ports, ids = json.loads(sys.argv[3]), json.loads(sys.argv[4])
VALUES = {
    "rpc_version": RPC_VERSION, "token": secrets.token_hex(16), "share": 1.0, "begin": 0, "end": 1,
    "group": 0, "shard": 0, "first_block": 0, "block": 0, "skip_blocks": 0, "after": b"",
    "parent": b"", "in_s": 1.0, "session": ids["session"], "lease": ids["reservation"],
    "leases": [ids["lease"]], "checksums": [ids["checksum"]], "spec_json": ids["spec"],
    "namespace_id": bytes.fromhex(ids["namespace"]), "keys": bytes.fromhex(ids["key"]),
    "chunk": bytes.fromhex(ids["record"]), "assignments": ["dram.capacity=64MiB"],
    "nbytes": len(bytes.fromhex(ids["record"])), "tokens": bytes(64),
    "prefix": b"", "through": b"", "cursor": b"", "step_s": 1, "kind": "", "tier": "",
}
USUAL = {"int": 1, "float": 0.1, "bool": False, "string": "x", "bytes": b"x"}
KINDS = {1: "float", 2: "float", 8: "bool", 9: "string", 12: "bytes"}


def fill(message, choice=0):
    "Set every field, and of each oneof the one of that number."
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1 and oneof.fields[choice] != field:
            continue
        repeated = field.is_repeated
        if field.message_type is not None:
            at = getattr(message, field.name)
            fill(at.add() if repeated else at)
            (at if not repeated else at[0]).SetInParent()
            continue
        value = VALUES.get(field.name, USUAL[KINDS.get(field.type, "int")])
        if repeated:
            getattr(message, field.name).extend(value if isinstance(value, list) else [value])
        else:
            setattr(message, field.name, value)
    return message


def requests(kind):
    "Return a whole message, or, of a stream, one of each kind."
    oneofs = [len(oneof.fields) for oneof in kind.DESCRIPTOR.oneofs]
    return [fill(kind(), choice) for choice in range(max(oneofs, default=1))]


def ask(channel, method):
    "Say whether a gRPC call is answered, by whatever the daemon itself says."
    request = message_factory.GetMessageClass(method.input_type)
    reply = message_factory.GetMessageClass(method.output_type)
    kind = ("stream" if method.client_streaming else "unary") + (
        "_stream" if method.server_streaming else "_unary")
    call = getattr(channel, kind)(
        f"/kvstore.rpc.v1.KVStore/{method.name}",
        request_serializer=request.SerializeToString, response_deserializer=reply.FromString)
    all_of_it = requests(request)
    try:
        got = call(iter(all_of_it) if method.client_streaming else all_of_it[0], timeout=5)
        if method.server_streaming:
            next(iter(got))
            got.cancel()
        return "answered"
    except grpc.RpcError as error:
        told = dict(error.trailing_metadata() or ())
        return f"refused by it: {error.details()}" if "kvstore-error" in told else "denied"


async def hot(method):
    stub = await CallStub.connect(path + ".calls", None, daemon_uid=ids["uid"])
    try:
        await getattr(stub, method.name)(fill(method.request()), timeout=5)
        return "answered"
    except grpc.aio.AioRpcError as error:
        told = dict(error.trailing_metadata() or ())
        return f"refused by it: {error.details()}" if "kvstore-error" in told else "denied"
    finally:
        stub.close()


async def arena():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setblocking(False)
        await asyncio.get_running_loop().sock_connect(link, path + ".arena")
        await send(link, Hello(RPC_VERSION, ids["session"], ids["token"]))
        packet, fd = await asyncio.wait_for(receive(link), 5)
        return "answered" if isinstance(packet, Welcome) or fd is not None else "denied"


def safely(coroutine):
    try:
        return asyncio.run(coroutine)
    except (OSError, asyncio.TimeoutError):
        return "denied"


# A pool of its own each: else a channel goes on with the connection that the first one made.
options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
methods = pb.DESCRIPTOR.services_by_name["KVStore"].methods
with grpc.insecure_channel(f"unix:{path}", options=options) as channel:  # loads what it needs
    assert ask(channel, methods[0]) == "answered"
safely(asyncio.sleep(0))
if uid:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
found = {"calls": {m.name: safely(hot(m)) for m in METHODS}}
for address in [f"unix:{path}", *(f"127.0.0.1:{port}" for port in ports)]:
    with grpc.insecure_channel(address, options=options) as channel:
        found[address] = {method.name: ask(channel, method) for method in methods}
found["arena"] = {"Hello": safely(arena())}  # at last: whoever leaves a session ends it
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports of loopback, or beyond, at which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue
    ports = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


class Victim:
    """A client with blocks, a lease and a reservation."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.token = os.urandom(16).hex()
        self.client = Client(daemon.target, token=self.token, name="victim")
        self.client.register(SPACE)
        self.keys = sample_keys("victim", 1)
        (self.record,) = sample_records(self.keys)
        self.client.put(SPACE.id, self.keys, [self.record])
        self.lease = self.client.acquire(SPACE.id, self.keys).lease_id
        self.reserve()

    def reserve(self) -> None:
        spans = [Span(Part(0, 0), 0, 1)]
        key = sample_keys(os.urandom(4).hex(), 1)
        grant = self.client.reserve(SPACE.id, key, first_block=0, parent=None, spans=spans)
        self.reservation = grant.lease_id

    @property
    def session(self) -> int:
        connection: Any = self.client._client._caller._connection
        return int(connection.session)

    def asked_by(self, uid: int) -> dict[str, dict[str, str]]:
        """Return what a process of this user gets for every call, by address."""
        ids = {
            "uid": os.getuid(),
            "token": self.token,
            "session": self.session,
            "lease": self.lease,
            "reservation": self.reservation,
            "namespace": SPACE.id.hex(),
            "key": self.keys[0].hex(),
            "record": self.record.hex(),
            "checksum": checksum(self.record),
            "spec": SPACE.to_json(),
        }
        ports = listening_ports(self.daemon.pid)
        done = subprocess.run(
            [sys.executable, "-", str(uid), str(self.daemon.socket), str(ports), json.dumps(ids)],
            input=STRANGER,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


@pytest.fixture(params=["default", "tcp"])
def victim(request: pytest.FixtureRequest) -> Iterator[Victim]:
    with Daemon(file=False, tcp=request.param == "tcp") as daemon:
        victim = Victim(daemon.start())
        yield victim
        victim.client.close()


@pytest.mark.parametrize("victim", ["default"], indirect=True)
def test_another_user_is_answered_nothing_at_any_address(victim: Victim) -> None:
    ports = listening_ports(victim.daemon.pid)
    assert ports == [victim.daemon.metrics_port], "by default, no other port is open"
    found = victim.asked_by(NOBODY)
    unix, metrics = f"unix:{victim.daemon.socket}", f"127.0.0.1:{ports[0]}"
    assert found == {
        "arena": {"Hello": "denied"},
        "calls": dict.fromkeys(HOT, "denied"),
        unix: dict.fromkeys(ALL, "denied"),
        metrics: dict.fromkeys(ALL, "denied"),
    }
    assert victim.client.release(victim.lease) == [True]
    assert victim.client.get(SPACE.id, victim.keys) == [victim.record]


@pytest.mark.parametrize("victim", ["default"], indirect=True)
def test_sockets_opened_by_mistake_ask_the_kernel_who_it_is(victim: Victim) -> None:
    for place in (victim.daemon.directory, victim.daemon.socket.parent):
        place.chmod(0o755)
    for name in ("arena", "calls"):
        Path(f"{victim.daemon.socket}.{name}").chmod(0o666)
    found = victim.asked_by(NOBODY)
    assert found["arena"] == {"Hello": "denied"}
    assert found["calls"] == dict.fromkeys(HOT, "denied")
    assert victim.client.release(victim.lease) == [True]
    refused = victim.client.admin.stats()["totals"]["rpc_errors"]
    assert refused["ArenaLink/Unauthorized/"] == 1
    assert refused["CallLink/Unauthorized/"] == len(HOT)


def test_its_own_user_is_answered_everything(victim: Victim) -> None:
    """The same calls: what is denied to others is not denied because it is no call."""
    found = victim.asked_by(0)
    unix = found[f"unix:{victim.daemon.socket}"]
    assert list(unix) == ALL
    # A new method may refuse made-up values, in words of its own: it has been reached.
    assert "denied" not in unix.values()
    assert [unix[name] for name in KNOWN] == ["answered"] * len(KNOWN)
    assert found["arena"] == {"Hello": "answered"}
    assert found["calls"].pop("Match") == "answered"
    assert all("has not joined the session" in told for told in found["calls"].values())


@pytest.mark.parametrize("victim", ["tcp"], indirect=True)
def test_a_tcp_port_opened_in_words_is_open_to_everybody(victim: Victim) -> None:
    """What the setting says; and that a port is found and asked, if there is one."""
    found = victim.asked_by(NOBODY)[victim.daemon.address]
    assert list(found) == ALL
    assert "denied" not in found.values()
    refused = [name for name, told in found.items() if "unix socket only" in told]
    assert {*refused} == {"GetConfig", "SetConfig", "LogLines", "AddTenant", "DeleteTenant"}
