"""Does time, or an answer, tell a caller which prefixes are stored?

Half of the probes are of prefixes that are stored somewhere, half of prefixes that nobody asked.
Whoever could tell them apart would score them so that the areas under the curve (AUC) is 1; who
guesses gets 0.5. Every way of asking is scored by how long it took and by what it answered.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvstore import BlockKey, Client, KVStoreError, NamespaceId, Prefix

Ask = Callable[[Client, NamespaceId, Sequence[BlockKey]], float]


def _match(client: Client, space: NamespaceId, keys: Sequence[BlockKey]) -> float:
    return float(client.match(space, keys).hit_blocks)


def _acquire(client: Client, space: NamespaceId, keys: Sequence[BlockKey]) -> float:
    grant = client.acquire(space, keys, wait_s=0.0)
    client.release(grant.lease_id)
    return float(grant.hit_blocks)


def _get(client: Client, space: NamespaceId, keys: Sequence[BlockKey]) -> float:
    return float(sum(each is not None for each in client.get(space, keys, wait_s=0.0)))


def _explain(client: Client, space: NamespaceId, keys: Sequence[BlockKey]) -> float:
    return float(client.admin.explain(space, keys).hit_blocks)


def _prefetch(client: Client, space: NamespaceId, keys: Sequence[BlockKey]) -> float:
    return float(client.hints.prefetch(Prefix(space, tuple(keys)), deadline_s=0.1).blocks)


WAYS: dict[str, Ask] = {
    "match": _match,
    "acquire": _acquire,
    "get": _get,
    "explain": _explain,
    "hint": _prefetch,
}


def auc(stored: Sequence[float], absent: Sequence[float]) -> float:
    """Return the chance that a stored one scores higher than an absent one; ties count half."""
    scores = np.concatenate([stored, absent])
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    wins = ranks[: len(stored)].sum() - len(stored) * (len(stored) + 1) / 2
    return float(wins / (len(stored) * len(absent)))


def probe(
    client: Client,
    space: NamespaceId,
    stored: Sequence[Sequence[BlockKey]],
    absent: Sequence[Sequence[BlockKey]],
    draw: random.Random,
) -> dict[str, dict[str, float]]:
    """Ask for all prefixes, in random order, in every way; return each way's AUC of time and
    answer. Of time, less is a hit or more is: the farther from 0.5 counts."""
    probes = [(keys, True) for keys in stored] + [(keys, False) for keys in absent]
    found = {}
    for name, ask in WAYS.items():
        draw.shuffle(probes)
        times: dict[bool, list[float]] = {True: [], False: []}
        answers: dict[bool, list[float]] = {True: [], False: []}
        for keys, is_stored in probes:
            began = time.perf_counter()
            try:
                answer = ask(client, space, keys)
            except KVStoreError as error:
                answer = float(len(str(error)))
            times[is_stored].append(time.perf_counter() - began)
            answers[is_stored].append(answer)
        found[name] = {
            "time": auc(times[True], times[False]),
            "answer": auc(answers[True], answers[False]),
        }
    return found


def worst(found: dict[str, dict[str, float]]) -> float:
    """Return the AUC farthest from 0.5."""
    return max(
        (value for way in found.values() for value in way.values()), key=lambda x: abs(x - 0.5)
    )
