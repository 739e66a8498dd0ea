"""One benchmark run, for the command line and for programs.

    from kvstore_bench.generator import Shape, SizeRange, generate
    from kvstore_bench.runner import ChatOptions, run_chat

    conversations = generate(Shape(conversations=4, turns=3, first_tokens=SizeRange(2000, 2000)))
    options = ChatOptions(url="http://127.0.0.1:8000", answers="file", order="round-robin")
    result = asyncio.run(run_chat(options, conversations))

    for sample in result.requests:                # sample.Sample: turn, ttft_s, output_sha256, ...
        print(sample.conversation_id, sample.turn, sample.ttft_s, sample.failure)
    summary = result.summary()                    # JSON-ready; keys as `vllm bench serve` has them
    print(summary["resumed_turns"]["mean_ttft_ms"], summary["server"]["prompt_tokens_by_source"])
    report = result.report(save_text=True)        # all of `--json`: options, summary and requests

To kill something between turns, replay fixed answers and run one range of turns after another
(`answers="file", turns=(1, 1)`, then `turns=(2, 3)`): prompts are then the same whatever was
answered. `plot.plot_ttft({"without": a.requests, "with": b.requests}, target)` compares runs.

A request that goes wrong is a Sample with a `failure`. What makes a run impossible is raised
before the first request: Unavailable, Unauthorized or InvalidRequest.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from kvstore.errors import InvalidRequest, Unavailable
from kvstore_bench import report
from kvstore_bench.client import Endpoint, EndpointKind
from kvstore_bench.metrics import (
    Counters,
    ServerCounts,
    kvstore_counts,
    parse_counters,
    server_counts,
)
from kvstore_bench.sample import Sample
from kvstore_bench.schedule import Job, Order, Schedule
from kvstore_bench.workload import Conversation, Message

# A server that died would otherwise cost one request timeout for each turn that is left.
CONSECUTIVE_FAILURES_MAX = 10


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to run; the conversations say what.

    model: None asks for the only one served. answers: `live` puts the model's own answers into
    the history, `file` the recorded ones. concurrency: conversations in flight; None is 1, or all
    of them with a request_rate. request_rate: mean requests per second with Poisson arrivals; None
    sends the next when one has finished. turns: first and last turn to ask (a first turn above 1
    needs `file`). warmup: unmeasured requests before the first. body: merged into every request.
    keep_going: do not stop after CONSECUTIVE_FAILURES_MAX failures in a row. seed: of arrivals.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    endpoint: EndpointKind = "chat"
    answers: Literal["live", "file"] = "live"
    order: Order = "round-robin"
    concurrency: int | None = None
    request_rate: float | None = None
    turns: tuple[int, int] | None = None
    max_tokens: int = 32
    min_tokens: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    warmup: int = 0
    request_timeout_s: float = 600.0
    seed: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    kvstore_metrics: str | None = None
    keep_going: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run. requests are in the order they ended.

    skipped: turns never asked, because a turn before them failed or the run was given up.
    conversations: what was said, with the model's answers where they went into the history.
    """

    options: ChatOptions
    model: str
    date: str
    duration_s: float
    requests: tuple[Sample, ...]
    skipped: int
    server: ServerCounts
    conversations: tuple[Conversation, ...]

    def summary(self) -> dict[str, Any]:
        """Return the numbers: see report.py for the keys."""
        numbers = report.summarize(self.requests, duration_s=self.duration_s, server=self.server)
        return {**numbers, "skipped": self.skipped}

    def report(self, *, save_text: bool = False) -> dict[str, Any]:
        """Return everything as one JSON-ready dict. The API key is not in it."""
        options = asdict(replace(self.options, api_key=None))
        del options["api_key"], options["model"]
        return {
            "schema_version": report.SCHEMA_VERSION,
            "date": self.date,
            "model_id": self.model,
            "num_prompts": len(self.requests),
            "max_concurrency": self.options.concurrency
            or (None if self.options.request_rate else 1),
            "request_rate": self.options.request_rate,
            "options": options,
            **self.summary(),
            "requests": [
                report.request_record(sample, save_text=save_text) for sample in self.requests
            ],
        }


