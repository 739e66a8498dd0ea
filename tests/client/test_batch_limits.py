"""A daemon that takes few keys in one call: clients cut what they ask for, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore import Client, InvalidRequest, Prefix
from kvstore.client.leased import PrefixLeases
from kvstore.client.request_hints import HintSender, SessionHints
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore_vllm.lookup import Lookup

MOST = 16
COUNT = 5 * MOST + 3


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(f"limits.batch_keys_max={MOST}") as daemon:
        yield daemon.start()


@pytest.fixture(params=["local", "remote"])
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target, arena=request.param == "local") as client:
        client.connect()
        yield client


@pytest.fixture
def local(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target) as client:
        yield client


def test_a_client_knows_the_bound_once_it_is_connected(local: Client) -> None:
    assert local.batch_keys_max == 8192
    local.connect()
    assert local.batch_keys_max == MOST
    with pytest.raises(InvalidRequest, match="the limit is 16: split it"):
        local.match(local.register(sample_namespace("bound")), sample_keys("bound", MOST + 1))


def test_large_batches_are_put_and_got(client: Client) -> None:
    keys = sample_keys(f"large {client.local}", COUNT)
    namespace_id = client.register(sample_namespace("large"))
    done = client.put(namespace_id, keys, sample_records(keys))
    assert (done.committed, done.refused) == (COUNT, 0)
    assert client.get(namespace_id, keys) == sample_records(keys)
    targets = [bytearray(record) for record in sample_records(keys)]
    assert client.get_into(namespace_id, keys, targets) == [True] * COUNT


def test_records_that_are_looked_up_are_all_told(local: Client) -> None:
    keys, namespace = sample_keys("look", COUNT), sample_namespace("look")
    namespace_id = local.register(namespace)
    local.put(namespace_id, keys[:-1], sample_records(keys[:-1]))
    found = local.submit(lambda remote: remote.look_up(namespace_id, keys)).result(20)
    assert found.present == [True] * (COUNT - 1) + [False]
    assert found.lease is not None
    assert len(found.lease.keys) == MOST


def test_a_prefix_hits_up_to_the_bound(daemon: Daemon, local: Client) -> None:
    keys, namespace = sample_keys("prefix", COUNT), sample_namespace("prefix")
    local.put(local.register(namespace), keys, sample_records(keys))
    with Client(daemon.target) as fresh:  # which is not connected yet
        lookup = Lookup(
            fresh,
            namespace,
            keys,
            skip_blocks=0,
            readers=1,
            wait_s=5.0,
            request_id="long",
            recompute_s_per_block=0.0,
        )
        lookup.wait(20)
        grant = lookup.grant()
        assert grant is not None
        assert grant.hit_blocks == MOST
        lookup.abandon()
    with Client(daemon.target) as fresh:
        leased = PrefixLeases(fresh, 10.0).acquire(namespace, keys, request_id="long")
        assert leased is not None
        assert leased.hit_blocks == MOST


def test_hints_are_of_as_many_blocks_as_there_may_be(local: Client) -> None:
    keys, namespace = sample_keys("hint", COUNT), sample_namespace("hint")
    namespace_id = local.register(namespace)
    local.put(namespace_id, keys, sample_records(keys))
    said: list[str] = []
    HintSender(local, said.append).send(SessionHints(pin_s=60), namespace, keys)
    pinned = Prefix(namespace_id, keys[:MOST])
    until(lambda: local.hints.pin(pinned, 60).done_blocks == MOST)
    assert said == ["sent"]
