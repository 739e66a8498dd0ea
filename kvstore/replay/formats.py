"""Trace files, told apart by the fields of their first line, read into rows.

| format | fields | time | blocks |
|---|---|---|---|
| mooncake | timestamp, input_length, output_length, hash_ids (session_id) | ms | 512 tokens |
| bailian | the same and chat_id, parent_chat_id | s | 16 tokens |
| weka | id, block_size, requests[t, in, out, hash_ids, type] | s in a session | in file |
| agent (LMCache) | timestamp, input, output, session_id | us | texts instead |
| conversations (vLLM) | a JSON list: id, messages[role, content] | none | texts instead |
| kvstore | at_s, block_tokens, block_nbytes, hash_ids, engine, hit_blocks | s | in file |
| azure (CSV) | TIMESTAMP, ContextTokens, GeneratedTokens | date | none |
| burstgpt (CSV) | Timestamp, Request tokens, Response tokens (Session ID) | s | none |

Any of them may be compressed (.gz). Formats: the READMEs of kvcache-ai/Mooncake,
alibaba-edu/qwen-bailian-usagetraces-anon, callanjfox/kv-cache-tester, LMCache/lmcache-agent-trace,
Azure/AzurePublicDataset, HPMLL/BurstGPT, and benchmarks/multi_turn of vllm-project/vllm.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec

from kvstore.model.errors import InvalidRequest
from kvstore.replay.rows import (
    BLOCK_TOKENS,
    CSV_FORMATS,
    JSON_FIELDS,
    Parse,
    Row,
    conversation,
    json_item,
    json_parse,
    number_of,
    recorded_block,
    weka_block,
)

TRACE_NBYTES_MAX = 8 << 30


@dataclass(frozen=True, slots=True)
class Trace:
    """All rows of a file. common_clock: sessions tell the time from the same zero."""

    name: str
    rows: tuple[Row, ...]
    block_tokens: int
    common_clock: bool = True


def read(path: Path) -> Trace:
    """Read a trace. Raises InvalidRequest that names file, line and what is wrong."""
    file = TraceFile(path)
    rows = tuple(file)
    return Trace(file.name, rows, file.block_tokens, file.common_clock)


class TraceFile:
    """A trace, read line by line as it is iterated over.

    format: one of FORMATS, None finds out. lenient: a broken line is skipped and counted instead
    of raised. Everything that reads raises InvalidRequest that names file, line and what is wrong.
    block_tokens: 0 where the rows have texts, or nothing but lengths. block_nbytes: of a block's
    KV, where the trace tells, else 0.
    """

    def __init__(self, path: Path, *, format: str | None = None, lenient: bool = False) -> None:
        self.path = path
        self.skipped = 0
        self.first_skipped = ""
        self._lenient = lenient
        with self._reading() as lines:
            number, first = _first(lines)
            self.name = format or _format_of(number, first)
        self.common_clock = self.name not in ("weka", "conversations")
        self.block_tokens = BLOCK_TOKENS.get(self.name, 0)
        self.block_nbytes = 0
        with self._named():
            if self.name == "weka":
                self.block_tokens = weka_block(number, json_item(number, first))
            elif self.name == "kvstore":
                found = json_item(number, first)
                self.block_tokens = recorded_block(number, found)
                self.block_nbytes = int(number_of(number, found, "block_nbytes", 0))

    def __iter__(self) -> Iterator[Row]:
        rows = 0
        with self._reading() as lines:
            for row in self._rows(lines):
                rows += 1
                yield row
            if not rows:
                broken = f"; line {self.first_skipped}" if self.skipped else ""
                raise InvalidRequest(f"the trace has no request{broken}")

    def skip(self, error: InvalidRequest) -> None:
        """Count a line that is broken, or raise if that is not allowed."""
        if not self._lenient:
            raise error
        self.first_skipped = self.first_skipped or str(error).removeprefix("line ")
        self.skipped += 1

    def _rows(self, lines: Iterator[tuple[int, str]]) -> Iterator[Row]:
        if self.name == "conversations":
            items: Iterator[tuple[int, Any]] = _listed("".join(line for _, line in lines))
            parse: Parse = conversation
        elif self.name in CSV_FORMATS:
            items = _table(lines, self.name)
            parse = CSV_FORMATS[self.name][1]
        else:
            items = lines
            parse = json_parse(self.name)
        for number, item in items:
            try:
                rows = parse(number, item)
            except InvalidRequest as error:
                self.skip(error)
                continue
            yield from rows

    @contextmanager
    def _reading(self) -> Iterator[Iterator[tuple[int, str]]]:
        """Open the file for reading numbered lines, blank ones left out."""
        with self._named():
            try:
                with self.path.open("rb") as file:
                    packed = file.read(2) == b"\x1f\x8b"
                    file.seek(0)
                    raw = gzip.GzipFile(fileobj=file) if packed else file
                    # Not splitlines(), which also splits at line separators inside JSON strings.
                    with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="\n") as stream:
                        yield _lines(stream)
            except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
                raise InvalidRequest(f"cannot be read: {error}") from error

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.path}: {error}") from error


def _lines(stream: TextIO) -> Iterator[tuple[int, str]]:
    left = TRACE_NBYTES_MAX
    number = 0
    while line := stream.readline(left + 1):
        left -= len(line)
        number += 1
        if left < 0:
            raise InvalidRequest(f"a trace of more than {TRACE_NBYTES_MAX:,} bytes")
        if line.strip():
            yield number, line


def _first(lines: Iterator[tuple[int, str]]) -> tuple[int, str]:
    first = next(lines, None)
    if first is None:
        raise InvalidRequest("the trace is empty")
    return first


def _format_of(number: int, first: str) -> str:
    """Tell the format by the first line."""
    start = first.lstrip()
    if start.startswith("["):
        return "conversations"
    if not start.startswith("{"):
        header = set(next(csv.reader([first.strip()])))
        for name, (needed, _) in CSV_FORMATS.items():
            if needed <= header:
                return name
        raise InvalidRequest(f"unknown format: neither JSON nor a known CSV: {first.strip()[:80]}")
    found = json_item(number, first)
    for name, needed in JSON_FIELDS.items():
        if needed <= found.keys():
            return name
    known = "; ".join(
        f"{name} ({', '.join(sorted(needed))})" for name, needed in JSON_FIELDS.items()
    )
    raise InvalidRequest(
        f"unknown format: line {number} has {', '.join(sorted(found)) or 'no fields'}. Known"
        f" formats and the fields they are told by: {known}; CSV of Azure or BurstGPT; JSON of"
        " vLLM's multi_turn"
    )


def _listed(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the items of a JSON list, numbered from 1 in place of lines."""
    try:
        items = msgspec.json.decode(text, type=list[Any])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"not a JSON list: {error}") from error
    yield from enumerate(items, 1)


def _table(lines: Iterator[tuple[int, str]], name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    table = csv.DictReader(line for _, line in lines)
    lacking = CSV_FORMATS[name][0] - set(table.fieldnames or ())
    if lacking:
        raise InvalidRequest(f"line 1 has no {', '.join(sorted(lacking))}: not {name}")
    for item in table:
        yield table.line_num, item
