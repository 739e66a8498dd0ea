"""The workload of LMCache's `multi-round-qa`: users who join, ask at a steady pace, and leave.

`num_users` users are there at any time. Each asks every num_users / qps seconds, `num_rounds`
times, and a new user joins whenever one has left. Its first request comes at once, so in all there
are qps * num_rounds / (num_rounds - 1) requests a second, as in the original. The run starts as if
it had been going on: the users of the first moment have rounds behind them. A prompt is a system
prompt that all users share, a history of the user's own, and a question; later rounds go on from
the server's answers.

Where this differs: the text is words of a list instead of one repeated word, and a round that
starts late (the answer before it came late) does not move the ones after it, so `queue_ms` shows
what a server that falls behind costs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.workloads.generator import START_WORDS, Vocabulary, draw_text, spell
from kvstore_bench.chat.workloads.workload import Conversation, Message, Workload

NAME = "multi-round-qa"
QUESTION_TOKENS = 16
USERS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class MultiRoundQA:
    """Parameters as LMCache's tool has them; lengths in words, or tokens with a tokenizer.

    time: seconds in which requests are started. init_user_id: the id before the first user's; a
    run with other ids shares nothing with this one but the system prompt.
    """

    num_users: int = 15
    num_rounds: int = 20
    qps: float = 0.1
    shared_system_prompt: int = 1000
    user_history_prompt: int = 20000
    answer_len: int = 100
    time: float = 100.0
    init_user_id: int = 0


@dataclass(frozen=True, slots=True)
class User:
    """When a user asks, in seconds from the start."""

    id: int
    due_s: tuple[float, ...]


def multi_round_qa(shape: MultiRoundQA, vocabulary: Vocabulary, *, seed: int) -> Workload:
    """Make the users of a shape. Raises InvalidRequest if it has no request within its time."""
    if min(shape.num_users, shape.num_rounds, shape.answer_len) < 1 or shape.qps <= 0:
        raise InvalidRequest("--num-users, --num-rounds, --answer-len and --qps must be above 0")
    shared = _text(f"{seed}/system", vocabulary, shape.shared_system_prompt)
    dialogues = [_dialogue(user, shape, vocabulary, shared, seed) for user in users(shape)]
    if not dialogues:
        raise InvalidRequest(f"no user asks anything within --time {shape.time:g} s")
    dialogues.sort(key=lambda dialogue: dialogue.due[0])
    source = {"format": NAME, **asdict(shape), "seed": seed}
    return Workload(dialogues, source, {"answers": "live"})


def users(shape: MultiRoundQA) -> Iterator[User]:
    """Yield the users who ask within the time, those of the first moment first."""
    gap_s = shape.num_users / shape.qps
    alive_s = gap_s * (shape.num_rounds - 1)
    # With a single round nobody stays: users come at the rate of the requests.
    between_s = alive_s / shape.num_users or 1 / shape.qps
    number = shape.init_user_id
    for place in range(shape.num_users):
        number += 1
        offset_s = alive_s - place * between_s
        passed = int(offset_s / gap_s) + 1
        last_s = -offset_s + (passed - 1) * gap_s
        left = range(1, shape.num_rounds - passed + 1)
        yield from _user(number, [last_s + n * gap_s for n in left], shape.time)
    joined = 0
    while joined * between_s <= shape.time and joined < USERS_MAX:
        number += 1
        start_s = joined * between_s
        rounds = range(shape.num_rounds)
        yield from _user(number, [start_s + n * gap_s for n in rounds], shape.time)
        joined += 1


def _user(number: int, due_s: list[float], time_s: float) -> Iterator[User]:
    within = tuple(max(0.0, at_s) for at_s in due_s if at_s <= time_s)
    if within:
        yield User(number, within)


def _dialogue(
    user: User, shape: MultiRoundQA, vocabulary: Vocabulary, shared: str, seed: int
) -> Conversation:
    name = spell(user.id, vocabulary.words, START_WORDS)
    own = _text(f"{seed}/user/{user.id}", vocabulary, shape.user_history_prompt, name)
    messages = []
    for turn in range(len(user.due_s)):
        question = _text(f"{seed}/{user.id}/{turn}", vocabulary, QUESTION_TOKENS)
        opening = [shared, own] if not turn else []
        text = " ".join(part for part in (*opening, question) if part)
        messages += [Message("user", text), Message("assistant", "")]
    # There are no recorded answers; what stands last is a question.
    return Conversation(
        f"user-{user.id}",
        tuple(messages[:-1]),
        due=user.due_s,
        answers=(shape.answer_len,) * len(user.due_s),
    )


def _text(name: str, vocabulary: Vocabulary, size: int, start: list[str] | None = None) -> str:
    if size < 1:
        return ""
    stream = random.Random(f"kvstore-bench/{NAME}/{name}")
    return draw_text(stream, vocabulary, size, start or [])
