"""Processes that flood a daemon as tenants: puts, reads, leases, as fast as they can. And processes
that do as much to the processor and its memory, without a daemon.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any

from kvstore import Client
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore_bench.store.store import bench_namespace, chain

START_S = 60.0
PREFIX_BLOCKS = 16


@contextmanager
def flooding(targets: Sequence[str], record_nbytes: int) -> Iterator[None]:
    """Run one flooding process for each target inside of the context."""
    with _running(_flood, [(target, record_nbytes) for target in targets]):
        yield


@contextmanager
def copying(processes: int, record_nbytes: int) -> Iterator[None]:
    """Run processes that copy records within their own memory inside of the context."""
    with _running(_copy, [(record_nbytes,)] * processes):
        yield


@contextmanager
def _running(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[None]:
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
        if not all(event.wait(START_S) for event in started):
            raise Unavailable("a process beside the quiet tenant did not start")
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(START_S)
            if process.is_alive():
                process.kill()


def _flood(target: str, record_nbytes: int, started: Event, stop: Event) -> None:
    with Client(target, name="noisy") as client:
        namespace_id = client.register(bench_namespace("noise", record_nbytes))
        record = bytes(record_nbytes)
        number = 0
        while not stop.is_set():
            keys = chain(namespace_id, PREFIX_BLOCKS, salt=number.to_bytes(8))
            old = chain(namespace_id, PREFIX_BLOCKS, salt=(number // 2).to_bytes(8))
            try:
                client.put(namespace_id, keys, [record] * PREFIX_BLOCKS)
                client.get(namespace_id, old, wait_s=0.05)
                client.acquire(namespace_id, keys)  # left to expire, or to the end of the session
            except KVStoreError:
                pass  # it is over some bound: that is what it is for
            if number == PREFIX_BLOCKS:
                started.set()
            number += 1


def _copy(record_nbytes: int, started: Event, stop: Event) -> None:
    record, copy = bytearray(record_nbytes), bytearray(record_nbytes)
    started.set()
    while not stop.is_set():
        for _ in range(PREFIX_BLOCKS):
            copy[:] = record
