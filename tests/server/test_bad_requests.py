"""Whatever is wrong with a call, the answer is a typed error and the daemon is as before."""

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import pytest

from kvstore import checksum
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import RECORD_NBYTES, sample_keys, sample_namespace, sample_record
from kvstore.testing.wait import until

KEYS = sample_keys("bad", 2)
RECORD = sample_record(KEYS[0])
SPAN = pb.Span(group=0, shard=0, begin=0, end=1)
TOKENS = bytes(4 * 16)


@dataclass
class Raw:
    """A daemon without this project's client between."""

    stub: rpc.KVStoreStub
    namespace_id: bytes

    def header(self, **changes: object) -> pb.PutRequest:
        fields: dict[str, object] = {
            "namespace_id": self.namespace_id,
            "keys": KEYS[0],
            "checksums": [checksum(RECORD)],
        }
        return pb.PutRequest(header=pb.PutHeader(**(fields | changes)))  # type: ignore[arg-type]

    def put(self, *messages: pb.PutRequest) -> pb.CommitReply:
        return self.stub.Put(iter(messages), timeout=5)


def chunks(data: bytes, step: int = 1 << 20) -> Sequence[pb.PutRequest]:
    return [pb.PutRequest(chunk=data[i : i + step]) for i in range(0, len(data), step)]


@pytest.fixture(scope="module")
def raw(daemon: Daemon) -> Iterator[Raw]:
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(daemon.target, options=options) as channel:
        stub = rpc.KVStoreStub(channel)
        spec = sample_namespace().to_json()
        reply = stub.RegisterNamespace(pb.RegisterNamespaceRequest(spec_json=spec), timeout=5)
        yield Raw(stub, reply.namespace_id)


