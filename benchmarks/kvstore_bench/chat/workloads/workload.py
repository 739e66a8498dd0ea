"""What is asked, in which words, and the file format that conversations come in.

A `Dialogue` is what the runner needs of any input: a `Conversation` here, a recorded session in
`traces`. The file format is the one of vLLM's `benchmarks/multi_turn`: a JSON list of

    {"id": "c0", "messages": [{"role": "user", "content": "..."},
                              {"role": "assistant", "content": "..."}, ...]}

ids are unique, roles alternate and start with the user (one `system` message may stand before
it). The n-th user message is *turn* n, counted from 1. Everything here is pure but `load` and
`save`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvstore.model.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; role is `system`, `user` or `assistant`."""

    role: str
    content: str


class Dialogue(Protocol):
    """Turns, counted from 1, that are asked one after the other."""

    @property
    def id(self) -> str:
        """Return what tells it apart from every other dialogue of the workload."""
        ...

    @property
    def turns(self) -> int:
        """Return how many requests it makes."""
        ...

    def history(self, turn: int) -> tuple[Message, ...]:
        """Return the recorded messages that a turn sends."""
        ...

    def due_s(self, turn: int) -> float | None:
        """Return when a turn is due, in seconds from the start; None leaves it to the load."""
        ...

    def answer_tokens(self, turn: int) -> int | None:
        """Return how long the recorded answer was; None where that is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Workload:
    """Dialogues and where they come from.

    source: JSON-ready parameters, enough to make the same workload again. prescribed: fields of
    `ChatOptions` that belong to the source (the tool whose workload this is sets them).
    """

    dialogues: Sequence[Dialogue]
    source: Mapping[str, Any]
    prescribed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """How many requests there are in all."""
        return sum(dialogue.turns for dialogue in self.dialogues)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation with, where they are known, its recorded answers.

    due and answers hold a value a turn: when it is due (s) and the length of its answer (tokens).
    Empty where the source says nothing. They are not part of the file format.
    """

    id: str
    messages: tuple[Message, ...]
    due: tuple[float, ...] = ()
    answers: tuple[int, ...] = ()

    @property
    def turns(self) -> int:
        """How many user messages there are."""
        return sum(message.role == "user" for message in self.messages)

    def question(self, turn: int) -> Message:
        """Return the user message of a turn, counted from 1."""
        return self.messages[self._index(turn)]

    def due_s(self, turn: int) -> float | None:
        """Return when a turn is due, if the source says so."""
        return self.due[turn - 1] if self.due else None

    def answer_tokens(self, turn: int) -> int | None:
        """Return how long the answer of a turn is to be, if the source says so."""
        return self.answers[turn - 1] if self.answers else None

    def opening(self) -> tuple[Message, ...]:
        """Return what stands before the first user message: a system message, or nothing."""
        return self.messages[: self._index(1)]

    def history(self, turn: int) -> tuple[Message, ...]:
        """Return the recorded messages up to and including the user message of a turn."""
        return self.messages[: self._index(turn) + 1]

    def first_turns(self, turns: int) -> Conversation:
        """Return the conversation cut after `turns` turns (and their answers)."""
        if turns >= self.turns:
            return self
        return replace(
            self,
            messages=self.messages[: self._index(turns + 1)],
            due=self.due[:turns],
            answers=self.answers[:turns],
        )

    def opened_by(self, text: str) -> Conversation:
        """Return the conversation with `text` before its first message: another prefix."""
        first, *rest = self.messages
        return replace(self, messages=(replace(first, content=f"{text} {first.content}"), *rest))

    def _index(self, turn: int) -> int:
        offset = int(self.messages[0].role == "system")
        return offset + 2 * (turn - 1)


def transcript(messages: Sequence[Message]) -> str:
    """Write a history as one prompt for the completions endpoint, ending where the answer starts.

    An answer follows its label without a change (but a space where it has none), so that the
    next prompt repeats the tokens the model itself produced.
    """
    parts = []
    for message in messages:
        gap = "" if message.content[:1].isspace() else " "
        parts.append(f"{message.role.capitalize()}:{gap}{message.content}\n\n")
    return "".join(parts) + "Assistant:"


