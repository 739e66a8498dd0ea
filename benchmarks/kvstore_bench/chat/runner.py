"""One benchmark run, for the command line and for programs.

    from kvstore_bench.chat.workloads.generator import Shape, SizeRange, generate
    from kvstore_bench.chat.runner import ChatOptions, run_chat

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
answered. `plot.plot_run({"without": a.requests, "with": b.requests}, target)` compares runs.
Options are in `load.py`, the ways to start requests in `drivers.py`.

A request that goes wrong is a Sample with a `failure`. What makes a run impossible is raised
before the first request: Unavailable, Unauthorized or InvalidRequest.
"""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvstore.model.errors import Unavailable
from kvstore.model.hint import SESSION_ID_CHARS_MAX
from kvstore.system.scheduling import run_promptly
from kvstore_bench.chat import drivers
from kvstore_bench.chat.client import Endpoint
from kvstore_bench.chat.load import MAX_TOKENS, ChatOptions, check
from kvstore_bench.chat.metrics import (
    Counters,
    ServerCounts,
    kvstore_counts,
    parse_counters,
    server_counts,
)
from kvstore_bench.chat.reports.result import Result
from kvstore_bench.chat.sample import Sample
from kvstore_bench.chat.schedule import Job, schedule
from kvstore_bench.chat.workloads.workload import Conversation, Dialogue, Message, Workload

__all__ = ["CONSECUTIVE_FAILURES_MAX", "ChatOptions", "Result", "run_chat"]

# A server that died would otherwise cost one request timeout for each turn that is left.
CONSECUTIVE_FAILURES_MAX = 10
SWITCH_S = 0.0005


async def run_chat(
    options: ChatOptions,
    workload: Workload | Sequence[Conversation],
    *,
    on_sample: Callable[[Sample], None] = lambda sample: None,
    stop: asyncio.Event | None = None,
) -> Result:
    """Hold the conversations against the endpoint and measure every request.

    on_sample is called on the event loop as each request ends (a progress bar). Once `stop` is
    set, requests in flight are given up, and the result is what was measured until then.
    """
    if not isinstance(workload, Workload):
        workload = Workload(workload, {"format": "conversations"})
    check(options, workload.dialogues)
    async with Endpoint(
        options.url,
        kind=options.endpoint,
        api_key=options.api_key,
        body=options.request_body(),
        timeout_s=options.request_timeout_s,
    ) as endpoint:
        model = await endpoint.resolve_model(options.model)
        await _warm_up(endpoint, options, model, workload.dialogues[0])
        run = _Run(options, workload.dialogues, endpoint, model, on_sample)
        before = await _scrape(endpoint, options.kvstore_metrics)
        with _undisturbed():
            started_unix_s = time.time()
            interrupted = await _until_stopped(run, stop)
        duration_s = run.elapsed_s()
        after = await _scrape(endpoint, options.kvstore_metrics)
    return Result(
        options=options,
        workload=workload,
        model=model,
        started_unix_s=started_unix_s,
        duration_s=duration_s,
        requests=tuple(run.samples),
        skipped=run.planned - len(run.samples),
        interrupted=interrupted,
        server=_server(before, after),
        conversations=run.spoken(),
    )


