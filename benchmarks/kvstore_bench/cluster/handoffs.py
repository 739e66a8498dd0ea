"""Prefill here, decode there, through the example proxy: one request after the other, or at once.

The link between the hosts is as slow as a plan says. What is timed is from the end of the prefill
to the first token of the answer: in between, the rest of the prompt's KV has to arrive.
"""

from __future__ import annotations

import math
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median

from kvstore.model.errors import Unavailable
from kvstore.testing.ports import free_ports
from kvstore_bench.chat.metrics import server_counts
from kvstore_bench.cluster.two_hosts import TwoHosts, wait_until
from kvstore_bench.cluster.vllm_plan import BLOCK_TOKENS
from kvstore_bench.demo.processes import Child
from kvstore_bench.tiers.tier import Say

MODES = ("sequential", "concurrent")
PROXY_PORT = 9000
PROXY = "kvstore_vllm.examples.proxy"
_LINE = re.compile(
    r"request=(\S+) status=(\d+) prefill=(\S+)(?: prefill_s=(\S+))?(?: first_s=(\S+))?"
)


@dataclass(frozen=True, slots=True)
class Handoff:
    """One request. prefill: what became of it. handoff_s: from its end to the first token; None:
    the decoding engine was first. computed_blocks: by the decoding engine."""

    mode: str
    ttft_s: float
    prefill: str
    prefill_s: float | None
    handoff_s: float | None
    computed_blocks: int

    def told(self) -> str:
        """Return it in words."""
        if self.prefill_s is None or self.handoff_s is None:
            return f"prefill {self.prefill}, {self.computed_blocks} blocks computed by the decoder"
        return (
            f"prefill {self.prefill_s:.2f} s, first token {self.handoff_s:.3f} s later, "
            f"{self.computed_blocks} blocks computed by the decoder"
        )


@dataclass(slots=True)
class Handoffs:
    """What was found, without what warmed up."""

    handoffs: list[Handoff] = field(default_factory=list)
    different: int = 0

    def of(self, mode: str) -> list[Handoff]:
        return [each for each in self.handoffs if each.mode == mode]

    @property
    def ratio(self) -> float | None:
        """None if a mode never handed anything off."""
        times = [
            [each.handoff_s for each in self.of(mode) if each.handoff_s is not None]
            for mode in MODES
        ]
        if not all(times):
            return None
        sequential, concurrent = map(median, times)
        return concurrent / sequential

    @property
    def computed_blocks(self) -> int:
        """The most."""
        return max(each.computed_blocks for each in self.handoffs)


def measure_handoffs(hosts: TwoHosts, say: Say) -> Handoffs:
    """Time both modes in turns, on a slow link."""
    plan, found = hosts.plan, Handoffs()
    with ExitStack() as stack:
        stack.enter_context(_slow_link(hosts))
        ports = {mode: stack.enter_context(_proxy(hosts, mode)) for mode in MODES}
        for number in range(plan.warm_ups + plan.pd_prompts):
            for mode in MODES[:: -1 if number % 2 else 1]:
                prompt = hosts.prompts.next()
                handoff, tokens = _hand_off(hosts, mode, ports[mode], prompt, number)
                say(f"{mode}: {handoff.told()}")
                if number >= plan.warm_ups:
                    found.handoffs.append(handoff)
                    found.different += tokens != hosts.compute(prompt)
    return found


def _hand_off(
    hosts: TwoHosts, mode: str, proxy: _Proxy, prompt: Sequence[int], number: int
) -> tuple[Handoff, tuple[int, ...]]:
    plan, engine = hosts.plan, hosts.here.engine
    request_id = f"{mode}-{number}"
    before = engine.counters()
    reply = hosts.alone.ask(
        engine, prompt, plan.answer_tokens, port=proxy.port, request_id=request_id
    )
    sources = server_counts(before, engine.counters()).prompt_tokens_by_source or {}
    loaded = sources.get("external_kv_transfer", 0.0)
    prefill, prefill_s, first_s = proxy.times(request_id)
    handoff_s = None if prefill_s is None or first_s < prefill_s else first_s - prefill_s
    computed = math.ceil((plan.prompt_tokens - loaded) / BLOCK_TOKENS)
    return Handoff(mode, reply.ttft_s, prefill, prefill_s, handoff_s, computed), reply.tokens


@contextmanager
def _slow_link(hosts: TwoHosts) -> Iterator[None]:
    """Let the link from the prefilling host be as slow as is planned."""
    plan, isolated = hosts.plan, not hosts.net.why_not
    hosts.begin(relayed=not isolated)
    for side in (hosts.there, hosts.here):
        hosts.connect(side)
    if isolated:
        hosts.there.host.limit(plan.link_bits_per_s)
    else:
        hosts.relay.bytes_per_s = plan.link_bits_per_s // 8
    try:
        yield
    finally:
        hosts.relay.bytes_per_s = 0
        if isolated:
            hosts.there.host.limit(0)


@dataclass(frozen=True, slots=True)
class _Proxy:
    child: Child
    port: int

    def times(self, request_id: str) -> tuple[str, float | None, float]:
        """Return what became of the prefill of a request, when that was over, and when the first
        byte of the answer was there, in seconds."""
        found: list[tuple[str, float | None, float]] = []

        def told() -> bool:
            for name, status, prefill, prefill_s, first_s in _LINE.findall(
                self.child.log.read_text()
            ):
                if name == request_id:
                    if status != "200" or not first_s:
                        raise Unavailable(f"{name}: HTTP {status}, the prefill: {prefill}")
                    found.append((prefill, float(prefill_s) if prefill_s else None, float(first_s)))
            return bool(found)

        wait_until(told, f"{self.child.log} says nothing of {request_id}")
        return found[0]


@contextmanager
def _proxy(hosts: TwoHosts, mode: str) -> Iterator[_Proxy]:
    """Yield the example proxy, on the decoding host as a sidecar is."""
    host = hosts.here.host
    port = PROXY_PORT + MODES.index(mode) if host.isolated else free_ports(1)[0]
    command = [*host.enter, sys.executable, "-m", PROXY, "--listen", f"{host.address}:{port}"]
    command += ["--prefill", hosts.there.engine.url, "--decode", hosts.here.engine.url]
    command += ["--concurrent"] if mode == "concurrent" else []
    log = hosts.here.engine.child.log.with_name(f"proxy-{mode}.log")
    child = Child(f"{mode} proxy", command, environ=os.environ, log=log)
    try:

        def listens() -> bool:
            child.check()
            with socket.socket() as probe:
                return probe.connect_ex((host.address, port)) == 0

        wait_until(listens, "the proxy did not start")
        yield _Proxy(child, port)
    finally:
        child.stop()
