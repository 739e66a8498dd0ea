"""The tests in `inside/`, with SGLang's own classes: each file in a process of its own.

What SGLang needs would be found by the other engines of this process as well, and change them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.testing.sglang import sglang_environment
from tests.connectors.sglang.conftest import INSIDE

ROOT = Path(__file__).parents[3]
LONG = "test_tree.py"
NAMES = sorted(path.name for path in Path(__file__).with_name("inside").glob("test_*.py"))
assert LONG in NAMES
FILES = [pytest.param(name, marks=[pytest.mark.long] if name == LONG else []) for name in NAMES]


def run_inside(site: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests in a process that has SGLang."""
    return subprocess.run(
        [
            sys.executable,
            *("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "-q", "-rs"),
            f"tests/connectors/sglang/inside/{name}",
        ],
        cwd=ROOT,
        env={**sglang_environment(site), INSIDE: "1", "PYTEST_ADDOPTS": "-W default"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )


@pytest.mark.parametrize("name", FILES)
def test_inside_sglang(site: Path, name: str) -> None:
    done = run_inside(site, name)
    said = done.stdout[-6000:] + done.stderr[-2000:]
    if done.returncode == 0 and " passed" not in done.stdout:
        pytest.skip(said[-300:])
    assert done.returncode == 0, said
