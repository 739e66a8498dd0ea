"""The conversation format: read, written, and refused with the place and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.workloads.workload import (
    Conversation,
    Message,
    dump,
    load,
    parse,
    save,
    transcript,
)

USER, ASSISTANT, SYSTEM = (Message(role, role) for role in ("user", "assistant", "system"))


def test_what_is_saved_is_loaded_unchanged(tmp_path: Path) -> None:
    conversations = [
        Conversation("a", (SYSTEM, USER, ASSISTANT, Message("user", "grüße\n\t"))),
        Conversation("b", (USER,)),
    ]
    save(tmp_path / "chats.json", conversations)
    assert load(tmp_path / "chats.json") == conversations


def test_turns_and_histories_count_user_messages() -> None:
    second = Message("user", "second")
    conversation = Conversation("a", (SYSTEM, USER, ASSISTANT, second, ASSISTANT))
    assert conversation.turns == 2
    assert conversation.question(2) == second
    assert conversation.opening() == (SYSTEM,)
    assert conversation.history(1) == (SYSTEM, USER)
    assert conversation.history(2) == (SYSTEM, USER, ASSISTANT, second)
    assert conversation.first_turns(1).messages == (SYSTEM, USER, ASSISTANT)
    assert conversation.first_turns(5) is conversation


def test_a_transcript_grows_at_its_end_only() -> None:
    messages = [Message("user", "One?"), Message("assistant", " First."), Message("user", "Two?")]
    first = transcript(messages[:1])
    assert first == "User: One?\n\nAssistant:"
    assert transcript(messages).startswith(first + " First.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "non-empty JSON list"),
        ('{"id": "a"}', "non-empty JSON list"),
        ('[{"id": "a"}]', 'conversation 0: expected an object with "id" and "messages"'),
        ('[{"id": 7, "messages": []}]', '"id" must be a non-empty string'),
        ('[{"id": "a", "messages": []}]', '"messages" must be a non-empty list'),
        ('[{"id": "a", "messages": [{"role": "user"}]}]', "message 0: expected exactly the keys"),
        (
            '[{"id": "a", "messages": [{"role": "user", "content": "x", "name": "y"}]}]',
            "message 0: expected exactly the keys",
        ),
        ('[{"id": "a", "messages": [{"role": "tool", "content": "x"}]}]', "unknown role 'tool'"),
        ('[{"id": "a", "messages": [{"role": "user", "content": ["x"]}]}]', "must be a string"),
        ('[{"id": "a", "messages": [{"role": "system", "content": "x"}]}]', "no user message"),
        (
            '[{"id": "a", "messages": [{"role": "user", "content": "x"},'
            ' {"role": "user", "content": "y"}]}]',
            "(id 'a'), message 1: role 'user' where 'assistant' is due",
        ),
        (
            '[{"id": "a", "messages": [{"role": "assistant", "content": "x"}]}]',
            "message 0: role 'assistant' where 'user' is due",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(text.encode())
    assert reason in str(error.value)


def test_an_id_that_occurs_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'a' occurs twice"):
        parse(dump([Conversation("a", (USER,)), Conversation("a", (USER,))]))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"missing\.json: cannot be read: No such file"):
        load(tmp_path / "missing.json")
