"""When `make policies` fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.replay import policies
from tests.replay.policies import below, main, summary


def row(trace: str, share: float, less: float) -> dict[str, Any]:
    return {"trace": trace, "share": share, "hz_minus_lru": less}


def test_what_hits_less_than_lru_by_more_than_a_thousandth_is_named() -> None:
    fine = [row("chat", 0.01, -0.001), row("new", 0.1, 0.1)]
    assert below(fine) == []
    found = summary([*fine, row("day-night", 0.05, -0.0011)])
    assert found["below"] == ["day-night at 0.05: -0.00110"]
    assert found["worst"] == row("day-night", 0.05, -0.0011)


@pytest.mark.parametrize(("least", "status"), [(-1.0, 0), (1.0, 1)])
def test_the_exit_status_says_so(
    least: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "LEAST", least)
    out = tmp_path / "policy.json"
    asked = ["--kinds", "agent", "--requests", "60", "--shares", "0.2", "--json", str(out)]
    found = CliRunner().invoke(main, asked)
    assert found.exit_code == status, found.output
    assert len(json.loads(out.read_text())["below"]) == status
