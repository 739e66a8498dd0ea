"""A lender in a process of its own: `python -m tests.peer.lender_process NBYTES COUNT`. It prints
its port, and lends the records that `sample_record` makes."""

from __future__ import annotations

import asyncio
import sys

from kvstore.testing.lender import MemoryLender
from kvstore.testing.samples import sample_keys, sample_namespace, sample_record
from tests.peer.fleet import LENDER, ourselves, served

MODEL = "process"


async def main(nbytes: int, count: int) -> None:
    lender = MemoryLender()
    namespace = sample_namespace(MODEL, nbytes)
    lender.register(namespace)
    for key in sample_keys(MODEL, count):
        lender.put(namespace, key, sample_record(key, nbytes))
    async with served(ourselves(LENDER), lender) as found:
        print(found.server.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
