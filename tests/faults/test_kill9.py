"""A few rounds of `kill9.py`; the script itself runs as many as one likes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill9.py")


@pytest.mark.fault
def test_kill_9_in_a_put_loop_loses_nothing_acknowledged_as_durable(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "5", "--json", str(file)],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["rounds"] == 5
    assert result["acknowledged"] > 0
    assert (result["lost"], result["wrong"]) == (0, 0)
