"""Hints over RPC: the client's methods, and what is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import grpc
import pytest

from kvstore import AsyncClient, Client, HintKind, InvalidRequest, KeyChain, Prefix, Short, root_key
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_namespace, sample_records

SPEC = sample_namespace("hinted")
TOKENS = list(range(100, 260))


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target, name="engine") as client:
        yield client


def stored(client: Client, salt: str) -> tuple[NamespaceId, list[BlockKey]]:
    namespace_id = client.register(SPEC)
    keys = KeyChain(root_key(namespace_id, salt.encode()), SPEC.block_tokens).update(TOKENS)
    client.put(namespace_id, keys, sample_records(keys), durable=True)
    return namespace_id, keys


def test_a_session_is_hinted_by_the_id_its_requests_had(client: Client) -> None:
    namespace_id, keys = stored(client, "session")
    client.release(client.acquire(namespace_id, keys, session_id="chat-1").lease_id)
    ended = client.hints.end_session("chat-1")
    assert (ended.kind, ended.blocks, ended.done_blocks) == (HintKind.END, 10, 10)
    expected = client.hints.expect("chat-1", 30.0)
    assert (expected.done_blocks, expected.lasts_s) == (10, 30.0)
    demoted = client.hints.demote("chat-1")
    assert (demoted.done_blocks, demoted.short) == (10, Short.NOTHING)
    assert client.match(namespace_id, keys).resident_blocks == 0
    fetched = client.hints.prefetch("chat-1", deadline_s=10.0)
    assert fetched.done_blocks == 10
    assert fetched.took_s > 0
    pinned = client.hints.pin("chat-1", 60.0)
    assert (pinned.done_blocks, pinned.lasts_s) == (10, 60.0)
    assert client.admin.stats()["dram"]["pinned_bytes"] >= pinned.done_bytes > 0
    client.hints.pin("chat-1", 0.0)
    assert client.admin.stats()["dram"]["pinned_bytes"] == 0
    assert client.match(namespace_id, keys).resident_blocks == 10
    assert client.hints.end_session("chat-2").short == Short.UNKNOWN_SESSION


def test_a_prefix_is_named_by_its_tokens(client: Client) -> None:
    stored(client, "tokens")
    prefix = Prefix.of_tokens(SPEC, TOKENS, cache_salt=b"tokens", session_id="chat-3")
    assert client.hints.prefetch(prefix).blocks == 10
    assert client.hints.end_session("chat-3").blocks == 10
    assert client.hints.expect(Prefix.of_tokens(SPEC, [1] * 40), 1.0).short == Short.NOT_STORED


def test_the_asyncio_client_has_the_same_methods(daemon: Daemon, client: Client) -> None:
    namespace_id, keys = stored(client, "asyncio")

    async def hint() -> list[int]:
        remote = AsyncClient(daemon.target, arena=False)
        try:
            target = Prefix(namespace_id, keys)
            reports = [
                await remote.hints.prefetch(target),
                await remote.hints.pin(target, 1.0, bytes_max=1),
                await remote.hints.expect(target, 1.0),
                await remote.hints.end_session(target),
                await remote.hints.demote(target),
            ]
        finally:
            await remote.close()
        return [report.done_blocks for report in reports]

    assert asyncio.run(hint()) == [0, 0, 10, 10, 10]


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": "s"},
        {"end_session": pb.EndSession()},
        {"end_session": pb.EndSession(), "keys": bytes(32)},
        {"end_session": pb.EndSession(), "session_id": "s", "keys": bytes(32)},
        {"end_session": pb.EndSession(), "session_id": "s" * 257},
        {"end_session": pb.EndSession(), "namespace_id": bytes(3), "keys": bytes(32)},
        {"end_session": pb.EndSession(), "namespace_id": bytes(32), "keys": bytes(32)},
        {"end_session": pb.EndSession(), "namespace_id": SPEC.id, "keys": bytes(31)},
        {"expect": pb.Expect(in_s=-1), "session_id": "s"},
        {"expect": pb.Expect(in_s=math.nan), "session_id": "s"},
        {"expect": pb.Expect(in_s=1e9), "session_id": "s"},
        {"pin": pb.Pin(ttl_s=math.inf), "session_id": "s"},
        {"prefetch": pb.Prefetch(), "session_id": "s", "wait_s": -1.0},
        {"demote": pb.Demote(), "session_id": "s", "wait_s": math.nan},
    ],
)
def test_hints_that_make_no_sense_are_refused(daemon: Daemon, client: Client, fields: dict) -> None:  # type: ignore[type-arg]
    client.register(SPEC)
    with grpc.insecure_channel(daemon.target) as channel, pytest.raises(grpc.RpcError) as refused:
        rpc.KVStoreStub(channel).Hint(pb.HintRequest(**fields), timeout=5)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_a_session_id_of_a_request_has_a_bound(client: Client) -> None:
    namespace_id, keys = stored(client, "bound")
    with pytest.raises(InvalidRequest, match="256 characters"):
        client.acquire(namespace_id, keys, session_id="s" * 257)
