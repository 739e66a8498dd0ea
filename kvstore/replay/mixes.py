"""Mixed traffic: streams of `synth.py` beside each other and one after the other.

A policy that was made by looking at some traffic may lose on other. So there is a family of mixes,
each with something that is hard for one policy or the other: documents that many ask about, scans
that never return, batches, day and night, work that comes round in turn, a change half way, two
models of different cost. They are generators: a name, a number of requests and a seed make one.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvstore.model.errors import InvalidRequest
from kvstore.replay.draws import parse_draws
from kvstore.replay.synth import KINDS, Asked, Demand, synthesize, with_rate

WHOLE = ((0.0, 1.0),)
DAYS = 4.0  # in a trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Part of a mix.

    share: of the mix's requests per second, while it runs. spans: when it runs, as shares of the
    trace's length; sessions that are open at the end of one go on in the next. night: sessions that
    begin at midnight, as a share of those that begin at noon. model: whose blocks these are.
    """

    demand: Demand
    share: float = 1.0
    spans: tuple[tuple[float, float], ...] = WHOLE
    night: float = 1.0
    model: str = ""

    @property
    def length(self) -> float:
        """Return the share of the trace in which it runs."""
        return sum(end - begin for begin, end in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Streams, and the requests per second that their shares are of. about: what is hard in it."""

    streams: tuple[Stream, ...]
    requests_per_s: float
    about: str

    @property
    def models(self) -> list[str]:
        """Return the names of the models, sorted; none if it tells none apart."""
        return sorted({stream.model for stream in self.streams} - {""})


def synthesize_mix(mix: Mix, *, requests: int, seed: int) -> Iterator[Asked]:
    """Yield so many requests in order of time; the same seed makes the same. Raises InvalidRequest
    if too many sessions are open at once."""
    mean = sum(stream.share * stream.length for stream in mix.streams)
    seconds = requests / (mix.requests_per_s * mean)
    streams = [
        _stream(stream, mix.requests_per_s * stream.share, seconds, f"{seed}/{number}")
        for number, stream in enumerate(mix.streams)
    ]
    apart = [
        _renumbered(stream, number, len(streams), mix.streams[number].model)
        for number, stream in enumerate(streams)
    ]
    return itertools.islice(heapq.merge(*apart, key=lambda each: each.at_s), requests)


def _stream(stream: Stream, rate: float, seconds: float, seed: str) -> Iterator[Asked]:
    """Yield what a stream asks for, until its last span is over."""
    kept = (1.0 + stream.night) / 2  # of its sessions, on average
    draw = random.Random(seed)
    sleeping: set[int] = set()
    for asked in synthesize(with_rate(stream.demand, rate / kept), seed=draw.getrandbits(62)):
        at_s = _on_the_clock(asked.at_s, stream.spans, seconds)
        if at_s is None:
            return
        if asked.first and draw.random() > _awake(at_s / seconds, stream.night):
            sleeping.add(asked.session)
        if asked.session not in sleeping:
            yield replace(asked, at_s=at_s)


def _on_the_clock(
    running_s: float, spans: tuple[tuple[float, float], ...], seconds: float
) -> float | None:
    """Return when a stream has run for so long; None: it never has. What lasts to the end of the
    trace goes on beyond it, should that have fewer requests than were expected."""
    for begin, end in spans:
        length = (end - begin) * seconds
        if running_s < length or end == 1.0:
            return begin * seconds + running_s
        running_s -= length
    return None


def _awake(at: float, night: float) -> float:
    """Return the share of sessions that begin at a time of the trace; it begins at midnight."""
    return night + (1.0 - night) * (1.0 - math.cos(2 * math.pi * DAYS * at)) / 2


def _renumbered(stream: Iterator[Asked], number: int, streams: int, model: str) -> Iterator[Asked]:
    """Keep blocks and sessions of several streams apart."""
    for asked in stream:
        blocks = array("q", [block * streams + number for block in asked.blocks])
        session = asked.session * streams + number
        yield replace(asked, blocks=blocks, session=session, model=model)


def mix_named(name: str, requests_per_s: float | None = None) -> Mix:
    """Return a mix, at so many requests a second if told. Raises InvalidRequest."""
    mix = MIXES.get(name)
    if mix is None:
        raise InvalidRequest(f"no mix {name!r}; choose one of {', '.join(MIXES)}")
    return mix if requests_per_s is None else replace(mix, requests_per_s=requests_per_s)


# ---- the family --------------------------------------------------------------------------------


def _like(kind: str, **words: str | float | int) -> Demand:
    parsed = {k: parse_draws(v) if isinstance(v, str) else v for k, v in words.items()}
    return replace(KINDS[kind], **parsed)  # type: ignore[arg-type]


_CHAT, _AGENT = KINDS["chat"], KINDS["agent"]
_DOCUMENTS = _like(
    "chat",
    turns="geometric:1.6",
    gap_s="lognormal:40,1.0",
    first_tokens="lognormal:60,0.6",
    prefixes=300,
    prefix_exponent=0.8,
    prefix_tokens="uniform:4000,20000",
    return_probability=0.05,
)
_ONCE = _like(
    "chat",
    turns="constant:1",
    first_tokens="lognormal:6000,0.7",
    prefixes=1,
    prefix_tokens="constant:600",
    return_probability=0.0,
)
_SHARED_BATCH = replace(
    _ONCE, first_tokens=parse_draws("lognormal:700,0.5"), prefix_tokens=parse_draws("constant:4000")
)
_IN_TURN = _like(
    "chat",
    turns="constant:1",
    first_tokens="constant:100",
    prefixes=400,
    prefixes_in_turn=True,
    prefix_tokens="uniform:4000,9000",
    return_probability=0.0,
)
_CRON = _like(
    "agent",
    turns="uniform:4,8",
    gap_s="lognormal:6,0.6",
    return_probability=0.95,
    return_gap_s="uniform:1700,1900",
    context_tokens_max=200_000,
)
_SLOW = _like("agent", turns="geometric:20", gap_s="lognormal:150,1.5", subagent_probability=0.0)
_SUBAGENTS = _like("agent", turns="geometric:15", subagent_probability=0.2)
_LONG = _like("chat", turns="geometric:14", gap_s="lognormal:90,1.2", return_probability=0.3)
_SHORT = _like("chat", turns="geometric:1.3", return_probability=0.02)
_HASTY = _like("chat", turns="geometric:6", gap_s="lognormal:6,0.7", return_probability=0.0)
_RETURNING = _like(
    "chat", turns="geometric:2", return_probability=0.7, return_gap_s="lognormal:1500,0.5"
)
_IDLE = _like("chat", turns="geometric:6", gap_s="lognormal:60,2.5")
_QUARTERS = tuple((each / 4, (each + 1) / 4) for each in range(4))
_BURSTS = tuple((each / 10 + 0.05, each / 10 + 0.07) for each in range(10))
_FIRST_HALF, _SECOND_HALF = ((0.0, 0.5),), ((0.5, 1.0),)


def _mix(about: str, requests_per_s: float, *streams: Stream) -> Mix:
    return Mix(streams=streams, requests_per_s=requests_per_s, about=about)


def _all(demand: Demand) -> Stream:
    return Stream(demand=demand)


MIXES: Mapping[str, Mix] = {
    "chat-long": _mix("conversations of many turns", 4, _all(_LONG)),
    "chat-short": _mix("most come once", 6, _all(_SHORT)),
    "chat-hasty": _mix("turns within seconds, then never again", 6, _all(_HASTY)),
    "chat-returning": _mix("users come back after half an hour", 4, _all(_RETURNING)),
    "chat-idle": _mix("pauses from seconds to hours", 4, _all(_IDLE)),
    "documents": _mix("many ask about a few documents", 4, _all(_DOCUMENTS)),
    "documents-alike": _mix(
        "all documents are equally popular", 4, _all(replace(_DOCUMENTS, prefix_exponent=0.0))
    ),
    "documents-hot": _mix(
        "few documents are most of it", 4, _all(replace(_DOCUMENTS, prefix_exponent=1.4))
    ),
    "in-turn": _mix("documents come round in turn: worst for LRU", 2, _all(_IN_TURN)),
    "agents-cron": _mix("agents that wake every half hour", 3, _all(_CRON)),
    "agents-slow": _mix("agents that wait for long tools", 3, _all(_SLOW)),
    "agents-spawning": _mix("agents with many sub-agents", 4, _all(_SUBAGENTS)),
    "once": _mix("nothing but a system prompt returns", 4, _all(_ONCE)),
    "scan": _mix(
        "chats beside a scan that never returns",
        6,
        Stream(demand=_CHAT, share=0.6),
        Stream(demand=_ONCE, share=0.4),
    ),
    "scan-bursts": _mix(
        "chats, and now and then a fast scan",
        4,
        Stream(demand=_CHAT),
        Stream(demand=_ONCE, share=4.0, spans=_BURSTS),
    ),
    "scan-agents": _mix(
        "agents beside a scan that never returns",
        4,
        Stream(demand=_AGENT, share=0.7),
        Stream(demand=_ONCE, share=0.3),
    ),
    "batch": _mix(
        "chats, and batches of one prompt with many items",
        4,
        Stream(demand=_CHAT),
        Stream(demand=_SHARED_BATCH, share=6.0, spans=_BURSTS),
    ),
    "day-night": _mix("chats by day", 6, Stream(demand=_CHAT, night=0.05)),
    "day-batch": _mix(
        "chats by day, and a batch at midnight",
        4,
        Stream(demand=_CHAT, night=0.1),
        Stream(
            demand=_ONCE,
            share=3.0,
            spans=tuple((each / 4, each / 4 + 0.03) for each in range(4)),
        ),
    ),
    "shift-chat-agents": _mix(
        "chats, from half way on agents",
        4,
        Stream(demand=_CHAT, spans=_FIRST_HALF),
        Stream(demand=_AGENT, spans=_SECOND_HALF),
    ),
    "shift-agents-scan": _mix(
        "agents, from half way on a scan beside fewer of them",
        4,
        Stream(demand=_AGENT, share=0.5),
        Stream(demand=_AGENT, share=0.5, spans=_FIRST_HALF),
        Stream(demand=_ONCE, share=0.5, spans=_SECOND_HALF),
    ),
    "shift-documents": _mix(
        "other documents from half way on",
        4,
        Stream(demand=_DOCUMENTS, spans=_FIRST_HALF),
        Stream(demand=_DOCUMENTS, spans=_SECOND_HALF),
    ),
    "shift-to-and-fro": _mix(
        "returning users and documents in turn, by quarters",
        4,
        Stream(demand=_RETURNING, spans=_QUARTERS[0::2]),
        Stream(demand=_IN_TURN, spans=_QUARTERS[1::2]),
    ),
    "office": _mix(
        "chats, agents and documents together",
        6,
        Stream(demand=_CHAT, share=0.5),
        Stream(demand=_AGENT, share=0.2),
        Stream(demand=_DOCUMENTS, share=0.3),
    ),
    "models-chat": _mix(
        "the same chats with a large and a small model",
        6,
        Stream(demand=_CHAT, share=0.5, model="large"),
        Stream(demand=_CHAT, share=0.5, model="small"),
    ),
    "models-agents": _mix(
        "chats with a large model, agents with a small one",
        6,
        Stream(demand=_CHAT, share=0.7, model="large"),
        Stream(demand=_AGENT, share=0.3, model="small"),
    ),
    "models-batch": _mix(
        "chats with a large model beside batches of a small one",
        6,
        Stream(demand=_LONG, share=0.5, model="large"),
        Stream(demand=_DOCUMENTS, share=0.5, model="small"),
    ),
}
