"""What `kvstore bench cluster --vllm` makes of what it timed, and the network of its hosts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore_bench.cluster.faults import Asked, Found
from kvstore_bench.cluster.handoffs import Handoff, Handoffs
from kvstore_bench.cluster.network import network
from kvstore_bench.cluster.table import ENGINE_MEANINGS, print_engines
from kvstore_bench.cluster.vllm_course import Ttfts
from kvstore_bench.cluster.vllm_picture import plot_engines, rows_of
from kvstore_bench.cluster.vllm_plan import FAULTS, Prompts, VllmPlan
from tests.cli.run import kvstore

CONFIG = '{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 64}'


def found() -> Found:
    asked = [
        Asked(fault, number, 2.0 + number + place, 0, "peer_gone" if number == 0 else "")
        for place, fault in enumerate(FAULTS)
        for number in range(2)
    ]
    return Found(asked, recompute_s=[2.0, 4.0, 8.0])


def handoffs() -> Handoffs:
    times = {"sequential": (1.0, 2.0, 3.0), "concurrent": (0.5, None, 0.7)}
    return Handoffs(
        [
            Handoff(mode, 3.0, "ok", 2.0, handoff_s, computed_blocks=1 if handoff_s else 63)
            for mode, each in times.items()
            for handoff_s in each
        ]
    )


def test_the_worst_of_all_is_beside_the_median_of_computing() -> None:
    last = [*FAULTS][-1]
    assert found().worst == (2.0 + 1 + len(FAULTS) - 1) / 4.0
    shown = found().shown()
    assert shown["cases"][last]["worst_ttft_vs_recompute"] == found().worst
    assert shown["cases"]["dead"]["ttft_vs_recompute"] == 2.5 / 4.0
    assert shown["worst_recompute_vs_recompute"] == 2.0


def test_a_handoff_that_did_not_happen_counts_as_computed() -> None:
    assert handoffs().ratio == pytest.approx(0.6 / 2.0)
    assert handoffs().computed_blocks == 63
    assert Handoffs().ratio is None


def test_a_result_is_shown_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    ttfts = Ttfts({"cold": [2.0, 4.0], "remote": [0.2, 0.4], "local": [0.1]})
    assert ttfts.ratio("remote", "cold") == pytest.approx(0.1)
    result = {
        **dict.fromkeys(ENGINE_MEANINGS, 0.5),
        "ttft_s": ttfts.seconds,
        "faults": found().shown(),
        "handoffs": [
            {"mode": each.mode, "handoff_s": each.handoff_s} for each in handoffs().handoffs
        ],
        "plan": {"prompt_tokens": 2000},
    }
    print_engines(result)
    said = capsys.readouterr().out
    assert all(name in said for name in ENGINE_MEANINGS)
    assert "peer_gone" in said
    assert len(rows_of(result)) == 3 + len(FAULTS) + 1 + 2
    plot_engines(result, tmp_path / "cluster.png")
    assert (tmp_path / "cluster.png").stat().st_size > 10_000


def test_prompts_have_no_common_beginning(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    prompts = Prompts(VllmPlan(tmp_path, prompt_tokens=100))
    one, other = prompts.next(), prompts.next()
    assert len(one) == 100
    assert one[:8] != other[:8]
    assert 4 <= min(one) <= max(one) < 64
    (tmp_path / "config.json").write_text(CONFIG.replace("vocab_size", "x"))
    with pytest.raises(InvalidRequest, match="vocab_size"):
        Prompts(VllmPlan(tmp_path))


def test_hosts_reach_each_other_and_only_as_fast_as_they_may() -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with network(2) as net:
        one, other = net.hosts
        assert one.address != other.address
        if os.geteuid() == 0 and not net.why_not:
            assert os.readlink("/proc/thread-self/ns/net") != before
            ip = subprocess.run(
                [*one.enter, "ip", "-o", "addr"], capture_output=True, text=True, check=True
            )
            assert one.address in ip.stdout
            assert other.address not in ip.stdout
            for _ in range(2):  # again, too
                other.limit(200_000_000)
            tc = subprocess.run(
                [*other.enter, "tc", "qdisc"], capture_output=True, text=True, check=True
            )
            assert "200Mbit" in tc.stdout
            other.limit(0)
    assert os.readlink("/proc/thread-self/ns/net") == before


def test_a_model_is_needed_for_engines() -> None:
    pytest.importorskip("vllm")
    ran = kvstore("bench", "cluster", "--vllm", "--json")
    assert ran.exit_code == 2
    assert "--model" in ran.output
    assert kvstore("bench", "cluster", "--plot", "x.png").exit_code == 2