def fingerprint(dialogues: Sequence[Dialogue]) -> str:
    """Hash what is asked, in which order and when: equal for equal workloads, on any machine."""
    digest = hashlib.sha256()
    for dialogue in dialogues:
        turns = range(1, dialogue.turns + 1)
        plan = [(dialogue.due_s(turn), dialogue.answer_tokens(turn)) for turn in turns]
        digest.update(msgspec.json.encode([dialogue.id, plan]))
        # The last history holds all that was said before it. Sessions whose turns do not grow out
        # of each other are told apart by their plan and their last prompt.
        digest.update(msgspec.json.encode(dialogue.history(dialogue.turns)))
    return digest.hexdigest()


def load(path: Path) -> list[Conversation]:
    """Read conversations. Raises InvalidRequest that names file, place and what is wrong."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from error


def save(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations so that `load`, and vLLM's own benchmark, can read them."""
    try:
        path.write_bytes(dump(conversations))
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be written: {error.strerror}") from error


def dump(conversations: Sequence[Conversation]) -> bytes:
    """Encode conversations as the JSON described above; equal values give equal bytes."""
    items = [{"id": item.id, "messages": item.messages} for item in conversations]
    return msgspec.json.format(msgspec.json.encode(items), indent=1) + b"\n"


def parse(data: bytes) -> list[Conversation]:
    """Decode the JSON described above. Raises InvalidRequest at the first thing that is wrong."""
    try:
        items = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not JSON: {error}") from error
    if not isinstance(items, list) or not items:
        raise InvalidRequest("expected a non-empty JSON list of conversations")
    conversations = [_conversation(position, item) for position, item in enumerate(items)]
    seen: set[str] = set()
    for conversation in conversations:
        if conversation.id in seen:
            raise InvalidRequest(f"conversation id {conversation.id!r} occurs twice")
        seen.add(conversation.id)
    return conversations


def _conversation(position: int, item: Any) -> Conversation:
    where = f"conversation {position}"
    if not isinstance(item, dict) or not {"id", "messages"} <= item.keys():
        raise InvalidRequest(f'{where}: expected an object with "id" and "messages"')
    if not isinstance(item["id"], str) or not item["id"]:
        raise InvalidRequest(f'{where}: "id" must be a non-empty string')
    where += f" (id {item['id']!r})"
    if not isinstance(item["messages"], list) or not item["messages"]:
        raise InvalidRequest(f'{where}: "messages" must be a non-empty list')
    messages = tuple(
        _message(f"{where}, message {index}", message)
        for index, message in enumerate(item["messages"])
    )
    _check_roles(where, [message.role for message in messages])
    return Conversation(item["id"], messages)


def _message(where: str, item: Any) -> Message:
    # Other keys (tool calls, names) would change the prompt; dropping them would measure
    # something else than the file says.
    if not isinstance(item, dict) or item.keys() != {"role", "content"}:
        raise InvalidRequest(f'{where}: expected exactly the keys "role" and "content"')
    if item["role"] not in ("system", "user", "assistant"):
        raise InvalidRequest(f"{where}: unknown role {item['role']!r}")
    if not isinstance(item["content"], str):
        raise InvalidRequest(f'{where}: "content" must be a string')
    return Message(item["role"], item["content"])


def _check_roles(where: str, roles: list[str]) -> None:
    offset = int(roles[0] == "system")
    if len(roles) == offset:
        raise InvalidRequest(f"{where}: no user message")
    for index, role in enumerate(roles[offset:]):
        expected = "assistant" if index % 2 else "user"
        if role != expected:
            raise InvalidRequest(
                f"{where}, message {index + offset}: role {role!r} where {expected!r} is due"
                " (roles alternate and start with the user)"
            )
