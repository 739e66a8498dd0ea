"""Processes that flood a daemon as tenants: puts, reads, leases, as fast as they can. And processes
that do as much to the processor and its memory, without a daemon.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from typing import Any

from kvstore import Client
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore_bench.store.store import bench_namespace, chain

START_S = 60.0
PREFIX_BLOCKS = 16
BEHIND = 2  # prefixes


@contextmanager
def flooding(targets: Sequence[str], record_nbytes: int) -> Iterator[None]:
    """Run one flooding process for each target inside of the context. Raises Unavailable if they
    stored or read nothing meanwhile: then nobody was beside a flood."""
    done: SynchronizedArray[int] = multiprocessing.get_context("spawn").Array("Q", 2)
    with running(_flood, [(target, record_nbytes, done) for target in targets]), rising(done):
        yield


@contextmanager
def rising(done: SynchronizedArray[int]) -> Iterator[None]:
    """Raise Unavailable if no record is stored, or none read, inside of the context."""
    before = done[:]
    yield
    stored, read = (now - was for now, was in zip(done[:], before, strict=True))
    if not stored or not read:
        raise Unavailable(
            f"the noisy tenants stored {stored} and read {read} records, so there was no flood:"
            " give them more DRAM (--dram-mib) or time (--seconds)"
        )


@contextmanager
def copying(processes: int, record_nbytes: int) -> Iterator[None]:
    """Run processes that copy records within their own memory inside of the context."""
    with running(_copy, [(record_nbytes,)] * processes):
        yield


@contextmanager
def running(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """Run a process for each arguments. Each tells when it is at work, and ends when told."""
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    started = [spawn.Event() for _ in arguments]
    processes = [
        spawn.Process(target=work, args=(*each, event, stop), daemon=True)
        for each, event in zip(arguments, started, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        for process, event in zip(processes, started, strict=True):
            _await(event, process)
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(START_S)
            if process.is_alive():
                process.kill()


def _await(event: Event, process: BaseProcess) -> None:
    """Wait until a process is at work. Raises Unavailable."""
    end = time.monotonic() + START_S
    while not event.wait(0.1):
        if not process.is_alive() or time.monotonic() > end:
            raise Unavailable("a process beside the quiet tenant did not start")


def _flood(
    target: str, record_nbytes: int, done: SynchronizedArray[int], started: Event, stop: Event
) -> None:
    """Put, read and lease. done: records stored and read, by all processes together."""
    with Client(target, name="noisy") as client:
        namespace_id = client.register(bench_namespace("noise", record_nbytes))
        record = bytes(record_nbytes)
        number, leases = 0, deque[int]()
        while not stop.is_set():
            keys = chain(namespace_id, PREFIX_BLOCKS, salt=number.to_bytes(8))
            # In turns what DRAM should still have, and what lies in files, if anywhere.
            before = max(0, number - BEHIND) if number % 3 else number // 2
            old = chain(namespace_id, PREFIX_BLOCKS, salt=before.to_bytes(8))
            try:
                put = client.put(namespace_id, keys, [record] * PREFIX_BLOCKS)
                _count(done, 0, put.committed)
                found = client.get(namespace_id, old, wait_s=0.05)
                _count(done, 1, sum(each is not None for each in found))
                grant = client.acquire(namespace_id, keys)
                if grant.leased:
                    leases.append(grant.lease_id)  # left to expire, or to the end of the session
                elif leases:  # it leases all it may, and nothing would be left for its own reads
                    client.release(leases.popleft())
            except KVStoreError:
                pass  # it is over some bound: that is what it is for
            if number == PREFIX_BLOCKS:
                started.set()
            number += 1


def _count(done: SynchronizedArray[int], at: int, records: int) -> None:
    with done.get_lock():
        done[at] += records


def _copy(record_nbytes: int, started: Event, stop: Event) -> None:
    record, copy = bytearray(record_nbytes), bytearray(record_nbytes)
    started.set()
    while not stop.is_set():
        for _ in range(PREFIX_BLOCKS):
            copy[:] = record
