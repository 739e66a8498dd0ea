"""Kill a daemon with SIGKILL in a loop of durable puts, restart it, and count what is missing.

    python tests/faults/kill9.py --rounds 30 --json result.json

Each round: a writer puts blocks with durable=True and notes those that were acknowledged; at a
random moment the daemon is killed; after its restart every block of every round is read back.
`lost` counts acknowledged blocks that are a miss, `wrong` blocks that are not what was put; both
have to be 0. A put that was under way may be there or not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvstore import BlockKey, Client, Group, KVStoreError, Namespace, NamespaceId
from kvstore.testing.daemon import Daemon

RECORD_NBYTES = 24_000  # not a multiple of a page
BATCH = 4
KILL_AFTER_S = (0.02, 0.4)
NAMESPACE = Namespace(
    block_tokens=16, groups=(Group("full", RECORD_NBYTES),), identity=(("model", "kill9"),)
)


@dataclass(slots=True)
class Result:
    """What the rounds found."""

    rounds: int = 0
    put: int = 0
    acknowledged: int = 0
    kept_unacknowledged: int = 0
    lost: int = 0
    wrong: int = 0
    restart_s_max: float = 0.0


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"kill9 %d" % number).digest())


def record(number: int) -> bytes:
    return np.random.default_rng(number).bytes(RECORD_NBYTES)


class Writer(threading.Thread):
    """Puts batches until the daemon is gone."""

    def __init__(self, client: Client, namespace_id: NamespaceId, start: int) -> None:
        super().__init__(name="kill9-writer")
        self.next = start
        self.acknowledged: set[int] = set()
        self.first_put = threading.Event()
        self._client = client
        self._namespace_id = namespace_id

    def run(self) -> None:
        while True:
            numbers = range(self.next, self.next + BATCH)
            self.next += BATCH
            try:
                done = self._client.put(
                    self._namespace_id,
                    [key(number) for number in numbers],
                    [record(number) for number in numbers],
                    durable=True,
                )
            except KVStoreError:
                return
            if done.durable and not done.refused:
                self.acknowledged.update(numbers)
            self.first_put.set()


def check(client: Client, namespace_id: NamespaceId, put: int, acknowledged: set[int]) -> Result:
    """Read everything back."""
    found = Result(put=put, acknowledged=len(acknowledged))
    for start in range(0, put, 64):
        numbers = range(start, min(put, start + 64))
        records = client.get(namespace_id, [key(number) for number in numbers], wait_s=10.0)
        for number, got in zip(numbers, records, strict=True):
            if got is None:
                found.lost += number in acknowledged
            else:
                found.wrong += got != record(number)
                found.kept_unacknowledged += number not in acknowledged
    return found


def kill_in_put_loop(rounds: int, seed: int) -> Result:
    """Run the rounds against one directory, which grows."""
    chance = random.Random(seed)
    acknowledged: set[int] = set()
    put, restart_s_max, result = 0, 0.0, Result()
    with Daemon() as daemon:
        daemon.start()
        for _ in range(rounds):
            with Client(daemon.target) as client:
                writer = Writer(client, client.register(NAMESPACE), put)
                writer.start()
                writer.first_put.wait(10.0)
                time.sleep(chance.uniform(*KILL_AFTER_S))
                daemon.kill()
                writer.join(30.0)
            put = writer.next
            acknowledged |= writer.acknowledged
            began = time.perf_counter()
            daemon.start()
            restart_s_max = max(restart_s_max, time.perf_counter() - began)
            with Client(daemon.target) as client:
                result = check(client, client.register(NAMESPACE), put, acknowledged)
            if result.lost or result.wrong:
                break
    result.rounds, result.restart_s_max = rounds, round(restart_s_max, 3)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    result = kill_in_put_loop(arguments.rounds, arguments.seed)
    text = json.dumps(asdict(result))
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 1 if result.lost or result.wrong or not result.acknowledged else 0


if __name__ == "__main__":
    sys.exit(main())
