"""A daemon that announces, an indexer that listens, and prompts that are stored and asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq

from kvstore.client import Client
from kvstore.events.register import Registration, register
from kvstore.model.block import Group, Namespace
from kvstore.model.errors import KVStoreError
from kvstore.model.tokens import BlockTokens
from kvstore.testing.daemon import Daemon
from kvstore.testing.dynamo import Indexer
from kvstore.testing.prompts import keys_of, prompt, store_prompt

BLOCK_TOKENS = 16
DP_RANK = 1000
MODEL = "bench"
ANYWHERE = ("events.publish=tcp://127.0.0.1:0", "events.replay=tcp://127.0.0.1:0")
JOIN_S = 10.0


def space(record_nbytes: int) -> Namespace:
    return Namespace(BLOCK_TOKENS, (Group("g", record_nbytes),), (("model", MODEL),), name=MODEL)


@dataclass(frozen=True, slots=True)
class EventsPlan:
    """rounds: of puts, with and without, in whole eights. prompts, prompt_blocks: stored for the
    comparison of the index. traffic_s: before and after each fault. cut_s: how long the link is
    cut."""

    rounds: int = 16
    round_blocks: int = 4096
    record_nbytes: int = 64 << 10
    prompts: int = 1000
    prompt_blocks: int = 100
    memory_blocks: int = 400_000
    singles: int = 100
    traffic_s: float = 10.0
    cut_s: float = 10.0
    fault_prompts: int = 150


class Addresses(NamedTuple):
    """Where a daemon announces."""

    publish: str
    replay: str


def addresses_of(daemon: Daemon) -> Addresses:
    with Client(daemon.target, arena=False) as client:
        stats = client.admin.stats()["events"]
    return Addresses(stats["publish"], stats["replay"])


def tell(indexer: Indexer, where: Addresses) -> None:
    """Register a daemon's stream as another rank of instance 1."""
    register(indexer.url, Registration(1, MODEL, BLOCK_TOKENS, DP_RANK, *where))


def wait_for_subscriber(client: Client) -> None:
    deadline = time.monotonic() + JOIN_S
    while not client.admin.stats()["events"]["subscribers"]:
        if time.monotonic() > deadline:
            raise TimeoutError("the indexer did not subscribe")
        time.sleep(0.01)


@contextmanager
def announcing(
    site: Path | None, *settings: str, file: bool = True
) -> Iterator[tuple[Daemon, Indexer]]:
    """Yield a daemon and an indexer that has joined it."""
    with Daemon(*ANYWHERE, *settings, file=file) as daemon, Indexer(site) as indexer:
        daemon.start()
        tell(indexer, addresses_of(daemon))
        with Client(daemon.target, arena=False) as client:
            wait_for_subscriber(client)
        yield daemon, indexer


@contextmanager
def listening(publish: str) -> Iterator[None]:
    """Take what is published, as vLLM's example of a subscriber does, and keep nothing of it: the
    index of a router is on another host."""
    with zmq.Context() as context:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(publish)
        over = threading.Event()

        def take() -> None:
            while not over.is_set():
                if socket.poll(200):
                    socket.recv_multipart()

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            socket.close(0)


@dataclass(slots=True)
class Difference:
    """What an indexer says of prompts beside what the daemon has of them, in blocks."""

    prompts: int = 0
    equal: int = 0
    claimed: int = 0
    there: int = 0
    absent: int = 0  # claimed, and not there
    unknown: int = 0  # there, and not claimed

    def fields(self) -> dict[str, float]:
        return {
            "prompts": self.prompts,
            "blocks_there": self.there,
            "equal": self.equal / max(1, self.prompts),
            "claimed_but_absent": self.absent / max(1, self.claimed),
            "present_but_unknown": self.unknown / max(1, self.there),
        }


def compare(
    client: Client, namespace: Namespace, indexer: Indexer, prompts: Sequence[Sequence[int]]
) -> Difference:
    """Ask both about every prompt. As the indexer counts, files go on where DRAM ends."""
    found = Difference()
    for tokens in prompts:
        told = indexer.matched(tokens, MODEL)
        dram = told.get("cpu", 0) // BLOCK_TOKENS
        end = max(dram, told.get("disk", 0) // BLOCK_TOKENS)
        where = [(False, False)] * (len(tokens) // BLOCK_TOKENS)
        for each in client.admin.explain(namespace.id, keys_of(namespace, tokens)).ranges:
            where[each.begin : each.end] = [(each.dram, each.file)] * (each.end - each.begin)
        here = _run([in_dram for in_dram, _ in where], 0)
        last = _run([in_file for _, in_file in where], here)
        found.prompts += 1
        found.equal += (dram, end) == (here, last)
        found.claimed += end
        found.there += last
        found.absent += max(0, end - last)
        found.unknown += max(0, last - end)
    return found


def _run(there: Sequence[bool], begin: int) -> int:
    """Return where the run that begins at `begin` ends."""
    end = begin
    while end < len(there) and there[end]:
        end += 1
    return end


def ask_and_store(client: Client, namespace: Namespace, tokens: Sequence[int]) -> None:
    """Do what an engine does with a prompt: ask for it, and store what is missing."""
    keys = keys_of(namespace, tokens)
    grant = client.acquire(namespace.id, keys, wait_s=1.0, tokens=BlockTokens.of(tokens))
    if grant.lease_id:
        client.release(grant.lease_id)
    if grant.hit_blocks < len(keys):
        store_prompt(client, namespace, tokens, first_block=grant.hit_blocks)


def traffic(
    client: Client, namespace: Namespace, prompts: Sequence[Sequence[int]], seconds: float
) -> int:
    """Ask for prompts one after another for so long, each of them once at least; returns how many
    were asked for. What a dead daemon refuses is passed over."""
    end, asked = time.monotonic() + seconds, 0
    while time.monotonic() < end or asked < len(prompts):
        try:
            ask_and_store(client, namespace, prompts[asked % len(prompts)])
        except KVStoreError:
            time.sleep(0.05)
            if time.monotonic() > end + JOIN_S:
                raise
            continue
        asked += 1
        if asked >= len(prompts):
            time.sleep(0.005)
    return asked


def prompts_of(count: int, blocks: int, seed: int) -> list[list[int]]:
    return [prompt(seed * 1_000_003 + n, blocks * BLOCK_TOKENS) for n in range(count)]
