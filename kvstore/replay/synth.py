"""Made-up traffic of multi-turn chats and agents, one request after the other, in order of time.

Sessions arrive at random (Poisson). Each begins with one of a few shared prefixes, popular ones
more often (Zipf), and its own first message; every turn adds the last answer and a new message. At
the end of a visit the user may return later for another one. An agent's turn may spawn a sub-agent:
a session of its own, that begins with a shared prefix as well.

Only sessions that have a turn to come are kept, so a trace may be as long as it likes: memory grows
with the arrival rate and how long a session lives, not with the number of requests.
"""

from __future__ import annotations

import heapq
import itertools
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvstore.errors import InvalidRequest
from kvstore.replay.draws import Draws, parse_draws, zipf
from kvstore.replay.formats import MOONCAKE_BLOCK_TOKENS, Row

BLOCK_TOKENS = MOONCAKE_BLOCK_TOKENS
PREFIXES_MAX = 100_000
SESSIONS_MAX = 1_000_000  # that have a turn to come
SAMPLE_SESSIONS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked for. gap_s: from a request to its session's next one, the time of its answer
    included. return_gap_s: from a visit's last request to the next visit. context_tokens_max: a
    session ends before its prompt is longer."""

    sessions_per_s: float
    turns: Draws
    gap_s: Draws
    first_tokens: Draws
    turn_tokens: Draws
    answer_tokens: Draws
    prefixes: int
    prefix_exponent: float
    prefix_tokens: Draws
    return_probability: float = 0.0
    return_gap_s: Draws = field(default_factory=lambda: parse_draws("exponential:3600"))
    subagent_probability: float = 0.0
    context_tokens_max: int = 131_072

    def __post_init__(self) -> None:
        if not 1e-6 <= self.sessions_per_s <= 1e6:
            raise InvalidRequest(f"{self.sessions_per_s:g} sessions a second")
        if not 1 <= self.prefixes <= PREFIXES_MAX:
            raise InvalidRequest(f"{self.prefixes} shared prefixes; 1 to {PREFIXES_MAX:,}")
        if not 0 <= self.prefix_exponent <= 10:
            raise InvalidRequest(f"a Zipf exponent of {self.prefix_exponent:g}; 0 to 10")
        for chance in (self.return_probability, self.subagent_probability):
            if not 0 <= chance <= 0.99:
                raise InvalidRequest(f"a probability of {chance:g}; 0 to 0.99")


def _demand(**words: str | float | int) -> Demand:
    parsed = {k: parse_draws(v) if isinstance(v, str) else v for k, v in words.items()}
    return Demand(**parsed)  # type: ignore[arg-type]


KINDS: dict[str, Demand] = {
    "chat": _demand(
        sessions_per_s=1.0,
        turns="geometric:3.5",
        gap_s="lognormal:60,1.2",
        first_tokens="lognormal:600,1.3",
        turn_tokens="lognormal:120,1.0",
        answer_tokens="lognormal:350,0.8",
        prefixes=20,
        prefix_exponent=1.0,
        prefix_tokens="uniform:200,3000",
        return_probability=0.15,
        return_gap_s="lognormal:3600,1.0",
    ),
    "agent": _demand(
        sessions_per_s=0.05,
        turns="geometric:40",
        gap_s="lognormal:8,1.2",
        first_tokens="lognormal:2500,1.0",
        turn_tokens="lognormal:700,1.3",
        answer_tokens="lognormal:200,0.8",
        prefixes=5,
        prefix_exponent=1.0,
        prefix_tokens="uniform:10000,25000",
        return_probability=0.3,
        return_gap_s="lognormal:900,1.2",
        subagent_probability=0.02,
    ),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. blocks: prefix ids of the prompt's blocks, the last one may be partial.

    visit: of its session, from 0. subagent: whether another session's turn began it.
    """

    at_s: float
    session: int
    turn: int
    visit: int
    prefix: int
    tokens: int
    answer_tokens: int
    blocks: array[int]
    subagent: bool = False

    def to_row(self) -> Row:
        """Return what a trace file would be read into."""
        session = str(self.session)
        return Row(self.at_s, self.tokens, self.answer_tokens, session, self.blocks, line=1)

    def to_mooncake(self) -> dict[str, object]:
        """Return the row of a trace file."""
        return {
            "timestamp": round(self.at_s * 1000),
            "input_length": self.tokens,
            "output_length": self.answer_tokens,
            "hash_ids": self.blocks.tolist(),
            "session_id": self.session,
            "turn": self.turn,
        }


@dataclass(slots=True)
class _Session:
    """One that has a turn to come. tokens: of its next prompt. left: turns of this visit."""

    number: int
    prefix: int
    tokens: int
    blocks: array[int]  # full ones
    left: int
    turn: int = 0
    visit: int = 0
    subagent: bool = False


