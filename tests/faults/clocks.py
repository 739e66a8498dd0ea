"""Finds where the wall clock is read. Deadlines, leases and backoffs must not see it jump."""

from __future__ import annotations

import ast
from pathlib import Path

WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "clock_gettime"),
    ("time", "localtime"),
    ("time", "gmtime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}
PACKAGES = (
    "kvstore",
    "connectors/kvstore_llamacpp",
    "connectors/kvstore_vllm",
    "kernels/kvstore_kernels",
)
# They stamp what they print and record, and decide nothing by it.
STAMPS = (
    "kvstore/cli",
    "kvstore/sealing/keyring.py",
    "kvstore/server/audit.py",
    "kvstore/server/monitor.py",
    "kvstore/server/recorder.py",
    "kvstore/store/history.py",
    "kvstore/system/logs.py",
    "kvstore/web",
)
# A token expires at a time of day. A clock that jumps lets it expire sooner or later.
EXPIRIES = ("kvstore/server/credentials.py",)
# They ask how old files are, whose times are of that clock. A wrong answer costs hits.
FILE_TIMES = (
    "kvstore/system/file_digests.py",
    "kvstore/system/fingerprints.py",
    "connectors/kvstore_vllm/adapters.py",
)
# Values of a pool say when they were put. Only what a pool brings back, after it has confirmed that
# it was removed, is judged by that.
PUT_TIMES = ("kvstore/move/pool_graves.py",)
# Sequence numbers of KV events begin at the time of day, or after the last one that was noted: they
# never go back. Batches carry a stamp.
NUMBERS = ("kvstore/events/numbers.py", "kvstore/events/publisher.py")
ALLOWED = (*STAMPS, *EXPIRIES, *FILE_TIMES, *PUT_TIMES, *NUMBERS)


def wall_clock_reads(root: Path) -> list[str]:
    """Return "file:line" of every use of the wall clock in what runs beside an engine."""
    found = []
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            if any(file.is_relative_to(root / each) for each in ALLOWED):
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found += [f"{file.relative_to(root)}:{line}" for line in _reads(tree)]
    return found


def _reads(tree: ast.AST) -> list[int]:
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in WALL_CLOCKS:
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module, alias.name) for alias in node.names}
            lines += [node.lineno] * bool(names & WALL_CLOCKS)
    return lines
