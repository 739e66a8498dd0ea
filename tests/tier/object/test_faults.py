"""A store that is slow, down, or answers wrongly: bounded, counted, never wrong."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvstore.model.errors import Unavailable
from kvstore.testing.seaweed import Seaweed
from kvstore.tier.object import ObjectFailed, ObjectRefused, Outcome
from kvstore.tier.object.names import TOMBSTONES
from kvstore.tier.object.requests import ATTEMPTS_MAX, FAILURES_MAX
from tests.tier.object.opened import Side, opened, run
from tests.tier.object.proxy import Fault, Proxy
from tests.tier.object.runs import frames, prefix_of, reads_of

KEYS = prefix_of("faults", 16)
ONCE = [
    Fault.ERROR_500,
    Fault.SLOW_DOWN,
    Fault.DROP,
    Fault.CUT,
    Fault.SHORT,
    Fault.OVERSIZE,
    Fault.STALL,
    Fault.STALL_IN_BODY,
]
REASONS = {
    Fault.ERROR_500: {"server"},
    Fault.SLOW_DOWN: {"throttled"},
    Fault.DROP: {"connection"},
    Fault.CUT: {"connection", "short"},
    Fault.SHORT: {"short", "connection"},
    Fault.OVERSIZE: {"short", "connection"},
    Fault.STALL: {"timeout"},
    Fault.STALL_IN_BODY: {"timeout"},
}

pytestmark = pytest.mark.usefixtures("credentials")


@asynccontextmanager
async def behind_a_proxy(seaweed: Seaweed, **settings: Any) -> AsyncIterator[tuple[Proxy, Side]]:
    async with Proxy(seaweed.endpoint).running() as proxy:
        where = seaweed.settings(os.urandom(8).hex())
        each = {**where, "endpoint": proxy.endpoint, "timeout_s": 2.0, "grace_s": 60.0, **settings}
        async with opened(each) as side:
            yield proxy, side
            proxy.fault = lambda _: None


@pytest.mark.parametrize("fault", ONCE, ids=lambda fault: fault.name)
def test_a_read_that_is_answered_badly_once_is_tried_again(seaweed: Seaweed, fault: Fault) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            await side.write(frames(KEYS))
            found = await side.find(KEYS)
            before = Counter(side.counted("object_errors"))
            proxy.times(1, fault)
            assert await side.read_all(found) == 32
            errors = Counter(side.counted("object_errors")) - before
            assert errors.total() == side.counted("object_retries")["get"] == 1
            assert {name.removeprefix("get/") for name in errors} <= REASONS[fault]

    run(test)


@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.SLOW_DOWN, Fault.DROP, Fault.STALL])
def test_a_write_that_is_answered_badly_once_is_tried_again(seaweed: Seaweed, fault: Fault) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            proxy.times(1, fault, "PUT")
            await side.write(frames(KEYS))
            assert side.counted("object_retries")["put"] >= 1
        async with opened({**seaweed.settings(), "url": side.settings.url}) as other:
            assert await other.read_all(await other.find(KEYS)) == 32

    run(test)


def test_attempts_are_bounded_and_a_read_that_fails_says_so(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            await side.write(frames(KEYS))
            reads, _ = reads_of(await side.find(KEYS))
            proxy.times(1000, Fault.ERROR_500)
            before = proxy.seen["GET"]
            outcomes = await side.tier.reads.read(reads[:1], side.deadline())
            assert outcomes == [Outcome.FAILED]
            assert proxy.seen["GET"] - before == ATTEMPTS_MAX

    run(test)


def test_a_lookup_of_a_failing_store_ends_and_says_that_it_does_not_know(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            await side.write(frames(KEYS))
            proxy.times(1000, Fault.STALL)
            absent = prefix_of("never", 16)
            found = await side.tier.lookups.find(
                frames(KEYS)[0][0].namespace_id, absent, run_blocks=16, deadline=side.deadline(0.2)
            )
            assert (found.blocks, found.complete) == (0, False)
            assert (await side.find(KEYS)).blocks == 16  # what is known needs no request

    run(test)


def test_the_breaker_refuses_at_once_and_the_upkeep_finds_the_store_again(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed, timeout_s=5.0) as (proxy, side):
            proxy.times(1000, Fault.ERROR_500)
            for number in range(3):
                await side.find(prefix_of(f"down {number}", 16))
            assert sum(side.counted("object_errors").values()) == FAILURES_MAX
            assert side.tier.stats()["state"] == "failing"
            before = proxy.seen.copy()
            assert not (await side.find(prefix_of("refused", 16))).complete
            with pytest.raises(ObjectFailed, match="does not answer"):
                await side.write(frames(KEYS))
            assert proxy.seen == before
            assert side.counted("object_refused_writes") == {"breaker": 1}
            proxy.fault = lambda _: None
            await side.tier.collect()
            assert side.tier.stats()["state"] == "ok"
            await side.write(frames(KEYS))

    run(test)


def test_a_404_of_a_known_object_is_a_miss(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            await side.write(frames(KEYS))
            reads, _ = reads_of(await side.find(KEYS))
            proxy.times(100, Fault.NOT_FOUND)
            assert set(await side.tier.reads.read(reads, side.deadline())) == {Outcome.GONE}
            assert side.counted("object_errors") == side.counted("object_retries") == {}

    run(test)


def test_a_404_of_a_listed_tombstone_does_not_bring_back_what_it_killed(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            await side.write(frames(KEYS))
            await side.delete(KEYS)
            await side.write(frames(KEYS))  # as if the object had stayed
            proxy.fault = lambda request: Fault.NOT_FOUND if TOMBSTONES in request.path else None
            async with opened(asdict(side.settings), ready=False) as other:
                with pytest.raises(ObjectFailed):
                    await other.tier.ready(other.deadline(1.0))
                assert (await other.find(KEYS)).blocks == 0
                proxy.fault = lambda _: None
                await other.tier.collect()
                assert (await other.find(KEYS)).blocks == 0

    run(test)


def test_what_is_not_allowed_is_not_tried_again(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            proxy.times(1000, Fault.FORBIDDEN, "PUT")
            before = proxy.seen["PUT"]
            with pytest.raises(ObjectRefused):
                await side.write(frames(KEYS))
            assert proxy.seen["PUT"] == before + 1

    run(test)


def signed(request: web.BaseRequest) -> bool:
    """Say whether it came past the library, which has its signature in a header."""
    return "X-Amz-Signature" in request.query


def test_what_only_the_library_is_let_in_for_it_reads(
    seaweed: Seaweed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            await side.write(frames(KEYS))
            found = await side.find(KEYS)
            seen: list[bool] = []

            def forbid(request: web.BaseRequest) -> Fault | None:
                seen.append(signed(request))
                return Fault.FORBIDDEN if signed(request) else None

            assert await side.read_all(found) == 32
            proxy.fault = forbid
            for _ in range(3):
                assert await side.read_all(found) == 32
            assert seen == [True, False, False, False], "it is not asked in vain every time"
            assert side.counted("object_errors") == {}

    run(test)
    (told,) = (r.getMessage() for r in caplog.records if "read_by_library" in r.getMessage())
    assert told.endswith("reason='HTTP 403'")


@pytest.mark.parametrize(
    ("environment", "settings"),
    [({"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}, {}), ({}, {"folder": True})],
)
def test_what_the_library_has_to_reach_it_reads(
    seaweed: Seaweed,
    environment: dict[str, str],
    settings: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            seen: list[bool] = []
            proxy.fault = lambda request: seen.append(signed(request))
            where = {"url": f"file://{tmp_path}"} if settings else asdict(side.settings)
            async with opened(where) as other:
                await other.write(frames(KEYS))
                assert await other.read_all(await other.find(KEYS)) == 32
            assert not any(seen)
            assert seen or settings, "reads of the server went by here"

    run(test)


def test_readers_are_told_of_a_retry_too_and_before_the_read_returns(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            await side.write(frames(KEYS))
            reads, targets = reads_of(await side.find(KEYS))
            seen: list[list[bytes]] = [[] for _ in reads]

            def see(index: int) -> None:
                seen[index].append(bytes(targets[index][2]))

            told = [replace(read, then=partial(see, i)) for i, read in enumerate(reads)]
            proxy.times(1, Fault.CUT)
            assert set(await side.tier.reads.read(told, side.deadline())) == {Outcome.READ}
            assert [each[-1] for each in seen] == [bytes(target) for _, _, target in targets]
            assert {len(each) for each in seen} == {1, 2}

    run(test)


def test_a_cancelled_read_leaves_its_targets_alone(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            await side.write(frames(KEYS))
            reads, targets = reads_of(await side.find(KEYS))
            arrived = asyncio.Event()

            def stall(request: web.BaseRequest) -> Fault | None:
                arrived.set()
                return Fault.STALL_IN_BODY

            proxy.fault = stall
            reading = asyncio.create_task(side.tier.reads.read(reads, side.deadline()))
            await arrived.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            before = [bytes(target) for _, _, target in targets]
            proxy.fault = lambda _: None
            await side.tier.collect()
            assert [bytes(target) for _, _, target in targets] == before

    run(test)


def test_bytes_under_way_are_bounded_and_who_waits_too_long_is_refused(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed, in_flight_bytes_max=1 << 20) as (proxy, side):
            proxy.times(1000, Fault.STALL, "PUT")
            stored = [frames(prefix_of(f"busy {i}", 16)) for i in range(6)]
            patience_s = [1.0, *[0.3] * 5]
            writes = [
                side.tier.writes.write(each, side.deadline(seconds))
                for each, seconds in zip(stored, patience_s, strict=True)
            ]
            results = await asyncio.gather(*writes, return_exceptions=True)
            assert all(isinstance(result, Unavailable) for result in results)
            assert side.counted("object_refused_writes") == {"timeout": 1, "busy": 5}
            assert side.tier.stats()["in_flight_bytes"] == 0

    run(test)


def test_a_delete_that_cannot_be_made_durable_is_not_answered(seaweed: Seaweed) -> None:
    async def test() -> None:
        async with behind_a_proxy(seaweed) as (proxy, side):
            await side.write(frames(KEYS))
            proxy.times(1000, Fault.ERROR_500, "PUT")
            with pytest.raises(ObjectFailed):
                await side.delete(KEYS)

    run(test)
