"""Which host a request is sent to."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import Protocol

from kvstore.model.block import BlockKey
from kvstore.model.errors import InvalidRequest
from kvstore.replay.workload import Request

LOAD_BOUND = 1.25
LOAD_S = 10.0  # a request is a load for so long: prefill and a short answer
POINTS = 128  # of each host on the ring: loads are then within about a tenth of each other

Holding = Callable[[Sequence[BlockKey]], Sequence[tuple[int, int]]]
"""Returns the hosts that seem to have most of a prefix, and how many heads of it each has."""


class Router(Protocol):
    """Sends requests to hosts, which are numbered from 0."""

    def route(self, request: Request, keys: Sequence[BlockKey]) -> int:
        """Return the host for a request. keys: of its blocks."""


class Random:
    """Any host."""

    def __init__(self, hosts: int, seed: int) -> None:
        self._hosts = hosts
        self._draw = random.Random(seed)

    def route(self, request: Request, keys: Sequence[BlockKey]) -> int:
        return self._draw.randrange(self._hosts)


class RoundRobin:
    """One host after the other."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._numbers = count()

    def route(self, request: Request, keys: Sequence[BlockKey]) -> int:
        return next(self._numbers) % self._hosts


class Affinity:
    """Consistent hashing: all requests of a conversation go to one host; those that belong to none
    go where their first block does."""

    def __init__(self, hosts: int) -> None:
        points = [(_hash(f"host {h} {i}"), h) for h in range(hosts) for i in range(POINTS)]
        points.sort()
        self._points = [point for point, _ in points]
        self._hosts = [host for _, host in points]

    def route(self, request: Request, keys: Sequence[BlockKey]) -> int:
        of = f"session {request.session}" if request.session is not None else keys[:1]
        at = bisect(self._points, _hash(str(of)))
        return self._hosts[at % len(self._hosts)]


class KVAware:
    """The host that seems to have most of the prompt, as long as that has not more than its share
    of the load.

    The load of a host is how many requests it got in the last LOAD_S. A host gets another one if
    it has then at most `bound` times the mean, rounded up: consistent hashing with bounded loads
    (Mirrokni, Thorup, Zadimoghaddam 2018) has this rule. With nothing to choose from, the host with
    the least load gets it.
    """

    def __init__(self, hosts: int, seed: int, holding: Holding, bound: float) -> None:
        self._loads = [0] * hosts
        self._sent: deque[tuple[float, int]] = deque()
        self._draw = random.Random(seed)
        self._holding = holding
        self._bound = bound

    def route(self, request: Request, keys: Sequence[BlockKey]) -> int:
        loads, sent = self._loads, self._sent
        while sent and sent[0][0] <= request.at_s - LOAD_S:
            loads[sent.popleft()[1]] -= 1
        most = math.ceil(self._bound * (len(sent) + 1) / len(loads))
        found = [(-heads, loads[host], host) for host, heads in self._holding(keys)]
        allowed = (host for _, load, host in sorted(found) if load < most)
        host = next(allowed, None)
        if host is None:
            least = min(loads)
            host = self._draw.choice([each for each, load in enumerate(loads) if load == least])
        loads[host] += 1
        sent.append((request.at_s, host))
        return host


ROUTERS = ("random", "round-robin", "affinity", "kv")


def make_router(
    name: str, hosts: int, *, seed: int, holding: Holding, load_bound: float = LOAD_BOUND
) -> Router:
    """Return a router of ROUTERS. Raises InvalidRequest. load_bound: of `kv`, at least 1."""
    if name == "random":
        return Random(hosts, seed)
    if name == "round-robin":
        return RoundRobin(hosts)
    if name == "affinity":
        return Affinity(hosts)
    if name == "kv":
        return KVAware(hosts, seed, holding, load_bound)
    raise InvalidRequest(f"{name!r} is no router: write one of {', '.join(ROUTERS)}")


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
