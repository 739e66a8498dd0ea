"""Made-up traffic of multi-turn chats and agents, one request after the other, in order of time.

Sessions arrive at random (Poisson). Each begins with one of a few shared prefixes, popular ones
more often (Zipf), and its own first message; every turn adds the last answer and a new message. At
the end of a visit the user may return later for another one. An agent's turn may spawn a sub-agent:
a session of its own, that begins with a shared prefix as well.

A trace begins in the steady state (`steady.py`): sessions are under way, so its first requests come
as fast as its last. Turns before the trace are not in it, but prompts begin with them.

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
from functools import lru_cache

from kvstore.model.errors import InvalidRequest
from kvstore.replay.draws import Draws, parse_draws, zipf
from kvstore.replay.rows import MOONCAKE_BLOCK_TOKENS, Row
from kvstore.replay.steady import LIVES, Growth, Lives, Place

BLOCK_TOKENS = MOONCAKE_BLOCK_TOKENS
PREFIXES_MAX = 100_000
SESSIONS_MAX = 1_000_000  # that have a turn to come
RATE_OFF_MAX = 0.02  # of a trace, before it is drawn anew
TRIES_MAX = 100
TRIED_REQUESTS_MAX = 1_000_000  # longer traces are near their mean rate
_NO_BLOCKS = array("q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked for. requests_per_s: on average; `sessions_per_s` then follows from it. gap_s:
    from a request to its session's next one, the time of its answer included. return_gap_s: from a
    visit's last request to the next visit. context_tokens_max: a session ends before its prompt is
    longer. prefixes_in_turn: sessions take the shared prefixes one after the other."""

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
    requests_per_s: float | None = None
    prefixes_in_turn: bool = False

    def __post_init__(self) -> None:
        if not 1e-6 <= self.sessions_per_s <= 1e6:
            raise InvalidRequest(
                f"{self.sessions_per_s:g} sessions a second; 0.000001 to 1,000,000"
            )
        if self.requests_per_s is not None and not 1e-6 <= self.requests_per_s <= 1e6:
            raise InvalidRequest(
                f"{self.requests_per_s:g} requests a second; 0.000001 to 1,000,000"
            )
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

    visit: of its session, from 0. subagent: whether another session's turn began it. first: of its
    session in this trace; its turn is not 0 if the session began before. model: "" if all are one.
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
    first: bool = False
    model: str = ""

    def to_row(self) -> Row:
        """Return what a trace file would be read into."""
        session = str(self.session)
        return Row(
            self.at_s,
            self.tokens,
            self.answer_tokens,
            session,
            self.blocks,
            line=1,
            model=self.model,
        )

    def to_mooncake(self) -> dict[str, object]:
        """Return the row of a trace file."""
        return {
            "timestamp": round(self.at_s * 1000),
            "input_length": self.tokens,
            "output_length": self.answer_tokens,
            "hash_ids": self.blocks.tolist(),
            "session_id": self.session,
            "turn": self.turn,
            **({"model": self.model} if self.model else {}),
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
    seen: bool = False


def synthesize(demand: Demand, *, seed: int) -> Iterator[Asked]:
    """Yield requests for ever, in order of time. Raises InvalidRequest if too many sessions are
    open at once."""
    return _Synthesis(demand, random.Random(seed)).requests()


def synthesize_trace(
    demand: Demand, *, requests: int, seed: int, warmup: int = 0
) -> Iterator[Asked]:
    """Return so many requests, as `synthesize` does, after `warmup` others.

    A short trace may be far from its mean rate by chance. If `demand` names requests a second, the
    trace is drawn anew until it is within 2 % of them. After 100 draws the nearest is taken.
    """
    if demand.requests_per_s is None or not 1 < requests <= TRIED_REQUESTS_MAX:
        return itertools.islice(synthesize(demand, seed=seed), warmup + requests)
    nearest, least = 0, float("inf")
    for number in range(TRIES_MAX):
        rates = _rates(demand, requests, warmup, _source(seed, number))
        off = max(abs(rate / demand.requests_per_s - 1) for rate in rates)
        if off < least:
            nearest, least = number, off
        if off <= RATE_OFF_MAX:
            break
    found = _Synthesis(demand, _source(seed, nearest)).requests()
    return itertools.islice(found, warmup + requests)


def with_rate(demand: Demand, requests_per_s: float) -> Demand:
    """Return the same traffic at so many requests a second, on average."""
    return replace(demand, requests_per_s=requests_per_s)


def _source(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed}/{number}" if number else seed)


def _rates(demand: Demand, requests: int, warmup: int, drawn: random.Random) -> list[float]:
    """Return the requests/s of one draw, counted from where the warm-up ends, and from the first
    request after it."""
    trial = _Synthesis(demand, drawn, with_blocks=False).requests()
    times = [asked.at_s for asked in itertools.islice(trial, warmup + requests)]
    begins = (times[warmup - 1] if warmup else 0.0, times[warmup])
    return [requests / max(times[-1] - begin, 1e-9) for begin in begins]


class _Synthesis:
    def __init__(self, demand: Demand, draw: random.Random, *, with_blocks: bool = True) -> None:
        self._demand = demand
        self._draw = draw
        self._with_blocks = with_blocks
        self._popular = zipf(demand.prefixes, demand.prefix_exponent)
        self._in_turn = itertools.cycle(range(demand.prefixes))
        self._ids = itertools.count()
        self._prefixes = [self._prefix() for _ in range(demand.prefixes)]
        self._due: list[tuple[float, int, _Session]] = []
        self._sessions = itertools.count()
        self._lives, self._sub_lives, growth = _sample(demand)
        rooms = growth.rooms(lambda source: self._prefixes[self._popular(source)][0])
        self._subagents = demand.subagent_probability * self._lives.mean_requests(rooms)
        of_subagents = self._subagents * self._sub_lives.mean_requests(rooms)
        per_session = self._lives.mean_requests(rooms) + of_subagents
        self._sessions_per_s = demand.sessions_per_s
        if demand.requests_per_s is not None:
            self._sessions_per_s = demand.requests_per_s / per_session

    def requests(self) -> Iterator[Asked]:
        arrivals = heapq.merge(self._new(), self._under_way(), key=lambda each: each[0])
        for arrival, new in arrivals:
            while self._due and self._due[0][0] <= arrival:
                at_s, _, session = heapq.heappop(self._due)
                yield self._ask(session, at_s)
            if new is not None:
                yield self._ask(new, arrival)

    def _new(self) -> Iterator[tuple[float, _Session | None]]:
        """Yield when sessions begin."""
        at_s = 0.0
        while True:
            at_s += self._draw.expovariate(self._sessions_per_s)
            yield at_s, self._begin()

    def _under_way(self) -> Iterator[tuple[float, _Session | None]]:
        """Yield when requests continue a session, and the session if it began before the trace and
        this is its first request in it."""
        demand, draw = self._demand, self._draw
        lives, sub_lives = self._lives, self._sub_lives
        kinds = [  # how many of them a session has, and the gap before each
            (lives.within, demand.gap_s, self._continued),
            (lives.returns, demand.return_gap_s, self._returned),
            (self._subagents, demand.gap_s, self._spawned),
            (self._subagents * sub_lives.within, demand.gap_s, self._continued_subagent),
        ]
        weights = list(itertools.accumulate(weight for weight, _, _ in kinds))
        if not weights[-1]:
            return
        rate, at_s = self._sessions_per_s * weights[-1], 0.0
        while True:
            at_s += draw.expovariate(rate)
            ((_, gap, make),) = draw.choices(kinds, cum_weights=weights)
            yield at_s, make() if gap.draw(draw) > at_s else None

    def _continued(self) -> _Session | None:
        return self._at(self._lives.place(self._draw, returns=False))

    def _returned(self) -> _Session | None:
        return self._at(self._lives.place(self._draw, returns=True))

    def _spawned(self) -> _Session | None:
        return self._begin(subagent=True)

    def _continued_subagent(self) -> _Session | None:
        return self._at(self._sub_lives.place(self._draw, returns=False), subagent=True)

    def _at(self, place: Place, *, subagent: bool = False) -> _Session | None:
        """Return a session that has come so far; None: its context was full before."""
        session = self._begin(subagent=subagent)
        for _ in range(place.done):
            session.tokens += self._answer_tokens() + self._turn_tokens()
            if session.tokens > self._demand.context_tokens_max:
                return None
        session.turn, session.visit, session.left = place.done, place.visit, place.left
        return session

    def _prefix(self) -> tuple[int, array[int]]:
        """Return how many tokens a shared prefix has, and its full blocks."""
        tokens = self._demand.prefix_tokens.whole(self._draw)
        tokens = min(tokens, self._demand.context_tokens_max)
        return tokens, array("q", itertools.islice(self._ids, tokens // BLOCK_TOKENS))

    def _begin(self, *, subagent: bool = False) -> _Session:
        in_turn = self._demand.prefixes_in_turn
        prefix = next(self._in_turn) if in_turn else self._popular(self._draw)
        tokens, blocks = self._prefixes[prefix]
        tokens += max(1, self._demand.first_tokens.whole(self._draw))
        turns = max(1, self._demand.turns.whole(self._draw))
        session = next(self._sessions)
        tokens = min(tokens, self._demand.context_tokens_max)
        return _Session(session, prefix, tokens, blocks[:], turns, subagent=subagent)

    def _answer_tokens(self) -> int:
        return max(1, self._demand.answer_tokens.whole(self._draw))

    def _turn_tokens(self) -> int:
        return max(1, self._demand.turn_tokens.whole(self._draw))

    def _ask(self, session: _Session, at_s: float) -> Asked:
        """Send the next request of a session, and plan what comes after it."""
        demand, draw = self._demand, self._draw
        answer = self._answer_tokens()
        asked = Asked(
            at_s,
            session.number,
            session.turn,
            session.visit,
            session.prefix,
            session.tokens,
            answer,
            self._blocks(session) if self._with_blocks else _NO_BLOCKS,
            session.subagent,
            not session.seen,
        )
        session.seen = True
        session.turn += 1
        session.tokens += answer + self._turn_tokens()
        self._plan(session, at_s)
        if not session.subagent and draw.random() < demand.subagent_probability:
            self._put(at_s + demand.gap_s.draw(draw), self._begin(subagent=True))
        return asked

    def _blocks(self, session: _Session) -> array[int]:
        """Return the blocks of a session's prompt."""
        new = session.tokens // BLOCK_TOKENS - len(session.blocks)
        session.blocks.extend(itertools.islice(self._ids, new))
        blocks = session.blocks[:]
        if session.tokens % BLOCK_TOKENS:  # it is another block once it is full
            blocks.append(next(self._ids))
        return blocks

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


@lru_cache(maxsize=4)
def _sample(demand: Demand) -> tuple[Lives, Lives, Growth]:
    """Return samples of sessions, of sub-agents, and of how prompts grow."""
    draw = random.Random(0)
    visits = [_visits(demand, draw) for _ in range(LIVES)]
    growth = Growth(
        demand.first_tokens,
        demand.answer_tokens,
        demand.turn_tokens,
        draw,
        tokens_max=demand.context_tokens_max,
        requests_max=max(map(sum, visits)),
    )
    first_visits = [each[:1] for each in visits]
    room = growth.requests_max
    return Lives(visits, room), Lives(first_visits, room), growth


def _visits(demand: Demand, draw: random.Random) -> tuple[int, ...]:
    """Draw how many turns a session has in each of its visits, if its context is never full."""
    visits = [max(1, demand.turns.whole(draw))]
    while draw.random() < demand.return_probability:
        visits.append(max(1, demand.turns.whole(draw)))
    return tuple(visits)
