"""Paths that documents name exist, and the policy of the first afternoon runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.replay import traces

ROOT = Path(__file__).parents[2]
AFTERNOON = ROOT / "docs/first-afternoon.md"
DOCUMENTS = [
    *(
        ROOT / name
        for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "tests/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))
FOLDERS = "kvstore|tests|connectors|kernels|benchmarks|proto|deploy|dashboards|docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_that_a_document_names_exist(document: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*\w)/?`", document.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.name)
def test_modules_that_a_message_names_exist(proto: Path) -> None:
    comments = re.findall(r"//(.*)", proto.read_text())
    named = [name for each in comments for name in re.findall(r"[\w/]+\.py\b", each)]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_policy_of_the_first_afternoon_runs_by_its_entry_point(tmp_path: Path) -> None:
    text = AFTERNOON.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (points,) = re.findall(r'\[project.entry-points."(.*?)\n\n', text, re.DOTALL)
    group, _, line = points.partition('"]\n')
    (tmp_path / "fifo.py").write_text(code)
    about = tmp_path / "kvstore_fifo-1.dist-info"  # what an installation writes
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstore-fifo\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}\n")
    trace = traces.write(tmp_path / "trace.jsonl", traces.chat(20, 5))
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "replay", str(trace), "--compare", "lru,fifo"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ .*\bfifo\b", done.stdout, re.MULTILINE)


def test_brackets_are_no_references() -> None:
    """`[T][D]` outside of code is a link to "D", which a strict build of the site refuses."""
    found = [
        f"{path.name}: {match}"
        for path in sorted((ROOT / "docs").rglob("*.md"))
        for match in re.findall(
            r"\[[^][]*\]\[[^][]*\]",
            re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL),
        )
    ]
    assert found == []
