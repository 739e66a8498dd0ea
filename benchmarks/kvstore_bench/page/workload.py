"""What engines do with a daemon, without engines: chats that grow, evictions, hostile names."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore import Client
from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId
from kvstore.model.errors import KVStoreError
from kvstore.model.keys import KeyChain, root_key
from kvstore_bench.store.store import chain

BLOCK_TOKENS = 16
RECORD_NBYTES = 64 << 10
CHATS = 48
TURN_BLOCKS = (2, 14)
CHAT_BLOCKS_MAX = 160
PAUSE_S = 0.06
HOSTILE = "<img src=x onerror=\"window.ran=1;alert('ran')\"><script>window.ran=1</script>"


def model(name: str, nbytes: int = RECORD_NBYTES, **identity: str) -> Namespace:
    """Return the namespace of an engine's model."""
    fields = {"model": name, **identity}
    return Namespace(
        BLOCK_TOKENS, (Group("full", nbytes),), tuple(sorted(fields.items())), name=name
    )


class Chats(threading.Thread):
    """Asks for and stores growing chats behind shared system prompts until `end`."""

    def __init__(self, target: str, spec: Namespace, name: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._target = target
        self._spec = spec
        self._name = name
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._lengths = dict.fromkeys(range(CHATS), 0)
        self.asked = 0

    def end(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.is_set():
            try:
                with Client(self._target, name=self._name) as client:
                    client.register(self._spec)
                    self._ask(client)
            except KVStoreError:  # the daemon is stopped or killed now and then
                self._over.wait(0.2)

    def _ask(self, client: Client) -> None:
        while not self._over.wait(PAUSE_S):
            chat = min(int(self._random.expovariate(0.09)), CHATS - 1)
            length = self._lengths[chat] + self._random.randint(*TURN_BLOCKS)
            self._lengths[chat] = 0 if length > CHAT_BLOCKS_MAX else length
            keys = keys_of(self._spec.id, chat % 5, chat, 20 + length)
            request = f"chatcmpl-{self._random.getrandbits(48):012x}-0"
            lease = client.acquire(
                self._spec.id, keys, wait_s=0.5, request_id=request, session_id=f"chat-{chat:03d}"
            )
            if lease.leased:
                client.release(lease.lease_id)
            self.asked += 1
            missing = keys[lease.hit_blocks :]
            if missing:
                parent = keys[lease.hit_blocks - 1] if lease.hit_blocks else None
                records = [os.urandom(RECORD_NBYTES)] * len(missing)
                client.put(
                    self._spec.id, missing, records, first_block=lease.hit_blocks, parent=parent
                )
            if self.asked % 40 == 0:
                client.hints.expect(f"chat-{chat:03d}", 30.0)
            elif self.asked % 65 == 0:
                client.hints.pin(f"chat-{chat:03d}", 120.0)


def keys_of(namespace: NamespaceId, system: int, chat: int, blocks: int) -> list[BlockKey]:
    """Return the keys of a chat of so many blocks, of which the first 12 to 20 are a system prompt
    that others have as well."""
    shared = 12 + 2 * system
    tokens = list(range(system, system + BLOCK_TOKENS * shared))
    tokens += range(100_000 * (chat + 1), 100_000 * (chat + 1) + BLOCK_TOKENS * (blocks - shared))
    return KeyChain(root_key(namespace), BLOCK_TOKENS).update(tokens)


@contextmanager
def chats(target: str) -> Iterator[list[Chats]]:
    """Run the workload of three engines, two of which serve one model with different settings."""
    engines = [
        Chats(
            target, model("meta-llama/Llama-3.1-8B-Instruct", dtype="bfloat16"), "vllm-0.32.0 a", 1
        ),
        Chats(
            target, model("meta-llama/Llama-3.1-8B-Instruct", dtype="fp8_e4m3"), "vllm-0.32.0 b", 2
        ),
        Chats(target, model("google/gemma-3-270m", dtype="bfloat16"), "transformers", 3),
    ]
    for each in engines:
        each.start()
    try:
        yield engines
    finally:
        for each in engines:
            each.end()


def hostile(target: str) -> None:
    """Make every name that a client may choose a piece of markup."""
    spec = model(HOSTILE, layout=HOSTILE)
    with Client(target, name=HOSTILE) as client:
        client.register(spec)
        keys = chain(spec.id, 6, salt=b"hostile")
        client.put(spec.id, keys[:3], [bytes(RECORD_NBYTES)] * 3)
        lease = client.acquire(spec.id, keys, request_id=HOSTILE, session_id=HOSTILE)
        client.release(lease.lease_id)
        client.hints.expect(HOSTILE, 300.0)


def many_requests(target: str, requests: int, per_s: float) -> None:
    """Ask for so many prefixes, evenly."""
    spec = model("many")
    pause = threading.Event()
    with Client(target, name="vllm-0.32.0 many") as client:
        client.register(spec)
        keys = chain(spec.id, 40, salt=b"many")
        client.put(spec.id, keys[:24], [bytes(RECORD_NBYTES)] * 24)
        for number in range(requests):
            lease = client.acquire(spec.id, keys[: 1 + number % 40], request_id=f"many-{number}")
            if lease.leased:
                client.release(lease.lease_id)
            pause.wait(1 / per_s / 2)  # the calls take the other half


def many_runs(target: str, runs: int, fanout: int = 224) -> int:
    """Store prefixes that part in so many places; returns the blocks that were put."""
    spec = model("wide", nbytes=4096)
    record = bytes(4096)
    stored = 0
    with Client(target, name="wide") as client:
        client.register(spec)
        top = KeyChain(root_key(spec.id), BLOCK_TOKENS).update(range(BLOCK_TOKENS))
        client.put(spec.id, top, [record])
        for middle in itertools.count(1):
            chained = KeyChain(top[0], BLOCK_TOKENS)
            parent = chained.update(range(middle * 1000, middle * 1000 + BLOCK_TOKENS))[0]
            client.put(spec.id, [parent], [record], first_block=1, parent=top[0])
            for leaf in range(min(fanout, runs - stored)):
                tokens = range(leaf * 50, leaf * 50 + BLOCK_TOKENS)
                key = KeyChain(parent, BLOCK_TOKENS).update(tokens)
                client.put(spec.id, key, [record], first_block=2, parent=parent)
                stored += 1
            if stored >= runs:
                return stored
    return stored