async def _until_stopped(run: _Run, stop: asyncio.Event | None) -> bool:
    """Drive the run to its end, or to `stop`; return whether it was stopped."""
    driving = asyncio.create_task(run.drive())
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait((driving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if driving.done():
            driving.result()
            return False
        return True
    finally:
        driving.cancel()
        stopping.cancel()
        await asyncio.gather(driving, stopping, return_exceptions=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the cycle collector and other threads from pausing the thread that takes the times.

    Requests make no cycles to speak of, so what is not collected meanwhile is small. Another
    thread (one that draws a progress bar) gives way after SWITCH_S instead of 5 ms, and another
    process (the server, on the same machine) at once where the kernel can.
    """
    run_promptly()
    gc.collect()
    enabled, switch_s = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        if enabled:
            gc.enable()


class _Run:
    """The state of one run: the histories, and what has been measured. A drivers.Asker."""

    def __init__(
        self,
        options: ChatOptions,
        dialogues: Sequence[Dialogue],
        endpoint: Endpoint,
        model: str,
        on_sample: Callable[[Sample], None],
    ) -> None:
        self._options = options
        self._dialogues = dialogues
        self._endpoint = endpoint
        self._model = model
        self._on_sample = on_sample
        self._span = options.span(dialogues)
        self._live: dict[int, list[Message]] = {}
        self._failures_in_a_row = 0
        self._epoch = time.perf_counter()
        first, last = self._span
        self.planned = sum(max(0, min(last, one.turns) - first + 1) for one in dialogues)
        self.samples: list[Sample] = []
        self.over = asyncio.Event()
        self._name = secrets.token_hex(4)  # other runs have conversations of the same ids

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._epoch

    async def drive(self) -> None:
        """Start every request when the load says so; return when all have ended."""
        options, dialogues = self._options, self._dialogues
        self._epoch = time.perf_counter()
        if options.follows_recorded_times(dialogues):
            await drivers.by_due_times(self, dialogues, self._span, limit=options.concurrency)
        elif options.client_rate is not None:
            await drivers.by_clients(
                self,
                dialogues,
                self._span,
                clients=options.concurrency or len(dialogues),
                rate=options.client_rate,
                arrivals=options.arrivals,
                seed=options.seed,
            )
        else:
            await self._drive_schedule()

    async def _drive_schedule(self) -> None:
        options = self._options
        gaps = None
        if options.request_rate is not None:
            stream = random.Random(f"kvstore-bench/arrivals/{options.seed}")
            gaps = drivers.gaps_s(options.request_rate, options.arrivals, stream)
        await drivers.by_schedule(
            self,
            schedule(self._dialogues, options.order, self._span, seed=options.seed),
            limit=options.concurrency or (1 if gaps is None else len(self._dialogues)),
            gaps=gaps,
        )

    async def ask(self, job: Job, due_s: float | None) -> bool:
        dialogue = self._dialogues[job.position]
        sample = await self._endpoint.ask(
            self._history(job),
            model=self._model,
            conversation_id=dialogue.id,
            turn=job.turn,
            max_tokens=self._options.tokens_of(dialogue, job.turn),
            epoch=self._epoch,
            due_s=due_s,
            hints=self._hints(job) if self._options.hints else None,
        )
        if self._options.answers == "live":
            self._live[job.position].append(Message("assistant", sample.output_text))
        self.samples.append(sample)
        self._on_sample(sample)
        return self._goes_on(sample)

    def _hints(self, job: Job) -> dict[str, Any]:
        dialogue = self._dialogues[job.position]
        hints = self._options.hints_of(dialogue, job.turn, self._span[1])
        return hints | {"session_id": f"bench-{self._name}-{dialogue.id}"[-SESSION_ID_CHARS_MAX:]}

    def _history(self, job: Job) -> Sequence[Message]:
        dialogue = self._dialogues[job.position]
        if self._options.answers == "file":
            return dialogue.history(job.turn)
        assert isinstance(dialogue, Conversation)  # load.check
        live = self._live.setdefault(job.position, list(dialogue.opening()))
        live.append(dialogue.question(job.turn))
        return live

    def _goes_on(self, sample: Sample) -> bool:
        if sample.failure is None:
            self._failures_in_a_row = 0
            return True
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= CONSECUTIVE_FAILURES_MAX and not self._options.keep_going:
            self.over.set()
        # Without its answer the next prompt would be another conversation's.
        return self._options.answers == "file"

    def spoken(self) -> tuple[Dialogue, ...]:
        """Return the dialogues with the histories that were sent."""
        if self._options.answers == "file":
            return tuple(self._dialogues)
        return tuple(
            replace(one, messages=tuple(self._live[position]))
            for position, one in enumerate(self._dialogues)
            if position in self._live and isinstance(one, Conversation)
        )


async def _warm_up(
    endpoint: Endpoint, options: ChatOptions, model: str, dialogue: Dialogue
) -> None:
    """Ask prompts as long as the first one but backwards, so that no measured prefix is stored.

    Raises Unavailable if one fails: what cannot be warmed up cannot be measured.
    """
    words = dialogue.history(1)[-1].content.split()[::-1] if options.warmup else []
    for number in range(options.warmup):
        text = " ".join([f"Warm-up {number}:", *words])
        sample = await endpoint.ask(
            [Message("user", text)],
            model=model,
            conversation_id="warm-up",
            turn=1,
            max_tokens=options.max_tokens or MAX_TOKENS,
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