def synthesize(demand: Demand, *, seed: int) -> Iterator[Asked]:
    """Yield requests for ever, in order of time. Raises InvalidRequest if too many sessions are
    open at once."""
    return _Synthesis(demand, seed).requests()


class _Synthesis:
    def __init__(self, demand: Demand, seed: int) -> None:
        self._demand = demand
        self._draw = random.Random(seed)
        self._popular = zipf(demand.prefixes, demand.prefix_exponent)
        self._ids = itertools.count()
        self._prefixes = [self._prefix() for _ in range(demand.prefixes)]
        self._due: list[tuple[float, int, _Session]] = []
        self._sessions = itertools.count()

    def requests(self) -> Iterator[Asked]:
        demand, draw = self._demand, self._draw
        arrival = 0.0
        while True:
            arrival += draw.expovariate(demand.sessions_per_s)
            while self._due and self._due[0][0] <= arrival:
                at_s, _, session = heapq.heappop(self._due)
                yield self._ask(session, at_s)
            yield self._ask(self._begin(), arrival)

    def _prefix(self) -> tuple[int, array[int]]:
        """Return how many tokens a shared prefix has, and its full blocks."""
        tokens = self._demand.prefix_tokens.whole(self._draw)
        tokens = min(tokens, self._demand.context_tokens_max)
        return tokens, array("q", itertools.islice(self._ids, tokens // BLOCK_TOKENS))

    def _begin(self, *, subagent: bool = False) -> _Session:
        prefix = self._popular(self._draw)
        tokens, blocks = self._prefixes[prefix]
        tokens += max(1, self._demand.first_tokens.whole(self._draw))
        turns = max(1, self._demand.turns.whole(self._draw))
        session = next(self._sessions)
        tokens = min(tokens, self._demand.context_tokens_max)
        return _Session(session, prefix, tokens, blocks[:], turns, subagent=subagent)

    def _ask(self, session: _Session, at_s: float) -> Asked:
        """Send the next request of a session, and plan what comes after it."""
        demand, draw = self._demand, self._draw
        new = session.tokens // BLOCK_TOKENS - len(session.blocks)
        session.blocks.extend(itertools.islice(self._ids, new))
        blocks = session.blocks[:]
        if session.tokens % BLOCK_TOKENS:  # it is another block once it is full
            blocks.append(next(self._ids))
        answer = max(1, demand.answer_tokens.whole(draw))
        asked = Asked(
            at_s,
            session.number,
            session.turn,
            session.visit,
            session.prefix,
            session.tokens,
            answer,
            blocks,
            session.subagent,
        )
        session.turn += 1
        session.tokens += answer + max(1, demand.turn_tokens.whole(draw))
        self._plan(session, at_s)
        if not session.subagent and draw.random() < demand.subagent_probability:
            self._put(at_s + demand.gap_s.draw(draw), self._begin(subagent=True))
        return asked

    def _plan(self, session: _Session, at_s: float) -> None:
        demand, draw = self._demand, self._draw
        session.left -= 1
        gap = demand.gap_s
        if not session.left:
            if session.subagent or draw.random() >= demand.return_probability:
                return
            session.left = max(1, demand.turns.whole(draw))
            session.visit += 1
            gap = demand.return_gap_s
        if session.tokens <= demand.context_tokens_max:
            self._put(at_s + gap.draw(draw), session)

    def _put(self, at_s: float, session: _Session) -> None:
        if len(self._due) >= SESSIONS_MAX:
            raise InvalidRequest(
                f"{SESSIONS_MAX:,} sessions are open at once: fewer a second, or shorter ones"
            )
        heapq.heappush(self._due, (at_s, session.number, session))


def with_rate(demand: Demand, requests_per_s: float) -> Demand:
    """Return the same traffic at so many requests a second, on average, once as many sessions end
    as begin."""
    source = random.Random(0)
    sample = [_length(demand, source, subagent=False) for _ in range(SAMPLE_SESSIONS)]
    per_session = sum(sample) / SAMPLE_SESSIONS
    if demand.subagent_probability:
        spawned = [_length(demand, source, subagent=True) for _ in range(SAMPLE_SESSIONS)]
        per_session *= 1 + demand.subagent_probability * sum(spawned) / SAMPLE_SESSIONS
    return replace(demand, sessions_per_s=requests_per_s / per_session)


def _length(demand: Demand, source: random.Random, *, subagent: bool) -> int:
    """Draw how many requests a session makes: its visits, until its context is full."""
    tokens = demand.prefix_tokens.draw(source) + demand.first_tokens.draw(source)
    requests = 0
    again = True
    while again:
        for _ in range(max(1, demand.turns.whole(source))):
            requests += 1
            tokens += demand.answer_tokens.draw(source) + demand.turn_tokens.draw(source)
            if tokens > demand.context_tokens_max:
                return requests
        again = not subagent and source.random() < demand.return_probability
    return requests
