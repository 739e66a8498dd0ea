"""What events cost: puts a second with and without, how soon a block is visible, and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.client import Client
from kvstore.model.block import BlockKey, Namespace, Part, Span
from kvstore.model.checksum import copies_in
from kvstore.model.tokens import BlockTokens
from kvstore.testing.daemon import Daemon
from kvstore.testing.prompts import keys_of, prompt, store_prompt
from kvstore_bench.events.stage import (
    ANYWHERE,
    BLOCK_TOKENS,
    MODEL,
    EventsPlan,
    addresses_of,
    announcing,
    listening,
    prompts_of,
    space,
    wait_for_subscriber,
)

BATCH_BLOCKS = 32
PAIR_ROUNDS = 4
WARM_ROUNDS = 2  # they fill the arenas
PROMPT_BLOCKS = 512
WARM_PROMPTS = 96
VISIBLE_S = 10.0
SETTLE_S = 60.0
Say = Callable[[str], None]


def visible(plan: EventsPlan, site: Path | None) -> dict[str, float]:
    """Measure from the commit of a prompt's first blocks to the indexer's answer, without load."""
    namespace, times = space(4096), []
    with announcing(site, file=False) as (daemon, indexer), Client(daemon.target) as client:
        client.register(namespace)
        for number in range(plan.singles):
            tokens = prompt(number, 4 * BLOCK_TOKENS)
            store_prompt(client, namespace, tokens)
            began = time.perf_counter()
            while indexer.matched(tokens, MODEL).get("cpu", 0) < len(tokens):
                if time.perf_counter() - began > VISIBLE_S:
                    raise TimeoutError("the indexer was not told")
            times.append(time.perf_counter() - began)
            time.sleep(0.01 * (number % 20))  # at any time between two batches
    times.sort()
    return {
        "event_to_visible_ms_p50": 1e3 * statistics.median(times),
        "event_to_visible_ms_p99": 1e3 * times[int(0.99 * (len(times) - 1))],
    }


def put_ratio(plan: EventsPlan, say: Say) -> dict[str, Any]:
    """Measure puts a second of two daemons in turns; one announces to a subscriber.

    Of two daemons that do the same, the one that was started first is a few percent slower. So
    there are several pairs, of which each daemon is the first one in half, and the ratio is the
    geometric mean of all pairs.
    """
    pairs = [
        _pair(plan, say, told_first=told_first)
        for _ in range(-(-plan.rounds // (2 * PAIR_ROUNDS)))
        for told_first in (True, False)
    ]
    medians = [statistics.median(pair.ratios) for pair in pairs]
    return {
        "put_ratio_with_events": statistics.geometric_mean(medians),
        "put_ratio_started_first": statistics.geometric_mean(medians[::2]),
        "put_ratio_started_last": statistics.geometric_mean(medians[1::2]),
        "put_ratio_each": [ratio for pair in pairs for ratio in pair.ratios],
        "puts_per_s": {
            name: statistics.median([rate for pair in pairs for rate in pair.rates[name]])
            for name in ("on", "off")
        },
        "blocks_announced": pairs[-1].announced,
    }


class _Pair(NamedTuple):
    """Rounds of one pair of daemons. ratios, rates: of each. announced: blocks, at the end."""

    ratios: list[float]
    rates: dict[str, list[float]]
    announced: int


def _pair(plan: EventsPlan, say: Say, *, told_first: bool) -> _Pair:
    """Measure a few rounds. told_first: the daemon that announces is started first."""
    namespace = space(plan.record_nbytes)
    room = ("dram.capacity=512MiB", "dram.extent=128MiB")
    pair = _Pair([], {"on": [], "off": []}, 0)
    sources = [memoryview(bytes([n]) * plan.record_nbytes) for n in range(BATCH_BLOCKS)]
    with Daemon(*room, file=False) as plain, Daemon(*room, *ANYWHERE, file=False) as told:
        for daemon in (told, plain) if told_first else (plain, told):
            daemon.start()
        with (
            listening(addresses_of(told).publish),
            Client(plain.target) as without,
            Client(told.target) as with_events,
        ):
            wait_for_subscriber(with_events)
            for client in (without, with_events):
                client.register(namespace)
            for number in range(-WARM_ROUNDS, PAIR_ROUNDS):
                batches = _batches(namespace, plan.round_blocks, number + WARM_ROUNDS)
                order = [("on", with_events), ("off", without)]
                speed = {}
                for name, client in order if number % 2 else order[::-1]:
                    speed[name] = plan.round_blocks / _put(client, namespace, batches, sources)
                    time.sleep(0.3)  # for what is told meanwhile: the next daemon's turn is its own
                if number < 0:
                    continue
                pair.ratios.append(speed["on"] / speed["off"])
                for name, rate in speed.items():
                    pair.rates[name].append(rate)
                say(f"round {number + 1} of {PAIR_ROUNDS}: {pair.ratios[-1]:.3f}")
            stats = with_events.admin.stats()["events"]
    return pair._replace(announced=stats["blocks"])


def _batches(
    namespace: Namespace, blocks: int, number: int
) -> list[tuple[int, BlockKey | None, list[BlockKey], BlockTokens]]:
    """Return reservations, made before the clock runs: first block, parent, keys and tokens."""
    found = []
    for nth in range(blocks // PROMPT_BLOCKS):
        tokens = prompt(1 + nth + 1000 * number, PROMPT_BLOCKS * BLOCK_TOKENS)
        keys = keys_of(namespace, tokens)
        for at in range(0, PROMPT_BLOCKS, BATCH_BLOCKS):
            end = at + BATCH_BLOCKS
            told = BlockTokens.of(tokens[at * BLOCK_TOKENS : end * BLOCK_TOKENS])
            found.append((at, keys[at - 1] if at else None, keys[at:end], told))
    return found


def _put(
    client: Client,
    namespace: Namespace,
    batches: list[tuple[int, BlockKey | None, list[BlockKey], BlockTokens]],
    sources: list[memoryview],
) -> float:
    """Put as an engine's worker does; returns the seconds it took."""
    spans = [Span(Part(0, 0), 0, BATCH_BLOCKS)]
    began = time.perf_counter()
    for first, parent, keys, told in batches:
        grant = client.reserve(
            namespace.id, keys, first_block=first, parent=parent, spans=spans, tokens=told
        )
        targets = [client.view(slot) for slot in grant.slots if slot is not None]
        if len(targets) != len(keys):
            raise RuntimeError(f"{len(keys) - len(targets)} blocks had no room")
        client.commit(grant.lease_id, copies_in(sources, targets))
    return time.perf_counter() - began


