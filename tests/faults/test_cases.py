"""Cases of `make faults`, with fewer rounds: all of one daemon, and some of fleets."""

from __future__ import annotations

import ast

import pytest
from click.testing import CliRunner

from tests.faults.clocks import _reads
from tests.faults.run import CASES, OF_ONE_DAEMON, main, run_case

OF_FLEETS_HERE = ("lying_peers", "delete_races_fetch")  # tests/cluster has others of their kind


@pytest.mark.fault
@pytest.mark.parametrize("name", [*OF_ONE_DAEMON, *OF_FLEETS_HERE])
def test_nothing_goes_wrong_hangs_dies_or_leaks(name: str) -> None:
    result = run_case(name, quick=True)
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["ok"], result


def test_a_use_of_the_wall_clock_is_found() -> None:
    for text in ("import time\ntime.time()", "import datetime\ndatetime.datetime.now()"):
        assert _reads(ast.parse(text)) == [2]
    assert _reads(ast.parse("from time import time")) == [1]
    assert _reads(ast.parse("import time\ntime.monotonic()")) == []


def test_the_command_needs_no_options() -> None:
    listed = CliRunner().invoke(main, ["--list"])
    assert listed.exit_code == 0, listed.output
    assert [line.partition(":")[0] for line in listed.output.splitlines()] == list(CASES)
