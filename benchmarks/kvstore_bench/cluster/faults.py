"""The host that has a prompt fails: how long its asker waits, beside computing the prompt.

Each round begins with a borrowing daemon that has just started and has read one prompt well, so it
believes in the other one. Then the other one fails, and two of its prompts are asked for: the first
finds out, the second should know.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from kvstore.model.errors import Unavailable
from kvstore_bench.cluster.two_hosts import TwoHosts
from kvstore_bench.cluster.vllm_plan import FAULTS, VllmPlan
from kvstore_bench.tiers.tier import Say

ASKED = 2  # prompts while the fault lasts
MIDWAY_NBYTES = 4 << 20
FLIP_EVERY = 1 << 20
LOOK_S = 0.0005
READS_MAX, AGAIN_S = 5, 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that was asked for. number: 0 for the first since the fault began. reason: what
    ended its hit."""

    fault: str
    number: int
    ttft_s: float
    peer_blocks: int
    reason: str


@dataclass(slots=True)
class Found:
    """recompute_s: of prompts that nobody has, asked in between."""

    asked: list[Asked] = field(default_factory=list)
    recompute_s: list[float] = field(default_factory=list)
    different: int = 0

    @property
    def worst(self) -> float:
        """The longest of all, beside the median of computing."""
        return max(each.ttft_s for each in self.asked) / median(self.recompute_s)

    def shown(self) -> dict[str, Any]:
        recompute_s = median(self.recompute_s)
        cases = {}
        for fault in FAULTS:
            some = [each for each in self.asked if each.fault == fault]
            cases[fault] = {
                "ttft_vs_recompute": median(each.ttft_s for each in some) / recompute_s,
                "worst_ttft_vs_recompute": max(each.ttft_s for each in some) / recompute_s,
                "asked": [asdict(each) for each in some],
            }
        return {
            "cases": cases,
            "recompute_s": self.recompute_s,
            "worst_recompute_vs_recompute": max(self.recompute_s) / recompute_s,
        }


def measure_faults(hosts: TwoHosts, say: Say) -> Found:
    """Time every fault."""
    hosts.there.flush()
    hosts.begin(relayed=True)
    hosts.connect(hosts.there)
    found = Found()
    prompts = [hosts.prompts.next() for _ in range(1 + ASKED)]
    answers = [hosts.compute(prompt) for prompt in prompts]
    hosts.there.flush()  # it is killed
    faults = Faults(hosts)
    for fault in FAULTS:
        for number in range(hosts.plan.fault_rounds):
            took_s, passed = _believe(hosts, prompts[0], answers[0])
            faults.bytes_per_s = passed / took_s
            found.recompute_s.append(_recompute(hosts))
            with faults.lasts(fault):
                for at, (prompt, answer) in enumerate(zip(prompts[1:], answers[1:], strict=True)):
                    hosts.here.forget()
                    reply = hosts.alone.ask(hosts.here.engine, prompt, hosts.plan.answer_tokens)
                    found.different += reply.tokens != answer
                    outcome = hosts.here.outcome()
                    reason = outcome.ending.reason.value if outcome.ending else ""
                    found.asked.append(Asked(fault, at, reply.ttft_s, outcome.peer_blocks, reason))
            first, *_, last = found.asked[-ASKED:]
            say(
                f"{fault}, {number + 1} of {hosts.plan.fault_rounds}: {first.ttft_s:.2f} s, then "
                f"{last.ttft_s:.2f} s; computing {found.recompute_s[-1]:.2f} s"
            )
    return found


def _believe(hosts: TwoHosts, prompt: Sequence[int], answer: tuple[int, ...]) -> tuple[float, int]:
    """Start the borrowing daemon anew and let it read one prompt. Return how long the daemon took,
    and how many bytes came."""
    hosts.begin_here()
    hosts.connect(hosts.here)
    for _ in range(READS_MAX):  # a load that was given up tells the pace, too
        hosts.here.forget()
        before = hosts.relay.passed
        reply = hosts.alone.ask(hosts.here.engine, prompt, hosts.plan.answer_tokens)
        outcome = hosts.here.outcome()
        if reply.tokens == answer and outcome.peer_blocks >= hosts.plan.loadable_blocks:
            return max(outcome.took_s, 1e-3), hosts.relay.passed - before
        time.sleep(AGAIN_S)
    raise Unavailable(f"a prompt did not come from the other host: {outcome}")


def _recompute(hosts: TwoHosts) -> float:
    prompt = hosts.prompts.next()
    return hosts.alone.ask(hosts.here.engine, prompt, hosts.plan.answer_tokens).ttft_s


class Faults:
    """What makes the lending host fail. bytes_per_s: at which it sent last."""

    def __init__(self, hosts: TwoHosts) -> None:
        self.bytes_per_s = 0.0
        self._hosts = hosts
        self._plan: VllmPlan = hosts.plan
        self._relay = hosts.relay
        self._there = hosts.there.daemon

    @contextmanager
    def lasts(self, fault: str) -> Iterator[None]:
        """Let a fault of `FAULTS` last for the time of the context."""
        with getattr(self, f"_{fault}")():
            yield

    @contextmanager
    def _dead(self) -> Iterator[None]:
        self._there.kill()
        try:
            yield
        finally:
            self._hosts.begin_there()

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        os.kill(self._there.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._there.pid, signal.SIGCONT)

    @contextmanager
    def _dead_midway(self) -> Iterator[None]:
        with self._midway(self._there.kill):
            try:
                yield
            finally:
                if self._there.alive:
                    self._there.kill()
                self._hosts.begin_there()

    @contextmanager
    def _stopped_midway(self) -> Iterator[None]:
        pid = self._there.pid
        with self._midway(lambda: os.kill(pid, signal.SIGSTOP)):
            try:
                yield
            finally:
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def _slow(self) -> Iterator[None]:
        self._relay.bytes_per_s = round(self.bytes_per_s / self._plan.slow_factor)
        try:
            yield
        finally:
            self._relay.bytes_per_s = 0

    @contextmanager
    def _corrupt(self) -> Iterator[None]:
        self._relay.flip_every = FLIP_EVERY
        try:
            yield
        finally:
            self._relay.flip_every = 0

    @contextmanager
    def _midway(self, strike: Callable[[], object]) -> Iterator[None]:
        """Strike when some bytes of an answer have passed."""
        over = threading.Event()
        at = self._relay.passed + MIDWAY_NBYTES

        def watch() -> None:
            while not over.is_set():
                if self._relay.passed >= at:
                    strike()
                    return
                time.sleep(LOOK_S)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
