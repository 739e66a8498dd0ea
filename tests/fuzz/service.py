"""The RPC methods under hostile messages, in this process, so that a fuzzer sees what they cover.

The store is the real one, on the simulated disk and clock. What a message may not do: raise
anything but a KVStoreError, block, or leave leases behind once the session's process is gone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from random import Random
from typing import Any

from google.protobuf.message import DecodeError, Message

from kvstore import checksum
from kvstore.metrics import Metrics
from kvstore.model.errors import KVStoreError
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.identity import CALLER, UNIX_SOCKET
from kvstore.server.recorder import Recorder
from kvstore.server.service import Service
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.settings import Settings as DaemonSettings
from kvstore.store.live_settings import LiveSettings
from kvstore.store.store import Store
from kvstore.store.tenants import Tenants
from kvstore.transport.messages import Epoch
from tests.fuzz.targets import KEYS, LOSSY, NAMESPACE, RECORD_NBYTES, Target
from tests.sim.daemon import Daemon, Settings
from tests.sim.disk import Platter
from tests.sim.loop import SimLoop
from tests.sim.model import Model

EPOCH = Epoch("fuzz", 50)
SESSION = 1002  # the first id given out; the next one is its process's
TOKEN = "t" * 16
CALL_S = 120.0  # of virtual time
REQUESTS: list[tuple[str, type[Message]]] = [
    ("OpenSession", pb.OpenSessionRequest),
    ("RegisterNamespace", pb.RegisterNamespaceRequest),
    ("Match", pb.MatchRequest),
    ("Acquire", pb.AcquireRequest),
    ("Reserve", pb.ReserveRequest),
    ("Commit", pb.CommitRequest),
    ("Await", pb.AwaitRequest),
    ("Release", pb.ReleaseRequest),
    ("Get", pb.GetRequest),
    ("Delete", pb.DeleteRequest),
    ("Clear", pb.ClearRequest),
    ("Flush", pb.FlushRequest),
    ("Stats", pb.StatsRequest),
    ("Scan", pb.ScanRequest),
    ("ListNamespaces", pb.ListNamespacesRequest),
    ("Outcomes", pb.OutcomesRequest),
    ("Explain", pb.ExplainRequest),
    ("Put", pb.PutRequest),
    ("Record", pb.RecordRequest),
    ("Hint", pb.HintRequest),
    ("History", pb.HistoryRequest),
    ("Tree", pb.TreeRequest),
    ("Conversations", pb.ConversationsRequest),
    ("Slow", pb.SlowRequest),
    ("Monitor", pb.MonitorRequest),
]
NUMBERS = {name: number for number, (name, _) in enumerate(REQUESTS)}


class _Call:
    """What a method asks of its call: it is not cancelled, and has time."""

    def time_remaining(self) -> float:
        return CALL_S

    def peer(self) -> str:
        return "unix:"

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """It never is cut off."""


def _no_tenants(store: Store, metrics: Metrics, config: LiveSettings) -> TenantAdmin:
    """Return what adds tenants to a daemon that has none: it refuses."""

    async def never(*given: Any) -> Any:
        raise AssertionError("a tenant was served")

    return TenantAdmin(Tenants(DaemonSettings(), lambda *_: store, metrics), config, never, never)


class Host:
    """A daemon's service with one session joined, on a virtual clock."""

    def __init__(self) -> None:
        self._loop = SimLoop(Random(0))
        settings = Settings(devices=1, file_bytes=16 << 20, codec="raw", failing=0.0, rots=False)
        self._daemon = Daemon(
            self._loop,
            [Platter()],
            Model(),
            Random(0),
            settings,
            new_id=itertools.count(SESSION).__next__,
        )
        store = self._daemon.store
        CALLER.set(UNIX_SOCKET)
        config = LiveSettings(DaemonSettings(), store.caps)
        self._service = Service(
            store,
            EPOCH,
            metrics=self._daemon.metrics,
            arena_socket="/none",
            call_socket="/none",
            version="fuzz",
            recorder=Recorder(self._daemon.metrics),
            config=config,
            admin=_no_tenants(store, self._daemon.metrics, config),
            addresses=dict,
        )
        self.run(self._daemon.start({}, []))
        store.namespaces.register(NAMESPACE)
        store.namespaces.register(LOSSY)
        session = store.sessions.open(TOKEN, "fuzz")
        self.session = session
        self._member = store.sessions.join(session, TOKEN)
        for name, message in seeds(self.session):
            self.call(name, [message])

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(CALL_S):
                return await work

        return self._loop.run_until_complete(bounded())

    def call(self, name: str, messages: Sequence[Any]) -> None:
        """Call a method. Raises what is a finding."""
        try:
            self.run(self._answer(name, messages))
        except KVStoreError:
            pass
        assert not self._loop.unhandled, self._loop.unhandled

    def close(self) -> None:
        """End the session and see that it leaves nothing, and that the store still works."""
        self._daemon.store.sessions.leave(self._member)
        self.run(asyncio.sleep(1.0))
        stats = self._daemon.store.report.stats()
        leased = stats["leases"], stats["dram"]["leased_bytes"], stats["file"]["leased_bytes"]
        assert leased == (0, 0, 0), stats
        assert self.run(self._daemon.store.puts.flush(20.0)), "the writer is dead"
        self.run(self._daemon.store.close())
        self._loop.close()

    async def _answer(self, name: str, messages: Sequence[Any]) -> None:
        method: Any = getattr(self._service, name)
        if name == "Put":

            async def stream() -> Any:
                for message in messages:
                    yield message

            await method(stream(), _Call())
        elif name == "Get":
            async for reply in method(messages[0], _Call()):
                assert reply.ByteSize() < 2 << 20
        elif name in ("Record", "Monitor"):
            async with aclosing(method(messages[0], _Call())) as replies:
                assert (await anext(replies)).ByteSize() == 0
        else:
            assert (await method(messages[0], _Call())).ByteSize() < 8 << 20


