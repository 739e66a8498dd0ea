"""Small traces, written by the tests that read them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write(path: Path, items: Iterable[Any]) -> Path:
    """Write one JSON item a line, compressed if the name says so."""
    text = "".join(json.dumps(item) + "\n" for item in items).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def mooncake(at_s: float, blocks: list[int], *, rest: int = 0, **more: Any) -> dict[str, Any]:
    """Return a row whose prompt is these blocks and `rest` tokens of another."""
    partial = [10**6] if rest else []
    return {
        "timestamp": int(1000 * at_s),
        "input_length": 512 * len(blocks) + rest,
        "output_length": 10,
        "hash_ids": blocks + partial,
        **more,
    }


def chat(sessions: int, turns: int, *, gap_s: float = 30.0) -> list[dict[str, Any]]:
    """Return sessions of `turns` turns that start one after the other and share block 0; each
    turn adds two blocks."""
    rows = []
    for session in range(sessions):
        path = [0]
        for turn in range(turns):
            first = 1 + 2 * (session * turns + turn)
            path = [*path, first, first + 1]
            rows.append(mooncake(10 * session + gap_s * turn, path))
    return sorted(rows, key=lambda row: row["timestamp"])
