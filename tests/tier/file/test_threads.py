"""Small jobs share threads, and share nothing else."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.model.errors import Unavailable
from kvstore.tier.file.threads import Jobs, SmallJobs, run_all_blocking, run_blocking


@pytest.mark.parametrize(("nbytes", "batches"), [(10, 1), (50, 3), (60, 6), (500, 6)])
def test_small_jobs_of_one_turn_share_a_thread_up_to_a_bound(nbytes: int, batches: int) -> None:
    submitted = []

    class Counting(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            submitted.append(args)
            return super().submit(*args, **kwargs)

    async def scenario() -> list[int]:
        with Counting(6) as executor:
            jobs = SmallJobs(executor, 100)
            return await asyncio.gather(*(jobs.run(nbytes, lambda n=n: n) for n in range(6)))

    assert asyncio.run(scenario()) == list(range(6))
    assert len(submitted) == batches


def test_a_job_that_fails_does_not_touch_the_others() -> None:
    def fail() -> int:
        raise ValueError("this one")

    async def scenario() -> list[int | BaseException]:
        with ThreadPoolExecutor(1) as executor:
            jobs = SmallJobs(executor, 100)
            return await asyncio.gather(
                jobs.run(1, lambda: 1),
                jobs.run(1, fail),
                jobs.run(1, lambda: 3),
                return_exceptions=True,
            )

    first, second, third = asyncio.run(scenario())
    assert (first, third) == (1, 3)
    assert isinstance(second, ValueError)


def test_a_cancelled_job_ends_when_its_thread_has_let_go() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done = []

    def slow() -> None:
        begun.set()
        assert go_on.wait(10)
        done.append("slow")

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as executor:
            jobs = SmallJobs(executor, 100)
            running = asyncio.ensure_future(jobs.run(1, slow))
            behind = asyncio.ensure_future(jobs.run(1, lambda: done.append("behind")))
            await asyncio.to_thread(begun.wait, 10)
            running.cancel()
            behind.cancel()
            await asyncio.wait([running], timeout=0.05)
            assert not running.done()
            go_on.set()
            for job in (running, behind):
                with pytest.raises(asyncio.CancelledError):
                    await job
            assert done == ["slow"]

    asyncio.run(scenario())


def test_a_closed_pool_refuses_small_jobs() -> None:
    async def scenario() -> None:
        executor = ThreadPoolExecutor(1)
        executor.shutdown()
        with pytest.raises(Unavailable):
            await SmallJobs(executor, 100).run(1, lambda: None)

    asyncio.run(scenario())


def test_what_waits_in_a_pool_that_is_closed_is_refused() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go_on.wait(10)
        return "slow"

    async def scenario() -> None:
        executor = ThreadPoolExecutor(1)
        running = asyncio.ensure_future(run_blocking(executor, slow))
        waiting = asyncio.ensure_future(run_all_blocking(executor, [slow, slow]))
        assert await asyncio.to_thread(begun.wait, 10)
        executor.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(Unavailable, match="closed"):
            await waiting
        go_on.set()
        assert await running == "slow"

    asyncio.run(scenario())


def test_jobs_that_have_ended_are_freed_without_the_garbage_collector() -> None:
    """What it has seen alive once, it never looks at again in a daemon."""

    async def scenario() -> list[object]:
        with ThreadPoolExecutor(2) as executor:
            jobs = Jobs(executor, [lambda: 1, lambda: 2])
            seen = [weakref.ref(jobs), *(weakref.ref(each) for each in jobs._jobs)]
            assert await jobs.ended() == [1, 2]
            del jobs
        return [each() for each in seen]

    gc.disable()
    try:
        assert asyncio.run(scenario()) == [None, None, None]
    finally:
        gc.enable()
