"""Who listens never costs who asks more than a full queue."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.metrics import Metrics
from kvstore.model.block import Group, Namespace
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.server.recorder import LISTENERS_MAX, QUEUE_REQUESTS_MAX, Lookup, Recorder
from kvstore.testing.samples import sample_keys, sample_namespace

SPEC = sample_namespace()
ID = SPEC.id
KEYS = b"".join(sample_keys("a", 4))


def note(recorder: Recorder, keys: bytes = KEYS) -> None:
    recorder.note(
        engine=1, namespace_id=ID, namespace=SPEC, keys=keys, hit_blocks=2, request_id="r"
    )


async def all_of(recording: object) -> list[Lookup]:
    return [lookup async for batch in recording.batches() for lookup in batch]  # type: ignore[attr-defined]


def test_a_queue_that_nobody_takes_from_is_bounded_and_what_is_lost_is_counted() -> None:
    metrics = Metrics()
    recorder = Recorder(metrics)

    async def run() -> None:
        with recorder.listen(share=1.0, block=0, namespace_id=None) as recording:
            for _ in range(QUEUE_REQUESTS_MAX + 7):
                note(recorder)
            assert recording.dropped == 7
            recorder.close()
            assert len(await all_of(recording)) == QUEUE_REQUESTS_MAX
            note(recorder, bytes(33 << 20))
            assert recording.dropped == 8

    asyncio.run(run())
    assert metrics.totals()["recorded_requests"] == {"sent": QUEUE_REQUESTS_MAX, "dropped": 8}


def test_only_what_was_asked_for_is_taken() -> None:
    recorder = Recorder(Metrics())

    async def run() -> None:
        other = sample_namespace("other").id
        with (
            recorder.listen(share=1.0, block=3, namespace_id=ID) as fourth,
            recorder.listen(share=1.0, block=4, namespace_id=ID) as fifth,
            recorder.listen(share=1.0, block=0, namespace_id=other) as none,
        ):
            note(recorder)
            recorder.close()
            assert [len(await all_of(each)) for each in (fourth, fifth, none)] == [1, 0, 0]

    asyncio.run(run())
    assert not recorder.listening


def test_a_block_is_as_large_as_engines_have_it() -> None:
    """The base and the fine part of a lossy block are of the same values."""
    groups = (
        Group("all", 1000, shards=2, varies=True),
        Group("all.fine", 700, shards=2, refines=0, base_nbytes=300),
        Group("window", 50, window_tokens=32),
    )
    lossy = Namespace(16, groups, (), fidelity="ep")
    lookup = Lookup(0.0, 1, lossy.id, lossy, KEYS, 0, "r", "")
    assert lookup.block_nbytes == 2050


def test_listeners_are_few_and_say_what_makes_sense() -> None:
    recorder = Recorder(Metrics())

    async def run() -> None:
        for share in (0.0, -1.0, 1.5, float("nan")):
            with (
                pytest.raises(InvalidRequest),
                recorder.listen(share=share, block=0, namespace_id=None),
            ):
                pass
        some = [recorder.listen(share=1.0, block=0, namespace_id=None) for _ in range(5)]
        for each in some[:LISTENERS_MAX]:
            each.__enter__()
        with pytest.raises(Unavailable):
            some[LISTENERS_MAX].__enter__()

    asyncio.run(run())