BAD: dict[str, tuple[str, str, Callable[[Raw], object]]] = {
    "key of a wrong length": (
        "InvalidRequest",
        "multiple of 32",
        lambda raw: raw.stub.Match(
            pb.MatchRequest(namespace_id=raw.namespace_id, keys=KEYS[0] + b"x")
        ),
    ),
    "oversize batch": (
        "InvalidRequest",
        "split it",
        lambda raw: raw.stub.Match(
            pb.MatchRequest(namespace_id=raw.namespace_id, keys=bytes(32 * 8193))
        ),
    ),
    "message beyond the transport's limit": (
        "",
        "larger than max",
        lambda raw: raw.stub.Match(
            pb.MatchRequest(namespace_id=raw.namespace_id, keys=bytes(32 << 20))
        ),
    ),
    "unknown namespace": (
        "UnknownNamespace",
        "register it first",
        lambda raw: raw.stub.Match(pb.MatchRequest(namespace_id=bytes(32), keys=KEYS[0])),
    ),
    "namespace id of a wrong length": (
        "InvalidRequest",
        "namespace id",
        lambda raw: raw.stub.Match(pb.MatchRequest(namespace_id=b"short", keys=KEYS[0])),
    ),
    "namespace that is not one": (
        "InvalidRequest",
        "not a namespace",
        lambda raw: raw.stub.RegisterNamespace(pb.RegisterNamespaceRequest(spec_json="[1]")),
    ),
    "namespace whose records cannot fit": (
        "InvalidRequest",
        "dram.extent",
        lambda raw: raw.stub.RegisterNamespace(
            pb.RegisterNamespaceRequest(spec_json=sample_namespace("big", 1 << 29).to_json())
        ),
    ),
    "RPC version of the future": (
        "Incompatible",
        f"version {RPC_VERSION + 1}, this daemon {RPC_VERSION}",
        lambda raw: raw.stub.OpenSession(
            pb.OpenSessionRequest(rpc_version=RPC_VERSION + 1, token="t" * 16)
        ),
    ),
    "short token": (
        "InvalidRequest",
        "16 to 128",
        lambda raw: raw.stub.OpenSession(
            pb.OpenSessionRequest(rpc_version=RPC_VERSION, token="short")
        ),
    ),
    "lease in the daemon's own session": (
        "SessionEnded",
        "session",
        lambda raw: raw.stub.Acquire(
            pb.AcquireRequest(session=0, namespace_id=raw.namespace_id, keys=KEYS[0])
        ),
    ),
    "lease in a session of another daemon": (
        "SessionEnded",
        "session",
        lambda raw: raw.stub.Acquire(
            pb.AcquireRequest(
                session=secrets.randbits(64), namespace_id=raw.namespace_id, keys=KEYS[0]
            )
        ),
    ),
    "lease without having joined the arena": (
        "SessionEnded",
        "joined",
        lambda raw: raw.stub.Reserve(
            pb.ReserveRequest(
                session=raw.stub.OpenSession(
                    pb.OpenSessionRequest(rpc_version=RPC_VERSION, token=secrets.token_hex(16))
                ).session,
                namespace_id=raw.namespace_id,
                keys=KEYS[0],
                spans=[SPAN],
            )
        ),
    ),
    "commit without a reservation": (
        "InvalidRequest",
        "no reservation",
        lambda raw: raw.stub.Commit(pb.CommitRequest(session=1 << 63, lease=99, checksums=[1])),
    ),
    "wait that is not a number": (
        "InvalidRequest",
        "wait_s=nan",
        lambda raw: raw.stub.Flush(pb.FlushRequest(wait_s=math.nan)),
    ),
    "wait of less than nothing": (
        "InvalidRequest",
        "wait_s=-1",
        lambda raw: raw.stub.Flush(pb.FlushRequest(wait_s=-1)),
    ),
    "put without a header": (
        "InvalidRequest",
        "starts with its header",
        lambda raw: raw.put(*chunks(RECORD)),
    ),
    "put of nothing": ("InvalidRequest", "starts with its header", lambda raw: raw.put()),
    "put of a record that is too short": (
        "InvalidRequest",
        f"of the {RECORD_NBYTES}",
        lambda raw: raw.put(raw.header(), *chunks(RECORD[:-1])),
    ),
    "put of a record that is too long": (
        "InvalidRequest",
        f"more bytes than the {RECORD_NBYTES}",
        lambda raw: raw.put(raw.header(), *chunks(RECORD + b"x")),
    ),
    "put of a chunk over the limit": (
        "InvalidRequest",
        "a chunk has",
        lambda raw: raw.put(raw.header(), *chunks(bytes((1 << 20) + 1), 2 << 20)),
    ),
    "put with two headers": (
        "InvalidRequest",
        "a chunk has",
        lambda raw: raw.put(raw.header(), raw.header(), *chunks(RECORD)),
    ),
    "put whose bytes do not match their checksum": (
        "CorruptBlock",
        "checksum",
        lambda raw: raw.put(raw.header(), *chunks(RECORD[:-1] + b"x")),
    ),
    "put with too few checksums": (
        "InvalidRequest",
        "0 checksums for 1 keys",
        lambda raw: raw.put(raw.header(checksums=[]), *chunks(RECORD)),
    ),
    "put of a part that does not exist": (
        "InvalidRequest",
        "group 3",
        lambda raw: raw.put(raw.header(group=3), *chunks(RECORD)),
    ),
    "put of tokens that are not those of its blocks": (
        "InvalidRequest",
        "3 bytes of tokens for 1 blocks",
        lambda raw: raw.put(raw.header(tokens=b"abc"), *chunks(RECORD)),
    ),
    "put for an adapter with a long name": (
        "InvalidRequest",
        "at most 256",
        lambda raw: raw.put(raw.header(tokens=TOKENS, lora_name="x" * 257), *chunks(RECORD)),
    ),
    "put after a parent that is no key": (
        "InvalidRequest",
        "32 bytes, not 5",
        lambda raw: raw.put(raw.header(parent=b"short"), *chunks(RECORD)),
    ),
    "get of a shard that does not exist": (
        "InvalidRequest",
        "shard 1",
        lambda raw: list(
            raw.stub.Get(
                pb.GetRequest(namespace_id=raw.namespace_id, keys=KEYS[0], shard=1), timeout=5
            )
        ),
    ),
    "scan from what is no key": (
        "InvalidRequest",
        "32 bytes",
        lambda raw: raw.stub.Scan(pb.ScanRequest(after=b"short")),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_and_changes_nothing(
    name: str, raw: Raw, state: Callable[[], object]
) -> None:
    error, word, call = BAD[name]
    before = state()
    with pytest.raises(grpc.RpcError) as caught:
        call(raw)
    failed = caught.value
    assert isinstance(failed, grpc.Call)
    metadata = {str(key): value for key, value in failed.trailing_metadata() or ()}
    assert metadata.get("kvstore-error", "") == error
    assert word in (failed.details() or "")
    assert state() == before


@pytest.fixture
def state(raw: Raw) -> Callable[[], object]:
    """What a refused call must not change."""

    def blocks_and_leases() -> object:
        items = raw.stub.Scan(pb.ScanRequest(), timeout=5).items
        stats = raw.stub.Stats(pb.StatsRequest(), timeout=5).json
        return [item.key for item in items], '"leases": 0' in stats

    return blocks_and_leases


def test_a_retry_is_announced_in_metadata(daemon: Daemon, raw: Raw) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        raw.stub.Acquire(
            pb.AcquireRequest(session=1, namespace_id=raw.namespace_id, keys=KEYS[0]), timeout=5
        )
    assert isinstance(caught.value, grpc.Call)
    metadata = {str(key): value for key, value in caught.value.trailing_metadata() or ()}
    assert float(metadata["kvstore-retry-after-s"]) > 0


def test_a_put_cut_off_in_the_middle_leaves_nothing(raw: Raw, state: Callable[[], object]) -> None:
    before = state()

    def messages() -> Iterator[pb.PutRequest]:
        yield raw.header()
        yield pb.PutRequest(chunk=RECORD[:100])
        call.cancel()
        yield pb.PutRequest(chunk=RECORD[100:])

    call = raw.stub.Put.future(messages(), timeout=5)
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        call.result()
    until(lambda: state() == before)
