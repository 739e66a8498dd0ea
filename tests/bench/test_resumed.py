"""`kvstore bench transformers` on a small model and a real daemon that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers")

from kvstore.cli import main
from kvstore_bench.transformers.resumed import ResumePlan, asks, run
from tests.connectors.vllm.tiny_models import make_llama


def test_a_round_compares_all_ways_to_a_first_token(tmp_path: Path) -> None:
    plan = ResumePlan(prompt_tokens=200, rounds=1, dram_bytes=64 << 20, file_bytes=512 << 20)
    said: list[str] = []
    result = run(make_llama().eval(), plan, tmp_path, said.append)
    assert len(said) == asks(plan)
    assert [text.partition(":")[0] for text in said[-2:]] == [
        "round 1 of 1, kvstore, from DRAM",
        "round 1 of 1, kvstore, from files after SIGKILL",
    ]
    assert {name: len(values) for name, values in result["seconds"].items()} == {
        "cold": 1,
        "saving": 1,
        "dram": 1,
        "file": 1,
    }
    assert result["ttft_dram_vs_cold"] == result["ttft_dram_s"] / result["ttft_cold_s"]
    assert list(tmp_path.iterdir()) == []


def test_the_command_draws_what_it_measured(tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path / "model")
    picture = tmp_path / "resumed.png"
    ran = CliRunner().invoke(
        main,
        [
            *("bench", "transformers", "--model", str(tmp_path / "model"), "--tokens", "200"),
            *("--rounds", "1", "--path", str(tmp_path), "--plot", str(picture)),
        ],
    )
    assert ran.exit_code == 0, ran.output
    assert "round 1 of 1, kvstore, from DRAM: " in ran.stderr
    assert "ttft_dram_vs_cold" in ran.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_place_for_the_picture_is_looked_for_before_the_run(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["bench", "transformers", "--plot", str(tmp_path / "no/a.png")])
    assert ran.exit_code == 2
    assert "there is no directory" in ran.stderr
    assert "round" not in ran.stderr
