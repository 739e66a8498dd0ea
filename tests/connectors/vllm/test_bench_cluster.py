"""`kvstore bench cluster --vllm` with tiny engines: prefill here, decode there, and a host that
dies. A tiny model computes sooner than anything loads, so no time says anything here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_bench.cluster.faults import Faults
from kvstore_bench.cluster.handoffs import measure_handoffs
from kvstore_bench.cluster.two_hosts import two_hosts
from kvstore_bench.cluster.vllm_plan import VllmPlan

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(300)]


def test_real_engines_answer_the_same_whatever_happens(models: Path, tmp_path: Path) -> None:
    plan = VllmPlan(models / "llama", prompt_tokens=500, pd_prompts=1, warm_ups=0)
    said: list[str] = []
    with two_hosts(plan, tmp_path) as hosts:
        handed = measure_handoffs(hosts, said.append)
        assert {each.mode for each in handed.handoffs} == {"sequential", "concurrent"}
        assert all(1 <= each.computed_blocks <= 16 for each in handed.handoffs)
        assert handed.different == 0

        prompt = hosts.prompts.next()
        answer = hosts.compute(prompt)
        assert hosts.there.hit_blocks(prompt) == plan.loadable_blocks
        assert hosts.here.hit_blocks(prompt) == 0
        hosts.there.flush()
        for fault in ("dead", "stopped"):
            with Faults(hosts).lasts(fault):
                hosts.here.forget()
                reply = hosts.alone.ask(hosts.here.engine, prompt, plan.answer_tokens)
                assert reply.tokens == answer
                assert hosts.here.outcome().peer_blocks == 0
        hosts.meet()
        assert hosts.there.hit_blocks(prompt) == plan.loadable_blocks  # it was in its files
    assert len(said) == 2
