"""How to run: the options of `run_chat`, and what is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.client import EndpointKind
from kvstore_bench.chat.drivers import Arrivals
from kvstore_bench.chat.schedule import Order
from kvstore_bench.chat.workloads.workload import Conversation, Dialogue

MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to run; the dialogues say what.

    model: None asks for the only one served. answers: `live` puts the model's own answers into
    the history, `file` the recorded ones. concurrency: dialogues in flight; None is 1, or all of
    them where requests arrive by a rate or at recorded times. request_rate: requests/s in all, in
    the order of the schedule; client_rate: requests/s of each of `concurrency` clients; neither
    sends the next request when one has ended. arrivals: how random. Dialogues with due times follow
    those, unless a rate is given. turns: first and last turn to ask (a first turn above 1 needs
    `file`). max_tokens: None is what the workload says, or MAX_TOKENS. warmup: unmeasured requests
    before the first. warmup_percent: share of the first requests that is left out of the results.
    slo_*_s: what a request must keep to count as good. body: merged into every request.
    keep_going: do not stop after CONSECUTIVE_FAILURES_MAX failures in a row. seed: of arrivals.
    hints: tell kvstore's connector which conversation a request is of, when it goes on, and which
    request is its last.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    endpoint: EndpointKind = "chat"
    answers: Literal["live", "file"] = "live"
    order: Order = "round-robin"
    concurrency: int | None = None
    request_rate: float | None = None
    client_rate: float | None = None
    arrivals: Arrivals = "poisson"
    turns: tuple[int, int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    warmup: int = 0
    warmup_percent: float = 0.0
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    request_timeout_s: float = 600.0
    seed: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    kvstore_metrics: str | None = None
    keep_going: bool = False
    hints: bool = False

    def request_body(self) -> dict[str, Any]:
        """Return what every request's body holds beside model, messages and max_tokens."""
        body: dict[str, Any] = {"temperature": self.temperature}
        if self.min_tokens is not None:
            body["min_tokens"] = self.min_tokens
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self.body}

    def tokens_of(self, dialogue: Dialogue, turn: int) -> int:
        """Return the longest answer to ask for."""
        return self.max_tokens or dialogue.answer_tokens(turn) or MAX_TOKENS

    def hints_of(self, dialogue: Dialogue, turn: int, last: int) -> dict[str, Any]:
        """Return what is known when a turn is sent; last: the last turn to ask of any dialogue."""
        hints: dict[str, Any] = {"session_id": dialogue.id}
        if turn >= min(last, dialogue.turns):
            return hints | {"end_session": True}
        due_s, next_s = dialogue.due_s(turn), dialogue.due_s(turn + 1)
        if due_s is not None and next_s is not None:
            hints["expect_s"] = max(0.0, next_s - due_s)
        return hints

    def follows_recorded_times(self, dialogues: Sequence[Dialogue]) -> bool:
        """Say whether turns start when their source says; a rate overrules that."""
        rate = self.request_rate or self.client_rate
        return rate is None and dialogues[0].due_s(1) is not None

    def starts_at_given_times(self, dialogues: Sequence[Dialogue]) -> bool:
        """Say whether the loop is open: requests do not wait for others to end."""
        rate = self.request_rate or self.client_rate
        return rate is not None or self.follows_recorded_times(dialogues)

    def span(self, dialogues: Sequence[Dialogue]) -> tuple[int, int]:
        """Return the first and last turn to ask."""
        return self.turns or (1, max(dialogue.turns for dialogue in dialogues))


def check(options: ChatOptions, dialogues: Sequence[Dialogue]) -> None:
    """Refuse a run that cannot be made. Raises InvalidRequest."""
    if not dialogues:
        raise InvalidRequest("there are no conversations to hold")
    if options.concurrency is not None and options.concurrency < 1:
        raise InvalidRequest("concurrency must be at least 1")
    rates = [rate for rate in (options.request_rate, options.client_rate) if rate is not None]
    if any(rate <= 0 for rate in rates):
        raise InvalidRequest("request rate must be above 0 requests per second")
    if len(rates) > 1:
        raise InvalidRequest("give a request rate in all or one of each client, not both")
    if not 0 <= options.warmup_percent < 100:
        raise InvalidRequest("warm-up must be 0 to less than 100 percent of the requests")
    first, last = options.turns or (1, 1)
    if not 1 <= first <= last:
        raise InvalidRequest(f"turns {first}:{last}: 1 <= first <= last must hold")
    if all(dialogue.turns < first for dialogue in dialogues):
        raise InvalidRequest(f"no conversation has a turn {first}")
    if first > 1 and options.answers == "live":
        raise InvalidRequest("starting after turn 1 needs recorded answers (answers: file)")
    for dialogue in dialogues:
        _check_answers(options, dialogue)


def _check_answers(options: ChatOptions, dialogue: Dialogue) -> None:
    if options.answers == "live":
        if not isinstance(dialogue, Conversation):
            raise InvalidRequest("a trace records whole prompts: replay it with answers from file")
    elif isinstance(dialogue, Conversation) and any(
        message.role == "assistant" and not message.content for message in dialogue.messages
    ):
        raise InvalidRequest("this workload has no recorded answers: run it with answers live")
