from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.system.scheduling import SLICE_NS, run_promptly

LINUX = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


def in_a_thread(work: Callable[[], None]) -> None:
    """Run `work` where what it asks of the kernel ends with the thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def slice_ns() -> int | None:
    """Return the slice of the calling thread, if the kernel tells."""
    file = Path("/proc/thread-self/sched")
    told = re.search(r"se\.slice\s*:\s*(\d+)", file.read_text() if file.exists() else "")
    return int(told[1]) if told else None


@pytest.mark.skipif(LINUX < (6, 12), reason="this kernel gives every thread the same slice")
def test_a_thread_gets_short_slices_and_keeps_its_priority() -> None:
    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        assert run_promptly()
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 3
        assert slice_ns() in (None, SLICE_NS)
        in_a_thread(its_threads_get_longer_ones)

    def its_threads_get_longer_ones() -> None:
        told = slice_ns()
        assert told is None or told > SLICE_NS

    in_a_thread(work)


def test_a_thread_that_was_given_another_policy_keeps_it() -> None:
    def work() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        assert not run_promptly()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    in_a_thread(work)
