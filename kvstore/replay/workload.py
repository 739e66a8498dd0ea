"""Rows of a trace -> requests for blocks that are numbered from 0, in the order they arrive.

Only full blocks are counted and cached, as engines do. The same id in the same scope is the same
block after the same prefix. An id that comes after two different ones is an error: it names a
content instead of a prefix, or another session uses it again, and would make hits that no cache
could give.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvstore.model.block import KEY_NBYTES, BlockKey
from kvstore.model.errors import InvalidRequest
from kvstore.replay.formats import TraceFile
from kvstore.replay.rows import Row

TEXT_BLOCK_TOKENS = 64
CHARS_PER_TOKEN = 4  # of texts: nobody knows their tokenizer
WINDOW_HOURS = 24.0
THINK_S = 30.0  # between two turns of a conversation that has no times
IDLE_MAX_S = 30 * 86400.0  # a longer pause is a wrong unit
IN_ORDER = ("mooncake", "bailian")  # of arrival, as these formats are written
BRANCHES_MAX = 2  # requests that go on from one and the same
PROGRESS_REQUESTS = 64


@dataclass(slots=True)
class Request:
    """blocks: numbers of the full blocks of the prompt. session: what the trace calls it, or a
    number for those that go on from each other. line: of the trace. model: "" if none is named.
    """

    at_s: float
    tokens: int
    blocks: array[int]
    session: str | int | None
    line: int
    model: str = ""


@dataclass(slots=True)
class Workload:
    """What a trace asks, in the order of time. keys: of each block, by its number.

    unique_blocks: how many there are in these requests. skipped: broken lines that were left out.
    block_nbytes: of a block's KV, where the trace tells, else 0. warmup: so many of the first
    requests fill the tiers and are not counted.
    """

    name: str
    format: str
    block_tokens: int
    requests: list[Request]
    keys: list[BlockKey]
    unique_blocks: int = 0
    skipped: int = 0
    first_skipped: str = ""
    block_nbytes: int = 0
    warmup: int = 0

    @property
    def counted(self) -> Sequence[Request]:
        return self.requests[self.warmup :]

    @property
    def models(self) -> set[str]:
        """The names of the models that are asked, "" among them if some requests name none."""
        return {request.model for request in self.requests}

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.counted)

    @property
    def seconds(self) -> float:
        """From the first request to the last, of those counted."""
        return self.requests[-1].at_s - self.requests[self.warmup].at_s


def load_workload(
    path: Path,
    *,
    format: str | None = None,
    lenient: bool = False,
    block_tokens: int | None = None,
    requests_max: int | None = None,
    window_hours: float | None = None,
    seed: int = 1,
    progress: Callable[[int], None] = lambda requests: None,
) -> Workload:
    """Read a trace. Raises InvalidRequest that names the file, the line and what is wrong.

    block_tokens: a multiple of the trace's own, None: that. window_hours: sessions that have no
    clock in common begin at random within so many (24 unless told); other traces are cut there.
    requests_max: so many of the first; of formats in the order of arrival, no more is read.
    progress: told how many requests were read, now and then.
    """
    file = TraceFile(path, format=format, lenient=lenient)
    try:
        blocks = _Blocks(file.block_tokens, block_tokens)
        first = requests_max if file.name in IN_ORDER else None
        requests = _read(file, blocks, first, progress)
        if file.common_clock:
            requests = _on_one_clock(requests, file, window_hours)
        else:
            _lay_over(requests, file.name, (window_hours or WINDOW_HOURS) * 3600.0, seed)
    except InvalidRequest as error:
        named = str(error).startswith(str(path))
        raise error if named else InvalidRequest(f"{path}: {error}") from error
    requests.sort(key=lambda request: request.at_s)
    requests = requests[:requests_max]
    if not requests:
        raise InvalidRequest(f"{path}: no request arrives within {window_hours} hours")
    return _workload(
        path.name,
        file.name,
        blocks,
        requests,
        skipped=file.skipped,
        first_skipped=file.first_skipped,
        block_nbytes=file.block_nbytes * blocks.joined,
    )


def workload_of(rows: Iterable[Row], *, name: str, block_tokens: int, warmup: int = 0) -> Workload:
    """Return what rows ask that follow each other in time, as from a file. Raises InvalidRequest
    for what no trace could hold."""
    blocks = _Blocks(block_tokens, None)
    requests = [
        Request(row.at_s, *blocks.numbers_of(row), row.session, row.line, row.model) for row in rows
    ]
    if not 0 <= warmup < len(requests):
        raise InvalidRequest(f"{len(requests)} requests, of which {warmup} are not counted")
    return _workload(name, "rows", blocks, requests, warmup=warmup)


def _workload(
    name: str, format: str, blocks: _Blocks, requests: list[Request], **more: Any
) -> Workload:
    _infer_sessions(requests)
    unique = set().union(*(request.blocks for request in requests))
    return Workload(
        name, format, blocks.tokens, requests, blocks.keys, unique_blocks=len(unique), **more
    )


def _read(
    file: TraceFile, blocks: _Blocks, requests_max: int | None, progress: Callable[[int], None]
) -> list[Request]:
    requests: list[Request] = []
    for row in file:
        try:
            if requests and file.name in IN_ORDER:
                _check_order(requests[-1], row)
            tokens, numbers = blocks.numbers_of(row)
        except InvalidRequest as error:
            file.skip(error)
            continue
        requests.append(Request(row.at_s, tokens, numbers, row.session, row.line, row.model))
        if len(requests) == requests_max:
            break
        if len(requests) % PROGRESS_REQUESTS == 0:
            progress(len(requests))
    return requests


def _on_one_clock(
    requests: list[Request], file: TraceFile, window_hours: float | None
) -> list[Request]:
    """Return what is within the window, by time. A jump of the clock is a wrong unit."""
    requests = sorted(requests, key=lambda request: request.at_s)
    kept: list[Request] = []
    for request in requests:
        try:
            if kept:
                _check_order(kept[-1], request)
        except InvalidRequest as error:
            file.skip(error)
            continue
        if window_hours and kept and request.at_s - kept[0].at_s >= window_hours * 3600.0:
            break
        kept.append(request)
    return kept


def _check_order(before: Request, after: Request | Row) -> None:
    """Raise InvalidRequest unless a request follows another one in time, and not by weeks."""
    gap_s = after.at_s - before.at_s
    if gap_s < 0:
        raise InvalidRequest(
            f"line {after.line} goes back in time, from {before.at_s:g} s to {after.at_s:g} s:"
            " mixed units, or not in the order of arrival"
        )
    if gap_s > IDLE_MAX_S:
        days = gap_s / 86400
        raise InvalidRequest(
            f"line {after.line} is {days:.0f} days after line {before.line}: mixed units"
        )


def _lay_over(requests: Sequence[Request], format: str, window_s: float, seed: int) -> None:
    """Give each session a start within the window; conversations pause between their turns."""
    draw = random.Random(seed)
    starts: dict[str | int | None, float] = {}
    turns: dict[str | int | None, int] = {}
    for request in requests:
        session = request.session
        if session not in starts:
            starts[session] = draw.random() * window_s
            turns[session] = 0
        if format == "conversations":
            request.at_s = turns[session] * THINK_S
        turns[session] += 1
        request.at_s += starts[session]


def _infer_sessions(requests: Sequence[Request]) -> None:
    """Number the sessions of requests that name none: a request goes on from the newest one whose
    blocks are the start of its own, unless others have: then that is a prompt that many share."""
    ends: dict[int, list[int]] = {}  # by its last block: a session, and who went on from there
    for number, request in enumerate(requests):
        if request.session is not None or not request.blocks:
            continue
        request.session = number
        for block in reversed(request.blocks):
            end = ends.get(block)
            if end is not None and end[1] < BRANCHES_MAX:
                end[1] += block != request.blocks[-1]  # the same prompt again is no branch
                request.session = end[0]
                break
        last = request.blocks[-1]
        if last not in ends or ends[last][1] < BRANCHES_MAX:
            ends[last] = [request.session, 0]


class _Blocks:
    """Numbers blocks, in the order in which they are first asked for."""

    def __init__(self, own_tokens: int, tokens: int | None) -> None:
        """own_tokens: of a block of the trace, 0 if it has texts."""
        self.tokens = tokens or own_tokens or TEXT_BLOCK_TOKENS
        self.joined = self.tokens // own_tokens if own_tokens else 1
        if own_tokens and self.tokens % own_tokens:
            raise InvalidRequest(
                f"blocks of {self.tokens} tokens cannot be made of the trace's {own_tokens}"
            )
        self.keys: list[BlockKey] = []
        self._own_tokens = own_tokens
        self._parents = array("q")
        self._lines = array("q")  # where a block was first seen
        self._scope = ""
        self._numbers: dict[int | str, int] = {}  # of the ids of the scope

    def numbers_of(self, row: Row) -> tuple[int, array[int]]:
        """Return how many tokens a prompt has, and the numbers of its full blocks."""
        if row.text is not None:
            tokens = len(row.text) // CHARS_PER_TOKEN
            return tokens, self._number(self._chunks(row.text), row)
        if not self._own_tokens or (not row.blocks and row.input_tokens):
            raise InvalidRequest(f"line {row.line} has lengths only: there are no blocks to replay")
        full = row.input_tokens // self._own_tokens
        if full > len(row.blocks):
            raise InvalidRequest(
                f"line {row.line} has {len(row.blocks)} blocks of {self._own_tokens} tokens for a"
                f" prompt of {row.input_tokens}"
            )
        # A longer block ends where the last of those it is made of ends, so that names it.
        ids = row.blocks[self.joined - 1 : full : self.joined]
        return row.input_tokens, self._number(ids, row)

    def _chunks(self, text: str) -> list[str]:
        chars = self.tokens * CHARS_PER_TOKEN
        names, name = [], b""
        for at in range(0, len(text) - chars + 1, chars):
            chunk = text[at : at + chars].encode("utf-8", "surrogatepass")
            name = blake2b(name + chunk, digest_size=16).digest()
            names.append(name.hex())
        return names

    def _number(self, ids: Sequence[int | str], row: Row) -> array[int]:
        if row.scope != self._scope:  # the rows of a scope follow each other
            self._scope, self._numbers = row.scope, {}
        found, parents = self._numbers, self._parents
        numbers = array("q")
        known, before = len(self.keys), -1
        for each in ids:
            number = found.get(each)
            if number is None:
                number = found[each] = len(parents)
                parents.append(before)
            elif parents[number] != before:
                seen = self._lines[number] if number < known else row.line
                for new in [name for name, number in found.items() if number >= known]:
                    del found[new]
                del parents[known:]
                raise InvalidRequest(
                    f"line {row.line} has block {each} after another prefix than line {seen}: ids"
                    " are used again by other sessions, or do not name prefixes"
                )
            numbers.append(number)
            before = number
        for number in range(known, len(parents)):
            self.keys.append(key_of(number))
            self._lines.append(row.line)
        return numbers


def key_of(number: int) -> BlockKey:
    """Return the key of a numbered block."""
    return BlockKey(blake2b(number.to_bytes(8, "little"), digest_size=KEY_NBYTES).digest())
