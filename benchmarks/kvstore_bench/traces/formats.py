"""Trace files, told apart by the fields of their first line, read into rows.

| format | fields | time | blocks |
|---|---|---|---|
| mooncake | timestamp, input_length, output_length, hash_ids (session_id) | ms | 512 tokens |
| bailian | the same and chat_id, parent_chat_id | s | 16 tokens |
| weka | id, block_size, requests[t, in, out, hash_ids, type] | s in a session | in file |
| agent (LMCache) | timestamp, input, output, session_id | us | texts instead |
| azure (CSV) | TIMESTAMP, ContextTokens, GeneratedTokens | date | none |
| burstgpt (CSV) | Timestamp, Request tokens, Response tokens (Session ID) | s | none |

Any of them may be compressed (.gz). Formats: the READMEs of kvcache-ai/Mooncake,
alibaba-edu/qwen-bailian-usagetraces-anon, callanjfox/kv-cache-tester, LMCache/lmcache-agent-trace,
Azure/AzurePublicDataset and HPMLL/BurstGPT.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from kvstore.errors import InvalidRequest

TRACE_NBYTES_MAX = 8 << 30
TOKENS_MAX = 10_000_000
MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
WEKA_BLOCK_TOKENS_MAX = 8192


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded request.

    at_s: arrival, from an arbitrary zero. session: rows of one session are asked one after the
    other; None stands alone. blocks: ids of the prompt's blocks; equal ids in an equal scope have
    equal content. text: the prompt itself, where the trace has it.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    session: str | None = None
    blocks: Sequence[int | str] = ()
    scope: str = ""
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """All rows of a file. common_clock: sessions tell the time from the same zero."""

    name: str
    rows: tuple[Row, ...]
    block_tokens: int
    common_clock: bool = True


def read(path: Path) -> Trace:
    """Read a trace. Raises InvalidRequest that names file, line and what is wrong."""
    try:
        lines = _lines(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: cannot be read: {error}") from error
    if not lines:
        raise InvalidRequest(f"{path}: the trace is empty")
    try:
        return _parse(lines)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from error


def _lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else path.open("rb") as stream:
        data = stream.read(TRACE_NBYTES_MAX + 1)
    if len(data) > TRACE_NBYTES_MAX:
        raise InvalidRequest(f"{path}: a trace of more than {TRACE_NBYTES_MAX:,} bytes")
    # Not splitlines(), which also splits at line separators inside of JSON strings.
    return [line for line in data.decode("utf-8-sig").split("\n") if line.strip()]


def _parse(lines: list[str]) -> Trace:
    if not lines[0].lstrip().startswith("{"):
        return _parse_csv(lines)
    first = _json(1, lines[0])
    found = next((name for name in _JSON_FORMATS if _JSON_FORMATS[name][0] <= first.keys()), None)
    if found is None:
        known = "; ".join(
            f"{name} ({', '.join(sorted(needed))})"
            for name, (needed, _, _) in _JSON_FORMATS.items()
        )
        raise InvalidRequest(
            f"unknown format: line 1 has {', '.join(sorted(first)) or 'no fields'}. Known formats"
            f" and the fields they are told by: {known}; CSV of Azure or BurstGPT; JSON of vLLM's"
            " multi_turn"
        )
    _, block_tokens, convert = _JSON_FORMATS[found]
    items = ((number, _json(number, line)) for number, line in enumerate(lines, 1))
    rows = tuple(_sessions_of(items) if found == "bailian" else _rows(items, convert))
    if not rows:
        raise InvalidRequest("the trace has no request")
    local = found == "weka"
    return Trace(found, rows, _weka_block(first) if local else block_tokens, not local)


def _weka_block(first: dict[str, Any]) -> int:
    tokens = _whole(1, first, "block_size")
    if not 1 <= tokens <= WEKA_BLOCK_TOKENS_MAX:
        raise InvalidRequest(f'line 1: "block_size" must be 1 to {WEKA_BLOCK_TOKENS_MAX}')
    return tokens


def _rows(
    items: Iterable[tuple[int, dict[str, Any]]],
    convert: Callable[[int, dict[str, Any]], Iterator[Row]],
) -> Iterator[Row]:
    for number, item in items:
        yield from convert(number, item)


def _mooncake(number: int, item: dict[str, Any]) -> Iterator[Row]:
    session = item.get("session_id")
    yield Row(
        _number(number, item, "timestamp") / 1e3,
        _whole(number, item, "input_length"),
        _whole(number, item, "output_length"),
        None if session is None else str(session),
        _ids(number, item),
    )


def _sessions_of(items: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[Row]:
    """Read Bailian's rows: a chat belongs to the session of the chat it goes on from."""
    session_of: dict[Any, str] = {}
    for number, item in items:
        chat = item.get("chat_id", number)
        session_of[chat] = session_of.get(item.get("parent_chat_id", -1), str(chat))
        yield Row(
            _number(number, item, "timestamp"),
            _whole(number, item, "input_length"),
            _whole(number, item, "output_length"),
            session_of[chat],
            _ids(number, item),
        )


