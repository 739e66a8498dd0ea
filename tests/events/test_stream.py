"""A real daemon, real sockets: what a router is told, what it is not, and what strangers send."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import zmq

from kvstore.client import Client
from kvstore.events import publisher as publisher_module
from kvstore.events.book import Told
from kvstore.events.numbers import AHEAD, Numbers
from kvstore.events.publisher import Publisher, Seen, Tokens
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Group, Namespace
from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.model.tokens import BlockTokens
from kvstore.settings import load_settings
from kvstore.testing.daemon import Daemon
from kvstore.testing.prompts import prompt, store_prompt
from kvstore.testing.wait import until
from tests.events.consumer import Index, Subscriber

SPACE = Namespace(16, (Group("g", 4096),), (("model", "m"),), name="m")
ADDRESSES = ("events.publish=tcp://127.0.0.1:0", "events.replay=tcp://127.0.0.1:0")
SMALL = ("dram.capacity=2MiB", "dram.extent=2MiB")


def numbers_of(keys: list[BlockKey]) -> set[int]:
    return {int.from_bytes(key[:8], "little") for key in keys}


def has(keys: list[BlockKey], *mediums: str) -> object:
    return lambda index: all(index.where.get(n, set()) >= {*mediums} for n in numbers_of(keys))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(*ADDRESSES, *SMALL) as daemon:
        yield daemon.start()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target) as client:
        client.register(SPACE)
        client.admin.clear()
        yield client


@pytest.fixture
def router(client: Client) -> Iterator[Subscriber]:
    where = client.admin.stats()["events"]
    with Subscriber(where["publish"], where["replay"]) as subscriber:
        until(lambda: client.admin.stats()["events"]["subscribers"] >= 1)
        yield subscriber


def test_blocks_are_told_with_their_tokens_tier_by_tier(client: Client, router: Subscriber) -> None:
    tokens = prompt(1, 40 * 16 + 5)
    keys = store_prompt(client, SPACE, tokens[: 20 * 16])
    router.until(has(keys, "CPU"))
    more = store_prompt(client, SPACE, tokens, first_block=20, durable=True)
    assert more[:20] == keys
    keys = more
    client.admin.flush()
    router.until(has(keys, "CPU", "STORAGE"))
    for at, key in enumerate(keys):
        number = int.from_bytes(key[:8], "little")
        assert router.index.tokens[number] == tuple(tokens[at * 16 : at * 16 + 16])
    assert router.index.lost == 0
    for seed in range(20):  # so that the first prompt leaves the arena, and stays in files
        store_prompt(client, SPACE, prompt(100 + seed, 40 * 16), durable=True)
    router.until(lambda index: all(index.where.get(n) == {"STORAGE"} for n in numbers_of(keys)))
    client.admin.delete(SPACE.id, keys[30:])
    router.until(lambda index: not numbers_of(keys[30:]) & index.where.keys())
    assert numbers_of(keys[:30]) <= router.index.where.keys()
    assert router.numbers == list(range(router.numbers[0], router.numbers[-1] + 1))
    assert router.topics == {b""}
    batches = [payload for _, payload in router.replay(router.numbers[-1])]
    assert len(batches) == 1
    assert Index().apply(batches[0]).data_parallel_rank == 1000


def test_blocks_without_tokens_are_told_when_they_are_asked_for(
    client: Client, router: Subscriber
) -> None:
    tokens = prompt(2, 10 * 16)
    keys = store_prompt(client, SPACE, tokens, told=False)
    later = store_prompt(client, SPACE, prompt(3, 16))
    router.until(has(later, "CPU"))
    assert not numbers_of(keys) & router.index.where.keys()
    grant = client.acquire(SPACE.id, keys, tokens=BlockTokens.of(tokens))
    client.release(grant.lease_id)
    router.until(has(keys, "CPU"))
    with pytest.raises(InvalidRequest, match="64 bytes for each block"):
        client.acquire(SPACE.id, keys, tokens=BlockTokens(b"123"))


def test_who_joins_later_or_again_is_told_everything(client: Client, router: Subscriber) -> None:
    keys = store_prompt(client, SPACE, prompt(4, 30 * 16))
    router.until(has(keys, "CPU"))
    where = client.admin.stats()["events"]
    with Subscriber(where["publish"]) as late:  # it never asks for a replay
        late.until(has(keys, "CPU"))
        assert late.index.lost == 0
        late.cut()
        client.admin.delete(SPACE.id, keys[10:])
        more = store_prompt(client, SPACE, prompt(5, 8 * 16))
        router.until(has(more, "CPU"))
        late.connect()
        late.until(has(more, "CPU"))
        late.until(lambda index: not numbers_of(keys[10:]) & index.where.keys())
        assert numbers_of(keys[:10]) <= late.index.where.keys()


def test_a_gap_is_filled_by_replay(client: Client, router: Subscriber) -> None:
    first = store_prompt(client, SPACE, prompt(6, 16))
    router.until(has(first, "CPU"))
    router.last -= 3  # as if three batches had been lost
    router.index = Index()
    keys = store_prompt(client, SPACE, prompt(7, 16))
    router.until(has([*first, *keys], "CPU"))
    assert router.gaps == 1
    # From long before this life: everything is told, after a clear.
    index = Index()
    for _, payload in router.replay(1):
        index.apply(payload)
    assert index.clears == 1
    assert index.where.keys() == router.index.where.keys()


def test_strangers_at_the_replay_socket_get_nothing_and_stop_nobody(
    client: Client, router: Subscriber, daemon: Daemon
) -> None:
    keys = store_prompt(client, SPACE, prompt(8, 16))
    router.until(has(keys, "CPU"))
    end = [b"", b"", b"\xff" * 8, b""]
    for frames in (
        [b"123"],
        [b"\xff" * 8],
        [],
        [b"a", b"b", b"c", bytes(8)],
        [(router.last + 1000).to_bytes(8, "big")],
        [b"no such topic", bytes(8)],
    ):
        with contextlib.closing(router.ask(*frames)) as request:
            assert request.poll(10_000), frames
            assert request.recv_multipart() == end, frames
    before = _resident_kib(daemon.pid)
    with contextlib.closing(router.ask(bytes(1 << 30), copy=False)) as request:
        assert not request.poll(500)  # the link is cut before it is read
    assert _resident_kib(daemon.pid) < before + (64 << 10)
    publish = client.admin.stats()["events"]["publish"]
    with zmq.Context() as context, contextlib.closing(context.socket(zmq.SUB)) as noisy:
        noisy.setsockopt(zmq.LINGER, 0)
        noisy.connect(publish)
        for size in (0, 1, 100, 900):
            noisy.setsockopt(zmq.SUBSCRIBE, bytes(size))
        more = store_prompt(client, SPACE, prompt(9, 16))
        router.until(has(more, "CPU"))
    text = client.admin.stats()["events"]
    assert text["blocks"] >= 2


def _resident_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def test_a_restart_goes_on_counting_and_takes_back_what_is_gone() -> None:
    tokens = prompt(10, 20 * 16)
    with Daemon(*ADDRESSES, *SMALL) as daemon:
        with Client(daemon.start().target) as client:
            client.register(SPACE)
            where = client.admin.stats()["events"]
            router = Subscriber(where["publish"], where["replay"])
            until(lambda: client.admin.stats()["events"]["subscribers"] == 1)
            keys = store_prompt(client, SPACE, tokens, durable=True)
            router.until(has(keys, "CPU", "STORAGE"))
        before = router.last
        daemon.kill()
        daemon.add(f"events.publish={where['publish']}", f"events.replay={where['replay']}")
        daemon.start()
        router.until(lambda index: not index.where)  # nobody has asked: nobody can name tokens
        assert router.last > before
        with Client(daemon.target) as client:
            client.register(SPACE)
            grant = client.acquire(SPACE.id, keys, tokens=BlockTokens.of(tokens), wait_s=5.0)
            assert grant.hit_blocks == 20
            client.release(grant.lease_id)
            router.until(has(keys, "STORAGE"))
        with router:
            pass


def test_topics_of_engines_take_back_by_name() -> None:
    tokens = prompt(11, 12 * 16)
    engine = "10.0.0.9:8000"
    with Daemon(*ADDRESSES, *SMALL, "events.topics=engines") as own:
        with Client(own.start().target, engines=[engine]) as client:
            client.register(SPACE)
            where = client.admin.stats()["events"]
            store_prompt(client, SPACE, prompt(14, 16))
            until(lambda: client.admin.stats()["events"]["topics"] == [f"kv@{engine}@m"])
            assert client.admin.stats()["events"]["subscribers"] == 0
            with Subscriber(where["publish"], topic=f"kv@{engine}@") as router:
                keys = store_prompt(client, SPACE, tokens, durable=True)
                router.until(has(keys, "CPU", "STORAGE"))
                assert client.admin.stats()["events"]["subscribers"] == 1
                assert router.topics == {f"kv@{engine}@m".encode()}
                assert router.index.clears == 0
        own.kill()
        own.start()
        with Client(own.target, engines=[engine]) as client:
            client.register(SPACE)
            where = client.admin.stats()["events"]
            with Subscriber(where["publish"], topic=f"kv@{engine}@m") as router:
                router.index.where = {n: {"CPU", "STORAGE"} for n in numbers_of(keys)} | {
                    5: {"GPU"}
                }
                other = store_prompt(client, SPACE, prompt(12, 16))
                router.until(has(other, "CPU"))
                router.until(lambda index: not numbers_of(keys) & index.where.keys())
                assert 5 in router.index.where
                assert router.index.clears == 0
            odd = Namespace(16, (Group("g", 4096),), (("model", "x"),), name="a@b")
            client.register(odd)
            store_prompt(client, odd, prompt(13, 16))
            until(lambda: 'kvstore_event_drops_total{reason="name"}' in _metrics(own))
            assert client.admin.stats()["events"]["topics"] == [f"kv@{engine}@m"]


def _metrics(daemon: Daemon) -> str:
    url = f"http://127.0.0.1:{daemon.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_a_subscriber_that_never_reads_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "UNREAD_BATCHES_MAX", 2)
    monkeypatch.setattr(publisher_module, "BATCH_S", 0.01)
    metrics = Metrics(version="test")
    publisher = Publisher(
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:0",
        own=1000,
        first=1,
        batches_max=100,
        used=lambda number: None,
        ask=lambda namespace_id, keys: None,
        metrics=metrics,
    )
    publisher.start()
    unread = metrics.event_drops.labels("unread")._value
    with zmq.Context() as context, contextlib.closing(context.socket(zmq.SUB)) as deaf:
        for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.LINGER, 0)):
            deaf.setsockopt(option, value)
        deaf.setsockopt(zmq.SUBSCRIBE, b"")
        deaf.connect(publisher.publish)
        with Subscriber(publisher.publish, publisher.replay) as router:
            until(lambda: publisher.streams[b""].joined == 2)
            number = 0
            deadline = time.monotonic() + 60
            while not unread.get():
                assert time.monotonic() < deadline
                number += 1
                key = sha256(b"%d" % number).digest()
                told = Told(key, bytes(4 << 16), 0)
                assert publisher.post(Tokens(SPACE.id, "m", 1 << 16, [told], "", False))
                assert publisher.post(Seen(SPACE.id, "m", 1 << 16, key, b"\1", False), wake=True)
                router.until(has([BlockKey(key)], "CPU"))
            # Nobody waited for it, and who reads missed nothing.
            assert router.gaps == 0
            assert router.index.lost == 0
    publisher.close()


def test_numbers_never_go_back(tmp_path: Path) -> None:
    directory = tmp_path
    first = Numbers(directory, lambda: 1000)
    assert first.first == 1000 << 20
    first.use(first.first + 5)
    second = Numbers(directory, lambda: 10)  # the clock went back
    assert second.first > first.first + AHEAD - 1
    second.use(second.first + 3 * AHEAD)
    assert Numbers(directory, lambda: 10).first > second.first + 3 * AHEAD
    for lie in (b"{", b'{"last": "x"}', b'{"last": 99999999999999999999}', b"x" * 10_000):
        (directory / "events.json").write_bytes(lie)
        assert Numbers(directory, lambda: 7).first == 7 << 20


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("events.publish=tcp://0.0.0.0:5567", "events.open=true"),
        ("events.publish=tcp://*:5567", "events.open=true"),
        ("events.publish=http://127.0.0.1:1", "write tcp://"),
        ("events.publish=tcp://127.0.0.1", "write tcp://"),
        ("events.publish=tcp://127.0.0.1:99999", "write tcp://"),
        ("events.publish=ipc:///tmp/x", "write tcp://"),
        ("events.replay=tcp://127.0.0.1:5567", "set both"),
        ("events.model=a@b", "has no @"),
        ("events.topics=mine", "own, engines"),
        ("events.dp_rank=-1", "0"),
    ],
)
def test_settings_that_cannot_be(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(overrides=[setting])


def test_an_address_that_is_taken_stops_a_start() -> None:
    with zmq.Context() as context, contextlib.closing(context.socket(zmq.PUB)) as taken:
        taken.bind("tcp://127.0.0.1:0")
        address = taken.getsockopt_string(zmq.LAST_ENDPOINT)
        with (
            Daemon(f"events.publish={address}", *SMALL, file=False) as daemon,
            pytest.raises(RuntimeError, match=r"events\.publish=.*choose another port"),
        ):
            daemon.start()
