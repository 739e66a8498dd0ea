"""`kvstore bench cluster --vllm`: time to first token of a prompt that another host has.

Two hosts, each with a daemon and a real vLLM engine. Every request runs alone and is greedy. What
is compared alternates: a prompt that nobody has, one that the other host has, and that one again
from the own daemon's DRAM. Then the other host fails while it is asked (`faults.py`), and at last
one host computes prompts and the other one goes on (`handoffs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvstore.model.errors import Unavailable
from kvstore_bench.cluster.faults import measure_faults
from kvstore_bench.cluster.handoffs import measure_handoffs
from kvstore_bench.cluster.two_hosts import TwoHosts, two_hosts
from kvstore_bench.cluster.vllm_plan import VllmPlan
from kvstore_bench.demo.machine import describe
from kvstore_bench.tiers.tier import Say

WAYS = ("cold", "remote", "local")


@dataclass(slots=True)
class Ttfts:
    """Seconds to the first token, by way. different: answers unlike that of the first engine."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    different: int = 0

    def ratio(self, way: str, to: str) -> float:
        return median(self.seconds[way]) / median(self.seconds[to])


def run(plan: VllmPlan, logs: Path, say: Say) -> dict[str, Any]:
    """Measure everything. Raises Unavailable if something could not be measured."""
    machine = describe()
    say("starting two daemons and two engines")
    with two_hosts(plan, logs) as hosts:
        if hosts.net.why_not:
            say(f"{hosts.net.why_not}; the hosts are addresses of loopback")
        ttfts = measure_ttfts(hosts, say)
        faults = measure_faults(hosts, say)
        handoffs = measure_handoffs(hosts, say)
        network = "loopback" if hosts.net.why_not else "namespaces"
    return {
        "remote_ttft_vs_cold": ttfts.ratio("remote", "cold"),
        "remote_ttft_vs_local": ttfts.ratio("remote", "local"),
        "worst_ttft_vs_recompute": faults.worst,
        "pd_decode_computed_blocks": handoffs.computed_blocks,
        "pd_handoff_concurrent_vs_sequential": handoffs.ratio,
        "different_answers": ttfts.different + faults.different + handoffs.different,
        "ttft_s": ttfts.seconds,
        "faults": faults.shown(),
        "handoffs": [asdict(each) for each in handoffs.handoffs],
        "network": network,
        "machine": asdict(machine),
        "plan": plan.shown(),
    }


def measure_ttfts(hosts: TwoHosts, say: Say) -> Ttfts:
    """Time the ways in turns, after a round that does not count."""
    found = Ttfts()
    plan, alone, here = hosts.plan, hosts.alone, hosts.here
    shared = [hosts.prompts.next() for _ in range(plan.prompts + 1)]
    answers = []
    for number, prompt in enumerate(shared):
        answers.append(hosts.compute(prompt))
        say(f"prompt {number + 1} of {len(shared)} computed by the other host")

    def cold() -> float:
        return alone.ask(here.engine, hosts.prompts.next(), plan.answer_tokens).ttft_s

    for number, prompt in enumerate(shared):
        here.forget()
        seconds = {"cold": cold()} if number % 2 else {}
        for way in ("remote", "local"):
            here.engine.forget_prefixes()
            reply = alone.ask(here.engine, prompt, plan.answer_tokens)
            seconds[way] = reply.ttft_s
            found.different += reply.tokens != answers[number]
            _check_came(hosts, way)
        if "cold" not in seconds:
            seconds["cold"] = cold()
        if number:
            for way, each in seconds.items():
                found.seconds[way].append(each)
        say(f"round {number}: " + ", ".join(f"{way} {seconds[way]:.3f} s" for way in WAYS))
    return found


def _check_came(hosts: TwoHosts, way: str) -> None:
    """See that a prompt came the way that is timed. Raises Unavailable."""
    outcome, least = hosts.here.outcome(), hosts.plan.loadable_blocks
    came = outcome.peer_blocks if way == "remote" else outcome.hit_blocks - outcome.peer_blocks
    if came < least:
        raise Unavailable(
            f"{way}: {came} of {least} blocks came that way; what ended the hit: {outcome.ending}"
        )


def spread(values: Sequence[float]) -> Mapping[str, float]:
    """Return the median of times, and the ends."""
    return {"p50": median(values), "min": min(values), "max": max(values)}
