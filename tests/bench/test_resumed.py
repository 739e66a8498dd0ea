"""`kvstore bench transformers` on a small model and a real daemon that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from kvstore_bench.resumed import ResumePlan, run
from tests.vllm.tiny_models import make_llama


def test_a_round_compares_all_ways_to_a_first_token(tmp_path: Path) -> None:
    plan = ResumePlan(prompt_tokens=200, rounds=1, dram_bytes=64 << 20, file_bytes=512 << 20)
    said: list[str] = []
    result = run(make_llama().eval(), plan, tmp_path, said.append)
    assert said == ["round 1 of 1"]
    assert {name: len(values) for name, values in result["seconds"].items()} == {
        "cold": 1,
        "saving": 1,
        "dram": 1,
        "file": 1,
    }
    assert result["ttft_dram_vs_cold"] == result["ttft_dram_s"] / result["ttft_cold_s"]
    assert list(tmp_path.iterdir()) == []
