"""When `make policies` fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.replay.mixes import MIXES
from kvstore.replay.synth import KINDS
from tests.replay import policies
from tests.replay.policies import KNOWN_BELOW, main, summary, unexplained


def row(trace: str, share: float, less: float) -> dict[str, Any]:
    return {"trace": trace, "share": share, "hz_minus_lru": less}


def test_a_trace_below_lru_is_unexplained_unless_it_is_known() -> None:
    fine = [row("chat", 0.01, -0.001), row("day-night", 0.05, -0.0026), row("new", 0.1, 0.1)]
    assert unexplained(fine) == []
    assert summary(fine)["below"] == 1
    assert unexplained([row("day-night", 0.05, -0.02)]) == ["day-night at 0.05: -0.02000"]
    assert unexplained([row("day-night", 0.2, -0.0026)])
    assert summary([*fine, row("new", 0.2, -0.0011)])["unexplained"] == ["new at 0.2: -0.00110"]


def test_what_is_known_is_of_traces_that_are_made_and_has_a_reason() -> None:
    for (trace, _), (floor, reason) in KNOWN_BELOW.items():
        assert trace in KINDS or trace in MIXES
        assert floor < policies.LEAST
        assert reason


@pytest.mark.parametrize(("least", "status"), [(-1.0, 0), (1.0, 1)])
def test_the_exit_status_says_so(
    least: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "LEAST", least)
    out = tmp_path / "policy.json"
    asked = ["--kinds", "agent", "--requests", "60", "--shares", "0.2", "--json", str(out)]
    found = CliRunner().invoke(main, asked)
    assert found.exit_code == status, found.output
    assert len(json.loads(out.read_text())["unexplained"]) == status
