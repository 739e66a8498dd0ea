"""Another rank of an engine, in a process of its own: the worker half, told what to do by pipe."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tests.connectors.trtllm.executor import Rank, llm_args
from tests.connectors.trtllm.standin import World, enter, install


def serve(link: Connection, settings: str, blocks: int, kinds: int, options: Any) -> None:
    """Be rank 1 until the pipe says "close"."""
    os.environ["TRTLLM_KVSTORE"] = settings
    install()
    enter(World(1, [link]))
    from kvstore_trtllm import KVStoreWorker

    worker = KVStoreWorker(llm_args(**options))
    try:
        rank = Rank(worker, 1, blocks, kinds)
    except Exception as error:
        link.send(repr(error))
        return
    link.send("ready")
    while (order := link.recv())[0] != "close":
        if order[0] == "forward":
            rank.forward(*order[1:])
        elif order[0] == "finished":
            link.send(worker.get_finished(order[1], [])[0])
        elif order[0] == "check":
            try:
                rank.check(*order[1:])
                link.send("")
            except AssertionError as error:
                link.send(str(error))
        elif order[0] == "drain":
            link.send(worker._saver is None or worker._saver.drain(20))
    worker.close()


@contextmanager
def other_rank(
    settings: str, blocks: int, kinds: int, options: dict[str, Any]
) -> Iterator[Connection]:
    """Run rank 1; yield the pipe to it. Its first word is what became of its start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, settings, blocks, kinds, options))
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send(("close",))
        process.join(20)
    finally:
        if process.is_alive():
            process.kill()
            process.join(20)
        ours.close()
