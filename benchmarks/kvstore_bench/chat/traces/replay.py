"""Rows of a trace -> sessions that the runner replays at their recorded times.

Each turn of a session is asked when it is due and its predecessor has ended; how much later than
due that was is reported as `queue_ms`. Prompts are what was recorded, whole, never the answers of
the server measured here, so that every run asks the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from kvstore.model.errors import InvalidRequest
from kvstore.replay.formats import Trace, read
from kvstore.replay.rows import Row
from kvstore_bench.chat.traces.prompts import BlockText
from kvstore_bench.chat.workloads.generator import Vocabulary
from kvstore_bench.chat.workloads.workload import Message, Workload


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a trace is replayed, and how fast.

    speed: 2 replays in half the time. start_s, end_s: recorded seconds from the first request.
    requests: at most so many, from the start. gap_cap_s: the longest pause inside a session, in
    recorded seconds, None for as recorded. sessions, turns: at most so many.
    """

    speed: float = 1.0
    start_s: float = 0.0
    end_s: float | None = None
    requests: int | None = None
    gap_cap_s: float | None = None
    sessions: int | None = None
    turns: int | None = None


@dataclass(frozen=True, slots=True)
class TraceSession:
    """Recorded requests of one session; a `Dialogue` whose prompts do not grow by answers."""

    id: str
    rows: tuple[Row, ...]
    due: tuple[float, ...]
    text: BlockText = field(repr=False)
    block_tokens: int

    @property
    def turns(self) -> int:
        """Return how many requests were recorded."""
        return len(self.rows)

    def history(self, turn: int) -> tuple[Message, ...]:
        """Return the recorded prompt of a turn as one user message."""
        row = self.rows[turn - 1]
        text = row.text
        if text is None:
            # What a trace calls zero tokens is still a request.
            text = self.text.prompt(
                row.blocks,
                scope=row.scope,
                block_tokens=self.block_tokens,
                tokens=max(1, row.input_tokens),
                own=f"{self.id}/{turn}",
            )
        return (Message("user", text),)

    def due_s(self, turn: int) -> float:
        """Return when the turn is due, in seconds from the start of the replay."""
        return self.due[turn - 1]

    def answer_tokens(self, turn: int) -> int:
        """Return how many tokens the recorded answer had."""
        return max(1, self.rows[turn - 1].output_tokens)


def load_trace(
    path: Path, window: Window, vocabulary: Vocabulary | None = None, *, seed: str = "0"
) -> Workload:
    """Read a trace for replay. Raises InvalidRequest: unknown format, wrong line, empty trace."""
    trace = read(path)
    text = BlockText(vocabulary or Vocabulary(), seed=seed)
    sessions = [
        TraceSession(name, rows, _due(rows, window), text, trace.block_tokens)
        for name, rows in _sessions(trace, window)
    ]
    if not sessions:
        raise InvalidRequest(f"{path}: no request of the trace lies between --start and --end")
    earliest = min(session.due[0] for session in sessions)
    shifted = [_shifted(session, -earliest) for session in sessions]
    shifted.sort(key=lambda session: session.due[0])
    source = {
        "format": trace.name,
        "file": path.name,
        "speed": window.speed,
        "start_s": window.start_s,
        "end_s": window.end_s,
        "gap_cap_s": window.gap_cap_s,
    }
    prescribed = {"answers": "file", "ignore_eos": True}
    # Sessions without a common clock run a few at a time, as many as --concurrency says.
    return Workload(
        shifted, source, prescribed | ({} if trace.common_clock else {"concurrency": 1})
    )


def _sessions(trace: Trace, window: Window) -> list[tuple[str, tuple[Row, ...]]]:
    grouped: dict[str, list[Row]] = defaultdict(list)
    for number, row in enumerate(_window(trace, window)):
        grouped[f"r{number:05d}" if row.session is None else row.session].append(row)
    found = [
        (name, tuple(sorted(rows, key=lambda row: row.at_s)[: window.turns]))
        for name, rows in grouped.items()
    ]
    return found[: window.sessions]


def _window(trace: Trace, window: Window) -> list[Row]:
    if not trace.common_clock:
        first = 0.0
        rows = list(trace.rows)
    else:
        rows = sorted(trace.rows, key=lambda row: row.at_s)
        first = rows[0].at_s
    end_s = float("inf") if window.end_s is None else window.end_s
    inside = [row for row in rows if window.start_s <= row.at_s - first < end_s]
    return inside[: window.requests]


def _due(rows: tuple[Row, ...], window: Window) -> tuple[float, ...]:
    """Return each row's time in the replay, pauses cut to the cap."""
    cap_s = float("inf") if window.gap_cap_s is None else window.gap_cap_s
    due_s = [rows[0].at_s]
    for before, row in pairwise(rows):
        due_s.append(due_s[-1] + min(cap_s, row.at_s - before.at_s))
    return tuple(at_s / window.speed for at_s in due_s)


def _shifted(session: TraceSession, by_s: float) -> TraceSession:
    due = tuple(due_s + by_s for due_s in session.due)
    return TraceSession(session.id, session.rows, due, session.text, session.block_tokens)
