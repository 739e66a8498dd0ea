"""Every format is read as what it says, and what is broken is named by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore.replay import Workload, load_workload
from tests.replay.traces import mooncake, write


def load(tmp_path: Path, items: list[Any], **options: Any) -> Workload:
    return load_workload(write(tmp_path / "trace.jsonl", items), **options)


def shapes(workload: Workload) -> list[tuple[float, int, list[int]]]:
    return [(each.at_s, each.tokens, list(each.blocks)) for each in workload.requests]


def test_mooncake_has_milliseconds_and_its_partial_blocks_are_left_out(tmp_path: Path) -> None:
    rows = [mooncake(0, [7, 9], rest=1), mooncake(2.5, [7])]
    workload = load(tmp_path, rows)
    assert (workload.format, workload.block_tokens) == ("mooncake", 512)
    assert shapes(workload) == [(0.0, 1025, [0, 1]), (2.5, 512, [0])]
    assert workload.unique_blocks == len(set(workload.keys)) == 2


def test_requests_without_a_session_go_on_from_each_other(tmp_path: Path) -> None:
    rows = [mooncake(t, ids) for t, ids in enumerate(([1, 2], [1, 3], [1, 2, 4], [1, 3, 5], [6]))]
    sessions = [request.session for request in load(tmp_path, rows).requests]
    assert sessions == [0, 1, 0, 1, 4]


def test_bailian_has_seconds_blocks_of_16_and_chats_that_go_on(tmp_path: Path) -> None:
    row = {"output_length": 1, "type": "text", "turn": 1}
    items = [
        {"chat_id": 5, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40,
         "hash_ids": [1, 2, 3], **row},
        {"chat_id": 6, "parent_chat_id": 5, "timestamp": 61.5, "input_length": 48,
         "hash_ids": [1, 2, 4], **row},
    ]  # fmt: skip
    workload = load(tmp_path, items)
    assert (workload.format, workload.block_tokens) == ("bailian", 16)
    assert shapes(workload) == [(1.5, 40, [0, 1]), (61.5, 48, [0, 1, 2])]
    assert {request.session for request in workload.requests} == {"5"}


def weka(name: str, requests: list[Any]) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "requests": requests}


def asked(t: float, ids: list[int]) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": 64 * len(ids), "out": 5, "hash_ids": ids}


def test_weka_sessions_nest_and_their_ids_are_their_own(tmp_path: Path) -> None:
    deepest = {"t": 2.0, "type": "subagent", "requests": [asked(0.5, [1, 9])]}
    nested = {"t": 1.0, "type": "subagent", "requests": [asked(0.0, [1, 3]), deepest]}
    items = [
        weka("a", [asked(0.0, [1, 2]), nested, asked(5.0, [1, 2, 4])]),
        weka("b", [asked(0.0, [1, 2])]),
    ]
    workload = load(tmp_path, items, window_hours=1.0)
    assert workload.unique_blocks == 5 + 2
    of_a = [request for request in workload.requests if request.session == "a"]
    begin = of_a[0].at_s
    assert [round(r.at_s - begin, 6) for r in of_a] == [0.0, 1.0, 3.5, 5.0]
    assert all(0 <= request.at_s < 3600 + 5 for request in workload.requests)
    assert shapes(workload) == shapes(load(tmp_path, items, window_hours=1.0))
    assert shapes(workload) != shapes(load(tmp_path, items, window_hours=1.0, seed=2))


def test_blocks_are_joined(tmp_path: Path) -> None:
    items = [weka("a", [asked(0.0, [1, 2, 3, 4, 5]), asked(1.0, [1, 2, 3, 6])])]
    workload = load(tmp_path, items, block_tokens=128)
    assert [list(request.blocks) for request in workload.requests] == [[0, 1], [0, 2]]
    with pytest.raises(InvalidRequest, match="blocks of 100 tokens cannot be made of the trace's"):
        load(tmp_path, items, block_tokens=100)


def test_texts_share_blocks_as_far_as_they_agree(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1e15 + 1e6 * i, "input": "x" * 600 + tail, "output": "", "session_id": "s"}
        for i, tail in enumerate(("a" * 200, "b" * 200))
    ]
    workload = load(tmp_path, rows)
    assert workload.block_tokens == 64
    assert [list(r.blocks) for r in workload.requests] == [[0, 1, 2], [0, 1, 3]]
    assert [r.tokens for r in workload.requests] == [200, 200]


def test_conversations_ask_once_per_user_message(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "q" * 300},
        {"role": "assistant", "content": "a" * 300},
        {"role": "user", "content": "r" * 300},
    ]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"id": "c0", "messages": said}, {"id": "c1", "messages": said}]))
    workload = load_workload(path)
    assert workload.format == "conversations"
    assert sorted(len(request.blocks) for request in workload.requests) == [1, 1, 3, 3]
    assert workload.unique_blocks == 3
    first, second = (r.at_s for r in workload.requests if r.session == "c0")
    assert second - first == 30.0


BROKEN = [
    ("{", r"line 2 is no JSON object"),
    ({"timestamp": 1}, r"line 2 has no input_length, output_length: not a line of mooncake"),
    (mooncake(-1, [1]), r'line 2: "timestamp" must be a number from 0'),
    (mooncake(4, [2, 1]), r"line 2 has block 1 after another prefix than line 1"),
    (mooncake(4, [2, 2]), r"line 2 has block 2 after another prefix than line 2"),
    (mooncake(4, []) | {"input_length": 5}, r"line 2 has lengths only: there are no blocks"),
    (mooncake(4, [1]) | {"input_length": 5000}, r"line 2 has 1 blocks of 512 tokens for a prompt"),
    (mooncake(0.5, [1]), r"line 2 goes back in time, from 1 s to 0.5 s: mixed units"),
    (mooncake(1e8, [1]), r"line 2 is 1157 days after line 1: mixed units"),
]


@pytest.mark.parametrize(("broken", "reason"), BROKEN)
def test_a_broken_line_is_named_or_skipped(tmp_path: Path, broken: Any, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [mooncake(1, [1]), broken, mooncake(9, [1, 3])]
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    with pytest.raises(InvalidRequest, match=reason) as error:
        load_workload(path)
    assert str(error.value).startswith(f"{path}: ")
    workload = load_workload(path, lenient=True)
    assert shapes(workload) == [(1.0, 512, [0]), (9.0, 1024, [0, 1])]
    assert workload.skipped == 1
    assert workload.first_skipped.startswith("2")


def recorded(at_s: float, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"at_s": at_s, "block_tokens": 16, "block_nbytes": 4096, "hash_ids": ids, **more}


def test_a_recorded_daemon_has_full_blocks_of_its_own_size(tmp_path: Path) -> None:
    items = [recorded(0.5, [2**63 - 1, 7]), recorded(1.25, [2**63 - 1, 7, 8], session_id="c")]
    workload = load(tmp_path, items)
    assert (workload.format, workload.block_tokens, workload.block_nbytes) == ("kvstore", 16, 4096)
    assert shapes(workload) == [(0.5, 32, [0, 1]), (1.25, 48, [0, 1, 2])]
    assert load(tmp_path, items, block_tokens=32).block_nbytes == 8192


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (recorded(1, [1], block_tokens=32), "line 2 has blocks of 32 tokens, those before it 16"),
        (recorded(1, [1], block_tokens=0), 'line 2: "block_tokens" must be 1 to 65536'),
        (recorded(1, [3, 2]), "line 2 has block 2 after another prefix than line 1"),
        ({"at_s": 1, "block_tokens": 16}, "line 2 has no hash_ids: not a line of kvstore"),
    ],
)
def test_a_broken_line_of_a_recording_is_named_or_skipped(
    tmp_path: Path, broken: dict[str, Any], reason: str
) -> None:
    items = [recorded(0, [1, 2]), broken, recorded(2, [1, 2])]
    with pytest.raises(InvalidRequest, match=reason):
        load(tmp_path, items)
    workload = load(tmp_path, items, lenient=True)
    assert (len(workload.requests), workload.skipped) == (2, 1)


def test_ids_used_again_by_another_session_are_named(tmp_path: Path) -> None:
    rows = [mooncake(0, [1, 2, 3], session_id="a"), mooncake(1, [2, 1], session_id="b")]
    with pytest.raises(InvalidRequest, match="used again by other sessions"):
        load(tmp_path, rows)


def test_nothing_at_all_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the trace is empty"):
        load(tmp_path, [])
    with pytest.raises(InvalidRequest, match=r"unknown format: line 1 has a\. Known formats"):
        load(tmp_path, [{"a": 1}])
    with pytest.raises(InvalidRequest, match="line 1 has no chat_id: not a line of bailian"):
        load(tmp_path, [mooncake(0, [1])], format="bailian")
    with pytest.raises(InvalidRequest, match=r"has no request; line 1 has no chat_id"):
        load(tmp_path, [mooncake(0, [1])], format="bailian", lenient=True)


def test_a_part_of_a_trace_is_replayed(tmp_path: Path) -> None:
    rows = [mooncake(1800 * i, [1, 10 + i]) for i in range(5)]
    assert len(load(tmp_path, rows, requests_max=2).requests) == 2
    within = load(tmp_path, rows, window_hours=1.0)
    assert len(within.requests) == 2
    assert within.unique_blocks == 3


def test_no_more_of_a_long_trace_is_read_than_is_asked_for(tmp_path: Path) -> None:
    rows = [mooncake(t, [1, 10 + t]) for t in range(5)]
    part = load(tmp_path, [*rows, "not a request"], requests_max=5)
    assert len(part.requests) == 5
    assert len(part.keys) == part.unique_blocks == 6
    whole = load(tmp_path, rows)
    assert (shapes(part), part.keys) == (shapes(whole), whole.keys)
    with pytest.raises(InvalidRequest, match="line 6"):
        load(tmp_path, [*rows, "not a request"], requests_max=6)


@pytest.mark.parametrize("lenient", [False, True])
def test_rows_without_tokens_of_a_trace_of_lengths_are_no_bug(
    tmp_path: Path, lenient: bool
) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,0,44\n"
        "2023-11-16 18:17:04.0319600,396,109\n"
    )
    with pytest.raises(InvalidRequest, match=r"lengths only|no request"):
        load_workload(path, lenient=lenient)
