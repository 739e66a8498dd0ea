"""The demo of llama.cpp: what it asks, and how it judges."""

from __future__ import annotations

import pytest

from kvstore import InvalidRequest
from kvstore_bench.llamacpp.course import PHASES, Seen
from kvstore_bench.llamacpp.verdict import checks, numbers
from kvstore_bench.llamacpp.worker import Answer
from kvstore_bench.llamacpp.workload import Shape, build, text, turns

SHAPE = Shape(prompt_tokens=40, rounds=2, conversations=2, turns=3, shared_tokens=8, first_tokens=4)


def test_prompts_differ_and_conversations_share_their_beginning() -> None:
    workload = build(SHAPE, range(1, 1000), [0])
    assert [len(prompt) for prompt in workload.prompts] == [40, 40]
    assert workload.prompts[0][:1] == workload.prompts[1][:1] == [0]
    assert workload.prompts[0][1] != workload.prompts[1][1]
    one, two = workload.conversations
    assert one[0][:8] == two[0][:8]
    assert one[0][8:] != two[0][8:]
    assert [len(said) for said in one] == [12, 64, 64]


def test_conversations_take_turns() -> None:
    workload = build(SHAPE, range(1, 1000), [0])
    assert [index for index, _ in turns(workload.conversations)] == [0, 1] * 3


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too short"):
        build(SHAPE, range(50), [0])
    assert len(text()) > 500_000


def answer(ttft_s: float, said: int = 1, **more: int) -> Answer:
    counts = {"state_bytes": 100, "stored_bytes": 0, "loaded_tokens": 0, **more}
    return Answer(ttft_s, 2 * ttft_s, [said], **counts)


def seen(ttft_s: float, said: int, chat_bytes: int) -> dict[str, Seen]:
    phases = dict.fromkeys(PHASES, [answer(ttft_s, said)] * 3)
    return {
        "none": Seen({"first": [answer(2.0)] * 3}, [answer(1.0)] * 4),
        "kvstore": Seen(phases, [answer(0.5)] * 4, chat_bytes),
    }


def test_ratios_bytes_and_answers_are_judged() -> None:
    found = numbers(seen(0.06, 1, 120))
    assert found["ttft_ratio_restart"] == pytest.approx(0.03)
    assert found["bytes_vs_snapshots"] == pytest.approx(0.3)
    assert (found["different_answers"], found["chat_ttft_vs_none"]) == (0, 0.5)
    assert len(checks(found)) == 5
    assert all(check.passed for check in checks(found))


def test_the_default_has_fields_of_its_own() -> None:
    sides = seen(0.06, 1, 120)
    sides["default"] = Seen(dict.fromkeys(PHASES, [answer(0.04)] * 3), [answer(0.2, 7)] * 4, 80)
    found = numbers(sides)
    assert (found["default_ttft_ratio_same"], found["default_chat_ttft_s"]) == (0.02, 0.2)
    assert (found["default_chat_different_answers"], found["chat_different_answers"]) == (4, 0)
    assert found["different_answers"] == 0
    assert all(check.passed for check in checks(found))
    assert "slower_than_disk" not in found


def test_rows_in_which_the_disk_cache_is_faster_are_named() -> None:
    sides = seen(0.06, 1, 120)
    sides["disk"] = Seen({**sides["kvstore"].phases, "restart": [answer(0.05)] * 3}, [answer(9.0)])
    sides["disk"].phases |= {"same": [answer(1.0)] * 3, "new_process": [answer(1.0)] * 3}
    sides["disk"].chats *= 4
    assert numbers(sides)["slower_than_disk"] == ["ttft_first_s", "ttft_restart_s"]
    sides["default"] = Seen(dict.fromkeys(PHASES, [answer(0.04)] * 3), [answer(9.5)] * 4, 80)
    found = numbers(sides)
    assert found["default_slower_than_disk"] == ["chat_ttft_s", "chat_total_s"]


def test_what_is_not_enough_fails() -> None:
    found = numbers(seen(0.09, 2, 200))
    assert found["different_answers"] == 3 * len(PHASES)
    failed = {check.field for check in checks(found) if not check.passed}
    assert failed == {
        "ttft_ratio_same",
        "ttft_ratio_new_process",
        "bytes_vs_snapshots",
        "different_answers",
    }