def seeds(session: int) -> list[tuple[str, Any]]:
    """Return good calls."""
    space, keys, span = NAMESPACE.id, b"".join(KEYS[:2]), pb.Span(begin=0, end=2)
    record = bytes(RECORD_NBYTES)
    header = pb.PutHeader(namespace_id=space, keys=KEYS[5], checksums=[checksum(record)])
    return [
        ("OpenSession", pb.OpenSessionRequest(rpc_version=RPC_VERSION, token=TOKEN)),
        ("RegisterNamespace", pb.RegisterNamespaceRequest(spec_json=NAMESPACE.to_json())),
        ("Match", pb.MatchRequest(namespace_id=space, keys=keys, skip_blocks=1)),
        (
            "Reserve",
            pb.ReserveRequest(session=session, namespace_id=space, keys=keys, spans=[span]),
        ),
        ("Commit", pb.CommitRequest(session=session, lease=1004, checksums=[1, 2])),
        ("Acquire", pb.AcquireRequest(session=session, namespace_id=space, keys=keys)),
        (
            "Acquire",
            pb.AcquireRequest(
                session=session, namespace_id=space, keys=keys, spans=[span], file_places=True
            ),
        ),
        ("Await", pb.AwaitRequest(session=session, lease=1005, blocks=3)),
        ("Release", pb.ReleaseRequest(session=session, leases=[1005, 1006])),
        ("Get", pb.GetRequest(namespace_id=space, keys=keys)),
        ("Put", pb.PutRequest(header=header)),
        ("Delete", pb.DeleteRequest(namespace_id=space, keys=KEYS[7])),
        ("Flush", pb.FlushRequest(wait_s=0.1)),
        ("Stats", pb.StatsRequest()),
        ("Scan", pb.ScanRequest(namespace_id=space, limit=3)),
        ("ListNamespaces", pb.ListNamespacesRequest()),
        ("Outcomes", pb.OutcomesRequest(request_id="r", limit=3)),
        ("Explain", pb.ExplainRequest(namespace_id=space, keys=keys)),
        ("Record", pb.RecordRequest(share=0.5, block=1)),
        ("Monitor", pb.MonitorRequest(namespace_id=space, request_id="r", tier="dram")),
        ("History", pb.HistoryRequest(step_s=10, since=5.0)),
        ("Tree", pb.TreeRequest(namespace_id=space, depth=2, limit=9)),
        ("Tree", pb.TreeRequest(through=KEYS[1], cursor=bytes(16))),
        ("Conversations", pb.ConversationsRequest(session_id="s", limit=3)),
        ("Slow", pb.SlowRequest(kind="save", over_s=0.1, reset=True)),
        ("Hint", pb.HintRequest(namespace_id=space, keys=keys, pin=pb.Pin(ttl_s=9))),
        ("Hint", pb.HintRequest(session_id="s", demote=pb.Demote(), wait_s=0.1)),
        ("Hint", pb.HintRequest(session_id="s", expect=pb.Expect(in_s=3))),
        *_lossy_seeds(session),
    ]


def _lossy_seeds(session: int) -> list[tuple[str, Any]]:
    """Return good calls in a namespace with fine parts, whose records have sizes of their own."""
    space, keys = LOSSY.id, b"".join(KEYS[2:5])
    spans = [pb.Span(group=group, begin=0, end=3) for group in (0, 1)]
    sizes = [RECORD_NBYTES, 2000, 2000, 1000, 1000, 1000]
    sums = [checksum(bytes(nbytes)) for nbytes in sizes]  # nobody writes into the slots
    reserve = pb.ReserveRequest(
        session=session,
        namespace_id=space,
        keys=keys,
        spans=spans,
        nbytes=sizes,
        refined=True,
    )
    read = pb.AcquireRequest(session=session, namespace_id=space, keys=keys, refined=True)
    return [
        ("RegisterNamespace", pb.RegisterNamespaceRequest(spec_json=LOSSY.to_json())),
        ("Reserve", reserve),
        ("Commit", pb.CommitRequest(session=session, lease=1008, checksums=sums)),
        ("Match", pb.MatchRequest(namespace_id=space, keys=keys, refined=True)),
        ("Acquire", read),
        ("Release", pb.ReleaseRequest(session=session, leases=[1008, 1009])),
        ("Delete", pb.DeleteRequest(namespace_id=space, keys=keys, corrupt=True)),
        ("Explain", pb.ExplainRequest(namespace_id=space, keys=keys)),
    ]


def encode(name: str, message: Message) -> bytes:
    """Return one call as the fuzzer's bytes: method, length, message."""
    body = message.SerializeToString()
    return bytes([NUMBERS[name], *divmod(len(body), 256)]) + body


def _calls(data: bytes) -> None:
    """Make the calls that `data` holds on a fresh daemon."""
    host = Host()
    try:
        while len(data) > 3:
            name, kind = REQUESTS[data[0] % len(REQUESTS)]
            nbytes = 256 * data[1] + data[2]
            body, data = data[3 : 3 + nbytes], data[3 + nbytes :]
            try:
                messages: list[Any] = [kind.FromString(body)]
            except DecodeError:
                continue
            if name == "Put":
                messages.append(pb.PutRequest(chunk=bytes(RECORD_NBYTES)))
            host.call(name, messages)
    finally:
        host.close()


SERVICE = Target(
    _calls,
    [
        *(encode(name, message) for name, message in seeds(SESSION)),
        b"".join(encode(name, message) for name, message in seeds(SESSION)),
    ],
)
