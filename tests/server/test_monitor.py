"""Who watches sees every answer it asked for, or how many it missed; and what took long."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from kvstore import AsyncClient, Client, Prefix
from kvstore.metrics import Metrics
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.model.outcome import Ending, Outcome, Reason
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.server.monitor import MONITORS_MAX, QUEUE_MAX, Filter, Monitor, Monitors, ranges
from kvstore.store.answers import Answer, Answers
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.cli.run import kvstore

SPACE = sample_namespace("monitored")
KEYS = sample_keys("monitored", 8)
WHOLE_S = 20.0


def outcome(**fields: object) -> Outcome:
    told: dict[str, object] = {
        "request_id": "r-1",
        "client": "engine",
        "namespace_id": SPACE.id,
        "asked_blocks": 10,
        "skip_blocks": 2,
        "hit_blocks": 8,
        "file_blocks": 2,
        "object_blocks": 1,
        "took_s": 0.1,
        "ending": Ending(Reason.NEVER_STORED, 8),
    }
    return Outcome(**{**told, **fields})  # type: ignore[arg-type]


def test_ranges_cover_the_prefix_in_its_order() -> None:
    assert ranges(outcome()) == [
        (0, 2, "engine"),
        (2, 5, "dram"),
        (5, 7, "file"),
        (7, 8, "object"),
        (8, 10, ""),
    ]
    assert ranges(outcome(hit_blocks=0, file_blocks=0, object_blocks=0)) == [
        (0, 2, "engine"),
        (2, 10, ""),
    ]


@pytest.mark.parametrize(
    ("wanted", "takes"),
    [
        (Filter(), True),
        (Filter(SPACE.id, "r-", "file", misses_only=True, kind="acquire"), True),
        (Filter(sample_namespace("other").id), False),
        (Filter(request_id="s"), False),
        (Filter(tier="peer"), False),
        (Filter(kind="save"), False),
    ],
)
def test_filters(wanted: Filter, takes: bool) -> None:
    assert wanted.takes(Answer(outcome(), 16)) is takes


def test_only_misses_are_taken_where_they_are_asked_for() -> None:
    assert not Filter(misses_only=True).takes(Answer(outcome(ending=None), 16))
    for bad in (Filter(tier="tape"), Filter(kind="delete"), Filter(request_id="r" * 257)):
        with pytest.raises(InvalidRequest):
            bad.checked()


def test_a_queue_that_nobody_takes_from_is_bounded_and_what_is_lost_is_counted() -> None:
    metrics, answers = Metrics(), Answers()
    monitors = Monitors(metrics, answers)

    async def run() -> None:
        with monitors.watch(Filter()) as monitor:
            for _ in range(QUEUE_MAX + 7):
                answers.acquired(outcome(), 16)
            assert monitor.dropped == 7
            monitors.close()
            assert len(await all_of(monitor)) == QUEUE_MAX

    asyncio.run(run())
    assert metrics.totals()["monitored_requests"] == {"sent": QUEUE_MAX, "dropped": 7}
    assert not answers.listeners


async def all_of(monitor: Monitor) -> list[object]:
    return [each async for batch in monitor.batches() for each in batch]


def test_monitors_are_few() -> None:
    monitors = Monitors(Metrics(), Answers())

    async def run() -> None:
        some = [monitors.watch(Filter()) for _ in range(MONITORS_MAX + 1)]
        for each in some[:MONITORS_MAX]:
            each.__enter__()
        with pytest.raises(Unavailable):
            some[MONITORS_MAX].__enter__()

    asyncio.run(run())


# ---- a daemon ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture(scope="module")
def engine(own: Daemon) -> Iterator[Client]:
    with Client(own.target, name="engine <one>") as client:
        namespace_id = client.register(SPACE)
        client.put(namespace_id, KEYS[:6], sample_records(KEYS[:6]), durable=True)
        yield client


def ask(client: Client, name: str, blocks: int = 8) -> None:
    grant = client.acquire(SPACE.id, KEYS[:blocks], request_id=name, session_id="a chat")
    client.release(grant.lease_id)


async def watched(
    target: str, count: int, work: Callable[[], None], **wanted: Any
) -> list[pb.Answered]:
    """Return the first answers after `work`, which begins when the monitor is there."""
    client = AsyncClient(target, arena=False, name="watcher")
    found: list[pb.Answered] = []
    try:
        replies = client.admin.monitor(**wanted)
        assert not (await anext(replies)).answered
        await asyncio.to_thread(work)
        async with asyncio.timeout(WHOLE_S):
            while len(found) < count:
                found += (await anext(replies)).answered
    finally:
        await client.close()
    return found


def test_answers_are_told_as_they_come(own: Daemon, engine: Client) -> None:
    def work() -> None:
        ask(engine, "first")
        engine.put(SPACE.id, KEYS[6:7], sample_records(KEYS[6:7]), first_block=6, parent=KEYS[5])
        ask(engine, "second", blocks=6)

    first, save, second = asyncio.run(watched(own.target, 3, work))
    assert first.kind == second.kind == "acquire"
    assert (first.outcome.request_id, first.outcome.session_id) == ("first", "a chat")
    assert first.outcome.client == "engine <one>"
    assert [(r.begin, r.end, r.tier) for r in first.ranges] == [(0, 6, "dram"), (6, 8, "")]
    assert first.outcome.ending.reason == "never_stored"
    assert first.block_tokens == 16
    assert abs(first.at - time.time()) < WHOLE_S
    assert (save.kind, save.stored_records, save.first_block) == ("save", 1, 6)
    assert save.outcome.last_key == KEYS[6]
    assert save.nbytes > 0
    assert not second.outcome.HasField("ending")


def test_only_what_was_asked_for_is_told(own: Daemon, engine: Client) -> None:
    def work() -> None:
        ask(engine, "whole", blocks=6)
        ask(engine, "other")
        ask(engine, "whole-not")

    (one,) = asyncio.run(
        watched(own.target, 1, work, request_id="whole", misses_only=True, namespace_id=SPACE.id)
    )
    assert one.outcome.request_id == "whole-not"


def test_a_reader_that_stands_still_loses_answers_and_is_told_how_many(
    own: Daemon, engine: Client
) -> None:
    total = QUEUE_MAX + 1500

    async def run() -> None:
        fixed = [("grpc.http2.bdp_probe", 0)]  # gRPC takes 64 KiB for who does not read, not more
        async with grpc.aio.insecure_channel(own.target, options=fixed) as channel:
            call = rpc.KVStoreStub(channel).Monitor(pb.MonitorRequest())  # type: ignore[no-untyped-call]
            await call.read()
            began = time.monotonic()
            await flood(own.target, total)  # nothing is read meanwhile
            assert time.monotonic() - began < WHOLE_S
            told = dropped = 0
            async with asyncio.timeout(WHOLE_S):
                while told + dropped < total:
                    reply = await call.read()
                    told, dropped = told + len(reply.answered), reply.dropped
            call.cancel()
        assert told + dropped == total
        assert told >= QUEUE_MAX
        assert dropped

    asyncio.run(run())


async def flood(target: str, count: int) -> None:
    name = secrets.token_hex(120)  # long ones, so that what is sent fills what gRPC keeps
    client = AsyncClient(target, name=name)
    try:
        await client.register(SPACE)
        for first in range(0, count, 50):
            names = [f"{name}-{number}" for number in range(first, min(first + 50, count))]
            grants = await asyncio.gather(
                *(
                    client.acquire(SPACE.id, KEYS[:1], request_id=each, session_id=name)
                    for each in names
                )
            )
            await asyncio.gather(*(client.release(grant.lease_id) for grant in grants))
    finally:
        await client.close()


def test_the_command_prints_lines_and_ends_when_it_is_told(own: Daemon, engine: Client) -> None:
    command = own.command("monitor", "--json", "--target", own.target)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    printed = b""

    def has_come() -> bool:
        nonlocal printed
        ask(engine, "printed")
        printed += process.stdout.read() or b""  # type: ignore[union-attr]
        return b"\n" in printed

    until(has_come, timeout_s=WHOLE_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(WHOLE_S) == 0
    process.stdout.close()
    told = json.loads(printed.splitlines()[0])
    assert told["request_id"] == "printed"
    assert told["ranges"][0][2] == "dram"
    assert told["ended_by"] == "never_stored"


# ---- slow -------------------------------------------------------------------------------------


def test_what_took_long_is_told_with_what_it_waited_for(own: Daemon, engine: Client) -> None:
    engine.admin.slow(reset=True)
    keys = sample_keys("slow", 6)
    engine.put(SPACE.id, keys, sample_records(keys), durable=True)
    engine.hints.demote(Prefix(SPACE.id, keys))
    grant = engine.acquire(SPACE.id, keys, wait_s=5.0, request_id="slow one")
    engine.release(grant.lease_id)
    found = engine.admin.slow()
    times = [item.took_s for item in found.items]
    assert times == sorted(times, reverse=True)
    acquire = next(item for item in found.items if item.request_id == "slow one")
    assert acquire.result == "complete"
    assert 0 < acquire.waits["file"] <= acquire.took_s
    load = next(item for item in found.items if item.kind == "load")
    assert load.waits["disk"] > 0
    assert (load.blocks, load.result) == (6, "loaded")
    save = next(item for item in found.items if item.result == "durable")
    assert 0 < save.waits["disk"] <= save.took_s
    assert "written behind" in {item.result for item in found.items}
    assert not engine.admin.slow(over_s=60.0).items
    with pytest.raises(InvalidRequest):
        engine.admin.slow("fast")


def test_people_see_it(own: Daemon, engine: Client) -> None:
    ask(engine, "seen")
    shown = kvstore("slow", "--kind", "acquire", "--target", own.target)
    assert "waited for" in shown.output
    assert "from engine <one>" in shown.output
    told = kvstore("slow", "--json", "--limit", "1", "--reset", "--target", own.target)
    assert set(json.loads(told.output)) >= {"took_s", "waits", "request_id", "result"}
    assert not engine.admin.slow("load").items
    late = kvstore("slow", "--over", "100", "--target", own.target)
    assert late.output.startswith("nothing in the last")