def _weka(number: int, item: dict[str, Any], start_s: float = 0.0) -> Iterator[Row]:
    """Flatten a session; sub-agents take their turn in it at the time they were spawned."""
    name = str(item.get("id"))
    requests = item["requests"]
    if not isinstance(requests, list) or not all(isinstance(one, dict) for one in requests):
        raise InvalidRequest(f'line {number}: "requests" must be a list of objects')
    found: list[Row] = []
    for request in requests:
        at_s = start_s + _number(number, request, "t")
        if request.get("type") == "subagent":
            if start_s:
                raise InvalidRequest(f"line {number}: a sub-agent inside a sub-agent")
            found += _weka(number, {"id": name, "requests": request.get("requests", [])}, at_s)
            continue
        inputs, outputs = (_whole(number, request, field) for field in ("in", "out"))
        # Ids mean something inside one session only.
        found.append(Row(at_s, inputs, outputs, name, _ids(number, request), scope=name))
    yield from sorted(found, key=lambda row: row.at_s)


def _agent(number: int, item: dict[str, Any]) -> Iterator[Row]:
    if not isinstance(item["input"], str) or not isinstance(item["output"], str):
        raise InvalidRequest(f'line {number}: "input" and "output" must be strings')
    # The trace has no token counts: words are what can be said without the model's tokenizer.
    inputs, outputs = (max(1, len(item[name].split())) for name in ("input", "output"))
    at_s = _number(number, item, "timestamp") / 1e6
    yield Row(at_s, inputs, outputs, str(item["session_id"]), text=item["input"])


_JSON_FORMATS: Mapping[str, tuple[set[str], int, Callable[[int, dict[str, Any]], Iterator[Row]]]]
_JSON_FORMATS = {
    "bailian": ({"chat_id", "timestamp", "input_length"}, BAILIAN_BLOCK_TOKENS, _mooncake),
    "mooncake": ({"timestamp", "input_length", "output_length"}, MOONCAKE_BLOCK_TOKENS, _mooncake),
    "weka": ({"id", "block_size", "requests"}, 0, _weka),
    "agent": ({"timestamp", "input", "output", "session_id"}, 0, _agent),
}


def _parse_csv(lines: list[str]) -> Trace:
    table = csv.DictReader(lines)
    header = set(table.fieldnames or ())
    rows: Iterator[Row]
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= header:
        name, rows = "azure", (_azure(number, item) for number, item in enumerate(table, 2))
    elif {"Timestamp", "Request tokens", "Response tokens"} <= header:
        name, rows = "burstgpt", (_burstgpt(number, item) for number, item in enumerate(table, 2))
    else:
        raise InvalidRequest(f"unknown format: neither JSON nor a known CSV: {lines[0][:80]}")
    # A failed request of BurstGPT has no answer.
    kept = tuple(row for row in rows if row.output_tokens > 0)
    if not kept:
        raise InvalidRequest("the trace has no request")
    return Trace(name, kept, 0)


def _azure(number: int, item: Mapping[str, Any]) -> Row:
    try:
        # fromisoformat takes six digits of a second; the trace has seven.
        at_s = datetime.fromisoformat(str(item["TIMESTAMP"])[:26]).timestamp()
    except ValueError as error:
        raise InvalidRequest(f"line {number}: TIMESTAMP: {error}") from error
    inputs, outputs = (_whole(number, item, name) for name in ("ContextTokens", "GeneratedTokens"))
    return Row(at_s, inputs, outputs)


def _burstgpt(number: int, item: Mapping[str, Any]) -> Row:
    at_s = _number(number, item, "Timestamp")
    names = ("Request tokens", "Response tokens")
    inputs, outputs = (_whole(number, item, name) for name in names)
    return Row(at_s, inputs, outputs, item.get("Session ID") or None)


def _json(number: int, line: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"line {number} is no JSON object: {error}") from error


def _number(number: int, item: Mapping[str, Any], name: str) -> float:
    try:
        value = float(item[name])
    except (KeyError, TypeError, ValueError):
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidRequest(f'line {number}: "{name}" must be a number from 0')
    return value


def _whole(number: int, item: Mapping[str, Any], name: str) -> int:
    value = _number(number, item, name)
    if value != int(value) or value > TOKENS_MAX:
        raise InvalidRequest(f'line {number}: "{name}" must be a whole number up to {TOKENS_MAX:,}')
    return int(value)


def _ids(number: int, item: Mapping[str, Any]) -> Sequence[int | str]:
    ids = item.get("hash_ids", [])
    try:
        return array("q", ids)  # a long trace has tens of millions
    except (TypeError, OverflowError):
        if not isinstance(ids, list) or not all(isinstance(one, int | str) for one in ids):
            raise InvalidRequest(f'line {number}: "hash_ids" must be a list of ids') from None
        return tuple(ids)
