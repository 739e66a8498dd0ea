"""The workload of SGLang's `bench_multiturn` (benchmark/hicache): clients with growing histories.

`num_clients` clients ask `num_rounds` times each: first `request_length` tokens, then
`sub_question_input_length` more after each answer. Requests start at `request_rate` a second,
at most `max_parallel` at once, in the order of `ready_queue_policy` among the clients that may go
on; `enable_round_barrier` lets no round start before the one before it has ended. Answers are
exactly `output_length` tokens (`ignore_eos`).
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.workloads.generator import START_WORDS, Vocabulary, draw_text, spell
from kvstore_bench.chat.workloads.workload import Conversation, Message, Workload

NAME = "bench-multiturn"


@dataclass(frozen=True, slots=True)
class BenchMultiturn:
    """Parameters and defaults as SGLang's tool has them; lengths in words, or tokens.

    sub_question_input_length: 0 is request_length. min_rounds, max_rounds: each client's number of
    rounds is drawn between them; 0 is num_rounds.
    """

    num_clients: int = 256
    max_parallel: int = 128
    request_length: int = 512
    output_length: int = 64
    num_rounds: int = 5
    min_rounds: int = 0
    max_rounds: int = 0
    distribution: str = "poisson"
    request_rate: float | None = 1.0
    sub_question_input_length: int = 0
    ready_queue_policy: str = "random"
    enable_round_barrier: bool = False


def bench_multiturn(shape: BenchMultiturn, vocabulary: Vocabulary, *, seed: int) -> Workload:
    """Make the clients of a shape."""
    low, high = shape.min_rounds or shape.num_rounds, shape.max_rounds or shape.num_rounds
    sizes = (shape.num_clients, shape.max_parallel, shape.request_length, shape.output_length, low)
    if min(sizes) < 1 or low > high:
        raise InvalidRequest(
            "--num-clients, --max-parallel, --request-length, --output-length and the number of"
            " rounds must be above 0, and --min-rounds no more than --max-rounds"
        )
    draw = random.Random(f"kvstore-bench/{NAME}/{seed}")
    rounds = [low + int(draw.random() * (high - low + 1)) for _ in range(shape.num_clients)]
    dialogues = [_client(n, count, shape, vocabulary, seed) for n, count in enumerate(rounds)]
    prescribed: dict[str, Any] = {
        "answers": "live",
        "order": "barrier" if shape.enable_round_barrier else shape.ready_queue_policy,
        "concurrency": shape.max_parallel,
        "request_rate": shape.request_rate,
        "arrivals": shape.distribution,
        "ignore_eos": True,
    }
    return Workload(dialogues, {"format": NAME, **asdict(shape), "seed": seed}, prescribed)


def _client(
    number: int, rounds: int, shape: BenchMultiturn, vocabulary: Vocabulary, seed: int
) -> Conversation:
    stream = random.Random(f"kvstore-bench/{NAME}/{seed}/{number}")
    start = spell(number, vocabulary.words, START_WORDS)
    further = shape.sub_question_input_length or shape.request_length
    messages = [Message("user", draw_text(stream, vocabulary, shape.request_length, start))]
    for _ in range(rounds - 1):
        messages.append(Message("assistant", ""))
        messages.append(Message("user", draw_text(stream, vocabulary, further)))
    answers = (shape.output_length,) * rounds
    return Conversation(f"client-{number}", tuple(messages), answers=answers)