async def run_chat(
    options: ChatOptions,
    conversations: Sequence[Conversation],
    *,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> Result:
    """Hold the conversations against the endpoint and measure every request.

    on_sample is called on the event loop as each request ends (a progress bar).
    """
    _check(options, conversations)
    body = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    if options.min_tokens is not None:
        body["min_tokens"] = options.min_tokens
    if options.ignore_eos:
        body["ignore_eos"] = True
    async with Endpoint(
        options.url,
        kind=options.endpoint,
        api_key=options.api_key,
        body={**body, **options.body},
        timeout_s=options.request_timeout_s,
    ) as endpoint:
        model = await endpoint.resolve_model(options.model)
        await _warm_up(endpoint, options, model, conversations[0])
        run = _Run(options, conversations, endpoint, model, on_sample)
        before = await _scrape(endpoint, options.kvstore_metrics)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        await run.drive()
        duration_s = run.elapsed_s()
        after = await _scrape(endpoint, options.kvstore_metrics)
    return Result(
        options=options,
        model=model,
        date=date,
        duration_s=duration_s,
        requests=tuple(run.samples),
        skipped=run.skipped,
        server=_server(before, after),
        conversations=run.spoken(),
    )


class _Run:
    """The state of one run: a schedule, the histories, and what has been measured."""

    def __init__(
        self,
        options: ChatOptions,
        conversations: Sequence[Conversation],
        endpoint: Endpoint,
        model: str,
        on_sample: Callable[[Sample], None],
    ) -> None:
        self._options = options
        self._conversations = conversations
        self._endpoint = endpoint
        self._model = model
        self._on_sample = on_sample
        last = max(conversation.turns for conversation in conversations)
        self._schedule = Schedule(conversations, options.order, options.turns or (1, last))
        self._live = [list(conversation.opening()) for conversation in conversations]
        self._in_flight: set[asyncio.Task[None]] = set()
        self._failures_in_a_row = 0
        self._epoch = time.perf_counter()
        self.samples: list[Sample] = []
        self.skipped = 0

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._epoch

    async def drive(self) -> None:
        """Start every job in order, as soon as its time, its turn and the concurrency allow.

        Each wait ends: a request has a deadline, and something is in flight whenever the schedule
        has jobs but none may start.
        """
        arrivals = random.Random(f"kvstore-bench/arrivals/{self._options.seed}")
        rate = self._options.request_rate
        default = len(self._conversations) if rate else 1
        limit = self._options.concurrency or default
        due_s = 0.0
        self._epoch = time.perf_counter()
        try:
            while len(self._schedule):
                job = self._schedule.take() if len(self._in_flight) < limit else None
                if job is None:
                    await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
                    self._reap()
                    continue
                if rate:
                    due_s += arrivals.expovariate(rate)
                    await asyncio.sleep(max(0.0, due_s - self.elapsed_s()))
                self._in_flight.add(asyncio.create_task(self._ask(job, due_s if rate else None)))
            while self._in_flight:
                await asyncio.wait(self._in_flight)
                self._reap()
        finally:
            for task in self._in_flight:
                task.cancel()

    def _reap(self) -> None:
        for task in [task for task in self._in_flight if task.done()]:
            self._in_flight.discard(task)
            task.result()  # a bug in here must not pass for a finished request

    async def _ask(self, job: Job, due_s: float | None) -> None:
        conversation = self._conversations[job.position]
        live = self._live[job.position]
        live.append(conversation.question(job.turn))
        history = live if self._options.answers == "live" else conversation.history(job.turn)
        sample = await self._endpoint.ask(
            history,
            model=self._model,
            conversation_id=conversation.id,
            turn=job.turn,
            epoch=self._epoch,
            queued_s=0.0 if due_s is None else max(0.0, self.elapsed_s() - due_s),
        )
        live.append(Message("assistant", sample.output_text))
        self.samples.append(sample)
        self._on_sample(sample)
        self._settle(job, sample)

    def _settle(self, job: Job, sample: Sample) -> None:
        self._schedule.finished(job)
        if sample.failure is None:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        if self._options.answers == "live":
            # Without its answer the next prompt would be another conversation's.
            self.skipped += self._schedule.abandon(job.position)
        if self._failures_in_a_row >= CONSECUTIVE_FAILURES_MAX and not self._options.keep_going:
            for position in range(len(self._conversations)):
                self.skipped += self._schedule.abandon(position)

    def spoken(self) -> tuple[Conversation, ...]:
        """Return the conversations with the histories that were sent."""
        if self._options.answers == "file":
            return tuple(self._conversations)
        pairs = zip(self._conversations, self._live, strict=True)
        return tuple(replace(item, messages=tuple(live)) for item, live in pairs)


def _check(options: ChatOptions, conversations: Sequence[Conversation]) -> None:
    if not conversations:
        raise InvalidRequest("there are no conversations to hold")
    if options.concurrency is not None and options.concurrency < 1:
        raise InvalidRequest("concurrency must be at least 1")
    if options.request_rate is not None and options.request_rate <= 0:
        raise InvalidRequest("request rate must be above 0 requests per second")
    first, last = options.turns or (1, 1)
    if not 1 <= first <= last:
        raise InvalidRequest(f"turns {first}:{last}: 1 <= first <= last must hold")
    if all(conversation.turns < first for conversation in conversations):
        raise InvalidRequest(f"no conversation has a turn {first}")
    if first > 1 and options.answers == "live":
        raise InvalidRequest("starting after turn 1 needs recorded answers (answers: file)")


async def _warm_up(
    endpoint: Endpoint, options: ChatOptions, model: str, conversation: Conversation
) -> None:
    """Ask prompts as long as the first one but backwards, so that no measured prefix is stored.

    Raises Unavailable if one fails: what cannot be warmed up cannot be measured.
    """
    words = conversation.question(1).content.split()[::-1]
    for number in range(options.warmup):
        text = " ".join([f"Warm-up {number}:", *words])
        sample = await endpoint.ask(
            [Message("user", text)], model=model, conversation_id="warm-up", turn=1
        )
        if sample.failure is not None:
            raise Unavailable(
                f"a warm-up request failed ({sample.failure.kind}: {sample.failure.message})"
            )


Scraped = tuple[Counters | str, Counters | str | None]


async def _scrape(endpoint: Endpoint, kvstore_url: str | None) -> Scraped:
    """Read the counters of the engine and, if asked, of the daemon; a str says why not."""
    engine = await _counters(endpoint.fetch("/metrics"))
    if kvstore_url is None:
        return engine, None
    return engine, await _counters(endpoint.fetch_elsewhere(kvstore_url))


async def _counters(page: Awaitable[tuple[int, str]]) -> Counters | str:
    try:
        status, text = await page
    except Unavailable as error:
        return str(error)
    if status != 200:
        return f"no metrics page (HTTP {status})"
    counters = parse_counters(text)
    return "not a Prometheus page" if counters is None else counters


def _server(before: Scraped, after: Scraped) -> ServerCounts:
    counts = server_counts(before[0], after[0])
    if before[1] is None or after[1] is None:
        return counts
    kvstore = kvstore_counts(before[1], after[1])
    if isinstance(kvstore, str):
        return replace(counts, notes=(*counts.notes, kvstore))
    return replace(counts, kvstore=kvstore)
