"""Traces: every format is read, prompts share prefixes where the blocks do, times are kept."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.traces import Window, load_trace
from kvstore_bench.chat.traces.prompts import SPELL_WORDS, BlockText
from kvstore_bench.chat.workloads.generator import Vocabulary
from kvstore_bench.chat.workloads.workload import Workload, fingerprint

TEXT = BlockText(Vocabulary(), seed="0")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def mooncake(at_ms: float, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {
        "timestamp": at_ms, "input_length": tokens, "output_length": 7, "hash_ids": ids, **more,
    }  # fmt: skip


def prompts(workload: Workload) -> list[list[str]]:
    return [
        dialogue.history(turn)[0].content.split()
        for dialogue in workload.dialogues
        for turn in range(1, dialogue.turns + 1)
    ]


def due(workload: Workload) -> list[tuple[float | None, ...]]:
    return [
        tuple(dialogue.due_s(turn) for turn in range(1, dialogue.turns + 1))
        for dialogue in workload.dialogues
    ]


def shared_words(a: list[str], b: list[str]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


ids = st.lists(st.integers(0, 6), max_size=6)


@given(ids, ids, st.integers(8, 40))
def test_prompts_share_just_the_blocks_that_the_trace_shares(
    a: list[int], b: list[int], block_tokens: int
) -> None:
    texts = []
    for own, names in (("a", a), ("b", b)):
        tokens = block_tokens * len(names) + block_tokens // 2
        text = TEXT.prompt(names, scope="", block_tokens=block_tokens, tokens=tokens, own=own)
        assert len(text.split()) == tokens
        texts.append(text.split())
    blocks = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    shared = blocks if blocks is not None else min(len(a), len(b))
    assert shared * block_tokens <= shared_words(*texts) < shared * block_tokens + SPELL_WORDS


def test_scopes_and_seeds_share_nothing() -> None:
    texts = [
        BlockText(Vocabulary(), seed=seed).prompt(
            [1, 2], scope=scope, block_tokens=64, tokens=128, own=""
        )
        for seed, scope in (("0", "a"), ("0", "b"), ("1", "a"))
    ]
    assert all(
        shared_words(texts[i].split(), texts[j].split()) < SPELL_WORDS
        for i, j in ((0, 1), (0, 2), (1, 2))
    )


def test_mooncake_rows_become_requests_at_their_times(tmp_path: Path) -> None:
    rows = [mooncake(9000, 1100, [0, 1, 2]), mooncake(3000, 600, [0, 5]), mooncake(9000, 3, [6])]
    path = write(tmp_path / "trace.jsonl", rows)
    workload = load_trace(path, Window(speed=2))
    assert due(workload) == [(0.0,), (3.0,), (3.0,)]
    first, second, third = prompts(workload)
    assert [len(first), len(second), len(third)] == [600, 1100, 3]
    assert 512 <= shared_words(first, second) < 512 + SPELL_WORDS
    assert workload.dialogues[0].answer_tokens(1) == 7
    assert workload.prescribed["answers"] == "file"
    assert fingerprint(workload.dialogues) == fingerprint(load_trace(path, Window(2)).dialogues)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert prompts(load_trace(packed, Window())) == prompts(workload)


def test_sessions_of_a_trace_are_asked_in_turn(tmp_path: Path) -> None:
    rows = [
        mooncake(0, 20, [1], session_id="x"),
        mooncake(1000, 30, [1], session_id="y"),
        mooncake(61000, 40, [1], session_id="x"),
    ]
    path = write(tmp_path / "trace.jsonl", rows)
    assert due(load_trace(path, Window())) == [(0.0, 61.0), (1.0,)]
    assert due(load_trace(path, Window(gap_cap_s=5))) == [(0.0, 5.0), (1.0,)]
    assert due(load_trace(path, Window(start_s=0.5))) == [(0.0,), (60.0,)]
    assert due(load_trace(path, Window(end_s=61))) == [(0.0,), (1.0,)]
    assert due(load_trace(path, Window(requests=1))) == [(0.0,)]
    assert due(load_trace(path, Window(sessions=1, turns=1))) == [(0.0,)]


def test_bailian_chats_go_on_from_their_parents(tmp_path: Path) -> None:
    rows = [
        {"chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text", **mooncake(10, 20, [3, 4])},
        {"chat_id": 2, "parent_chat_id": -1, "turn": 1, "type": "text", **mooncake(11, 5, [9])},
        {"chat_id": 7, "parent_chat_id": 1, "turn": 2, "type": "text", **mooncake(30, 33, [3, 5])},
    ]
    workload = load_trace(write(tmp_path / "trace.jsonl", rows), Window())
    assert workload.source["format"] == "bailian"
    assert due(workload) == [(0.0, 20.0), (1.0,)]
    assert 16 <= shared_words(*prompts(workload)[:2]) < 16 + SPELL_WORDS


def test_weka_sessions_keep_their_ids_and_clocks_to_themselves(tmp_path: Path) -> None:
    def request(at_s: float, block_ids: list[int]) -> dict[str, Any]:
        return {
            "t": at_s, "type": "n", "in": 64 * len(block_ids), "out": 5, "hash_ids": block_ids,
        }  # fmt: skip

    agent = {"t": 4.0, "type": "subagent", "requests": [request(0.0, [8]), request(2.0, [8, 9])]}
    session = {
        "id": "a", "block_size": 64, "requests": [request(0.0, [1]), agent, request(5.0, [1, 2])],
    }  # fmt: skip
    other = {**session, "id": "b", "requests": [request(0.0, [1])]}
    workload = load_trace(write(tmp_path / "trace.jsonl", [session, other]), Window())
    assert due(workload) == [(0.0, 4.0, 5.0, 6.0), (0.0,)]
    assert workload.prescribed["concurrency"] == 1
    first, spawned, later, _, stranger = prompts(workload)
    assert later[:64] == first
    assert shared_words(first, stranger) < SPELL_WORDS
    assert shared_words(first, spawned) < SPELL_WORDS


def test_agent_traces_have_their_own_text_and_microseconds(tmp_path: Path) -> None:
    separator = "one\u2028two"  # a line separator, but no line of the file
    rows = [
        {"timestamp": 2_000_000, "input": separator, "output": "a b c", "session_id": "s"},
        {"timestamp": 3_500_000, "input": "one two three", "output": "d", "session_id": "s"},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    workload = load_trace(path, Window())
    assert due(workload) == [(0.0, 1.5)]
    assert workload.dialogues[0].history(1)[0].content == separator
    assert workload.dialogues[0].answer_tokens(1) == 3


def test_tables_of_arrivals_become_unique_prompts(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,48,10\r\n2023-11-16 18:17:04.2299600,31,8\r\n"
    )
    workload = load_trace(azure, Window())
    assert due(workload) == [(0.0,), (pytest.approx(0.25),)]
    assert [len(words) for words in prompts(workload)] == [48, 31]
    assert shared_words(*prompts(workload)) < SPELL_WORDS
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log\n"
        "5,s1,2,GPT-4,20,6,26,API log\n8,s1,2,GPT-4,30,0,30,API log\n9,s1,1,GPT-4,40,2,42,x\n"
    )
    assert due(load_trace(burst, Window())) == [(0.0, 4.0)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the trace is empty"),
        ("\n\n", "the trace is empty"),
        ('{"a": 1}', "unknown format: line 1 has a. Known formats"),
        ("x,y\n1,2\n", "unknown format: neither JSON nor a known CSV: x,y"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2: TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,,2\n", "ContextTokens"),
        (json.dumps(mooncake(0, 5, [1])) + "\n{", "line 2 is no JSON object"),
        (json.dumps(mooncake(-1, 5, [1])), '"timestamp" must be a number from 0'),
        (json.dumps(mooncake(0, 10**9, [1])), '"input_length" must be a whole number up to'),
        (json.dumps({**mooncake(0, 5, []), "hash_ids": [[1]]}), '"hash_ids" must be a list'),
        ('{"id": "a", "block_size": 0, "requests": []}', "has no request"),
        ('{"id": "a", "block_size": 0, "requests": 7}', '"requests" must be a list of objects'),
        ('{"timestamp": 1, "input": 2, "output": "", "session_id": 1}', "must be strings"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as error:
        load_trace(path, Window())
    assert str(error.value).startswith(str(path))
    assert reason in str(error.value)


def test_broken_files_and_empty_windows_are_refused(tmp_path: Path) -> None:
    packed = tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress(b"x" * 1000)[:-20])
    for path in (packed, tmp_path / "missing.jsonl"):
        with pytest.raises(InvalidRequest, match="cannot be read"):
            load_trace(path, Window())
    path = write(tmp_path / "trace.jsonl", [mooncake(0, 5, [1])])
    with pytest.raises(InvalidRequest, match="no request of the trace lies between"):
        load_trace(path, Window(start_s=5))


def test_a_tokenizer_leaves_words_of_one_token() -> None:
    def count(text: str) -> int:  # long words are two tokens
        return sum(1 + (len(word) > 6) for word in text.split())

    text = BlockText(Vocabulary(count=count), seed="0")
    prompt = text.prompt([1, 2], scope="", block_tokens=100, tokens=250, own="x")
    assert count(prompt) == 250
    with pytest.raises(InvalidRequest, match="too few words of one token"):
        BlockText(Vocabulary(count=len), seed="0")
