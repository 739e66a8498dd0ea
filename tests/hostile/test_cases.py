"""Every case of `make hostile`, with fewer rounds."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from tests.hostile.probing import auc
from tests.hostile.run import CASES, main, run_case


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_written_or_broken(name: str) -> None:
    result = run_case(name, quick=True)
    assert result["ok"], result


def test_the_command_lists_its_cases() -> None:
    listed = CliRunner().invoke(main, ["--list"])
    assert [line.partition(":")[0] for line in listed.output.splitlines()] == list(CASES)


def test_an_area_under_the_curve() -> None:
    assert auc([3.0, 4.0], [1.0, 2.0]) == 1.0
    assert auc([1.0, 2.0], [3.0, 4.0]) == 0.0
    assert auc([1.0, 1.0], [1.0, 1.0]) == 0.5
    assert auc([1.0, 3.0], [2.0, 2.0]) == 0.5
    assert auc([2.0, 3.0], [1.0, 2.5]) == 0.75