def memory(plan: EventsPlan) -> dict[str, float]:
    """Measure the daemon's anonymous memory with events and without, for as many blocks."""
    namespace, grown = space(4096), {}
    prompts = prompts_of(WARM_PROMPTS + plan.memory_blocks // PROMPT_BLOCKS, PROMPT_BLOCKS, seed=5)
    warm, prompts = prompts[:WARM_PROMPTS], prompts[WARM_PROMPTS:]
    blocks = len(prompts) * PROMPT_BLOCKS
    capacity = (blocks + len(warm) * PROMPT_BLOCKS) * 4096 // (64 << 20) * 64 + 64
    room = (f"dram.capacity={capacity}MiB", "dram.extent=64MiB")
    for name, settings in (("off", ()), ("on", ANYWHERE)):
        with (
            Daemon(*room, *settings, file=False) as daemon,
            Client(daemon.start().target) as client,
        ):
            client.register(namespace)
            for tokens in warm:  # what is taken once, however many blocks there are
                store_prompt(client, namespace, tokens)
            time.sleep(1.0)
            before = _anonymous_nbytes(daemon.pid)
            for tokens in prompts:
                store_prompt(client, namespace, tokens)
            if name == "on":
                _wait_told(client, blocks)
                stats = client.admin.stats()["events"]
                grown["table"] = stats["nbytes"] / stats["blocks"]
            time.sleep(1.0)
            grown[name] = (_anonymous_nbytes(daemon.pid) - before) / blocks
    return {
        "memory_bytes_per_block": grown["on"] - grown["off"],
        "table_bytes_per_block": grown["table"],
        "memory_bytes_per_block_without": grown["off"],
        "memory_blocks": blocks,
    }


def _wait_told(client: Client, blocks: int) -> None:
    deadline = time.monotonic() + SETTLE_S
    while (stats := client.admin.stats()["events"])["blocks"] < blocks or stats["waiting"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{stats['blocks']} of {blocks} blocks were told")
        time.sleep(0.1)


def _anonymous_nbytes(pid: int) -> int:
    with Path(f"/proc/{pid}/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
