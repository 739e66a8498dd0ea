"""Other tools' workloads: sizes, arrivals and defaults mean what they mean there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.inputs import workload_of
from kvstore_bench.chat.workloads.bench_multiturn import BenchMultiturn, bench_multiturn
from kvstore_bench.chat.workloads.distributions import distribution
from kvstore_bench.chat.workloads.generate_config import generate_from
from kvstore_bench.chat.workloads.generator import Vocabulary
from kvstore_bench.chat.workloads.multi_round_qa import MultiRoundQA, multi_round_qa, users
from kvstore_bench.chat.workloads.workload import Conversation, Workload, fingerprint

# The sample that comes with vLLM's tool, but for the text file and smaller numbers.
CONFIG: dict[str, Any] = {
    "filetype": "generate_conversations",
    "num_conversations": 6,
    "text_files": ["words.txt"],
    "print_stats": False,
    "prompt_input": {
        "num_turns": {"distribution": "uniform", "min": 3, "max": 6},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 50},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 100, "max": 500},
        "num_tokens": {"distribution": "uniform", "min": 60, "max": 70},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 8, "max": 12}},
}


def conversations(workload: Workload) -> list[Conversation]:
    found = [one for one in workload.dialogues if isinstance(one, Conversation)]
    assert len(found) == len(workload.dialogues)
    return found


def generated(directory: Path, *, seed: int = 0, **changes: Any) -> Workload:
    (directory / "words.txt").write_text(" ".join(f"w{number}" for number in range(900)))
    return generate_from({**CONFIG, **changes}, directory, Vocabulary(), seed=seed)


def test_a_configuration_of_vllm_makes_conversations_of_its_sizes(tmp_path: Path) -> None:
    workload = generated(tmp_path)
    made = conversations(workload)
    assert len(made) == 6
    # num_turns counts both roles and is rounded up to an even number.
    assert {one.turns for one in made} <= {2, 3}
    firsts = [one.question(1).content.split() for one in made]
    assert all(first[:50] == firsts[0][:50] for first in firsts)
    assert len({tuple(first[50:53]) for first in firsts}) == 6
    for one in made:
        for turn in range(2, one.turns + 1):
            assert 60 <= len(one.question(turn).content.split()) <= 70
        for turn in range(1, one.turns + 1):
            answer = one.messages[2 * turn - 1]
            assert 8 <= len(answer.content.split()) == one.answer_tokens(turn) <= 12
    assert any("w899 w0" in message.content for one in made for message in one.messages)
    assert workload.prescribed["ignore_eos"] is True


def test_a_configuration_makes_the_same_for_the_same_seed_only(tmp_path: Path) -> None:
    prints = [fingerprint(generated(tmp_path, seed=seed).dialogues) for seed in (1, 1, 2)]
    assert prints[0] == prints[1] != prints[2]
    assert conversations(generated(tmp_path, text_files=[]))[0].turns > 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filetype": "other"}, "filetype"),
        ({"num_conversations": 0}, "num_conversations"),
        ({"num_conversation": 3}, "unknown keys: num_conversation"),
        ({"text_files": ["missing.txt"]}, "missing.txt: No such file"),
        ({"text_files": "words.txt"}, "must be a list"),
        ({"prompt_input": {}}, '"prompt_input" lacks "num_turns"'),
        ({"prompt_output": 3}, '"prompt_output" must be an object'),
    ],
)
def test_a_wrong_configuration_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        generated(tmp_path, **changes)


def draw(size: int = 4000, **config: Any) -> Any:
    return distribution("x", config)(np.random.RandomState(0), size)


def test_distributions_have_the_moments_they_promise() -> None:
    assert set(draw(distribution="constant", value=7)) == {7}
    uniform = draw(distribution="uniform", min=3, max=5)
    assert set(uniform) == {3, 4, 5}
    assert draw(distribution="poisson", alpha=20).mean() == pytest.approx(20, rel=0.05)
    assert draw(distribution="poisson", alpha=20, max=22).max() == 22
    zipf = draw(distribution="zipf", alpha=2.0, max=10)
    assert (zipf.min(), zipf.max()) == (1, 10)
    lognormal = draw(distribution="lognormal", average=1000, median_ratio=0.8)
    assert lognormal.mean() == pytest.approx(1000, rel=0.001)
    assert np.median(lognormal) == pytest.approx(800, rel=0.05)
    direct = draw(distribution="lognormal", mean=3.0, sigma=0.1)
    assert np.median(direct) == pytest.approx(np.exp(3.0), rel=0.05)
    assert draw(distribution="lognormal", average=1000, max=1100).max() == 1100


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (7, "x: expected an object"),
        ({}, "unknown distribution None"),
        ({"distribution": "gauss"}, "unknown distribution 'gauss'"),
        ({"distribution": "constant"}, "constant takes value, given nothing"),
        ({"distribution": "constant", "value": 1, "max": 2}, "constant takes value, given max"),
        ({"distribution": "constant", "value": "1"}, "value must be a number"),
        ({"distribution": "constant", "value": -1}, "value must be at least 0"),
        ({"distribution": "uniform", "min": 5, "max": 3}, "0 < min <= max"),
        ({"distribution": "zipf", "alpha": 1}, "alpha must be above 1"),
        ({"distribution": "lognormal", "mean": 3}, "average, or mean and sigma"),
        ({"distribution": "lognormal", "average": 5, "sigma": 1}, "neither mean nor sigma"),
    ],
)
def test_wrong_distributions_are_refused(config: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        distribution("x", config)


def lmcache_launches(shape: MultiRoundQA, step_s: float = 0.001) -> dict[int, list[float]]:
    """Step LMCache's session manager through time, answers taking no time at all."""
    gap_s = shape.num_users / shape.qps
    between_s = gap_s * (shape.num_rounds - 1) / shape.num_users
    ramp_s = shape.num_users * between_s
    sessions: list[dict[str, Any]] = []
    for number in range(shape.num_users):
        offset_s = ramp_s - number * between_s
        passed = int(offset_s / gap_s) + 1
        last_s = -offset_s + (passed - 1) * gap_s
        sessions.append({"id": number + 1, "asked": passed, "last": last_s, "at": []})
    joined_s = -1e9
    for tick in range(int(shape.time / step_s) + 1):
        now_s = tick * step_s
        if now_s - joined_s >= between_s - step_s / 2:
            sessions.append({"id": len(sessions) + 1, "asked": 0, "last": None, "at": []})
            joined_s = now_s
        for one in sessions:
            due = one["last"] is None or now_s - one["last"] >= gap_s - step_s / 2
            if one["asked"] < shape.num_rounds and due:
                one.update(asked=one["asked"] + 1, last=now_s)
                one["at"].append(now_s)
    return {one["id"]: one["at"] for one in sessions if one["at"]}


@pytest.mark.parametrize(
    "shape",
    [
        MultiRoundQA(num_users=4, num_rounds=5, qps=2.0, time=9.0),
        MultiRoundQA(num_users=3, num_rounds=2, qps=10.0, time=2.0),
    ],
)
def test_users_ask_when_lmcaches_tool_would_have_them_ask(shape: MultiRoundQA) -> None:
    expected = lmcache_launches(shape)
    found = {user.id: list(user.due_s) for user in users(shape)}
    assert found.keys() == expected.keys()
    for name, times in expected.items():
        assert found[name] == pytest.approx(times, abs=0.01)
    total = sum(len(times) for times in found.values())
    # A user's first request comes as it joins, so there is one more than its time has gaps.
    rate = shape.qps * shape.num_rounds / (shape.num_rounds - 1)
    assert total == pytest.approx(rate * shape.time, rel=0.1)


def test_users_with_one_round_come_at_the_rate_of_requests() -> None:
    shape = MultiRoundQA(num_users=4, num_rounds=1, qps=2.0, time=5.0)
    assert [user.due_s for user in users(shape)] == [(n / 2,) for n in range(11)]


def test_users_share_the_system_prompt_and_nothing_else() -> None:
    shape = MultiRoundQA(4, 5, 2.0, shared_system_prompt=30, user_history_prompt=40, time=9.0)
    workload = multi_round_qa(shape, Vocabulary(), seed=0)
    firsts = [one.question(1).content.split() for one in conversations(workload)]
    assert {len(first) for first in firsts} == {30 + 40 + 16}
    assert len({tuple(first[:30]) for first in firsts}) == 1
    assert len({tuple(first[30:33]) for first in firsts}) == len(firsts)
    assert {one.answer_tokens(1) for one in workload.dialogues} == {100}
    later = multi_round_qa(MultiRoundQA(4, 5, 2.0, 30, 40, time=9.0, init_user_id=500),
                           Vocabulary(), seed=0)  # fmt: skip
    other = conversations(later)[0].question(1).content.split()
    assert other[:30] == firsts[0][:30]
    assert tuple(other[30:33]) not in {tuple(first[30:33]) for first in firsts}
    starts = [one.due_s(1) for one in workload.dialogues]
    assert starts == sorted(starts, key=lambda at_s: at_s or 0.0)


def test_clients_of_sglangs_tool_have_its_lengths_and_load() -> None:
    shape = BenchMultiturn(
        num_clients=6, max_parallel=3, request_length=40, output_length=9, num_rounds=3,
        sub_question_input_length=11, request_rate=5.0, enable_round_barrier=True,
    )  # fmt: skip
    workload = bench_multiturn(shape, Vocabulary(), seed=1)
    for client in conversations(workload):
        lengths = [len(client.question(turn).content.split()) for turn in (1, 2, 3)]
        assert lengths == [40, 11, 11]
        assert [client.answer_tokens(turn) for turn in (1, 2, 3)] == [9, 9, 9]
    assert dict(workload.prescribed) == {
        "answers": "live", "order": "barrier", "concurrency": 3, "request_rate": 5.0,
        "arrivals": "poisson", "ignore_eos": True,
    }  # fmt: skip
    mixed = bench_multiturn(BenchMultiturn(50, min_rounds=1, max_rounds=4), Vocabulary(), seed=1)
    assert {one.turns for one in mixed.dialogues} == {1, 2, 3, 4}


def test_options_of_another_workload_are_refused(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"seed": 0, "source": None, "workload": None}
    cases = [
        ({"qps": 1.0}, "--qps is for multi-round-qa"),
        ({"workload": "multi-round-qa", "speed": 2.0}, "--speed is for traces"),
        ({"workload": "bench-multiturn", "turns": 2}, "--turns is for generated text and conv"),
        ({"workload": "bench-multiturn", "source": tmp_path}, "leave out --input"),
        ({"source": tmp_path / "missing"}, "cannot be read: No such file"),
    ]
    for given, reason in cases:
        with pytest.raises(InvalidRequest, match=reason):
            workload_of({**nothing, **given})


def test_files_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    generated(tmp_path)
    files = {
        "generate_conversations": msgspec.json.encode(CONFIG),
        "conversations": b' [{"id": "a", "messages": [{"role": "user", "content": "x"}]}]',
        "mooncake": b'{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": []}',
    }
    for name, data in files.items():
        path = tmp_path / "input"
        path.write_bytes(data)
        workload = workload_of({"seed": 0, "source": path, "workload": None, "turns": 1})
        assert workload.source["format"] == name
        assert {dialogue.turns for dialogue in workload.dialogues} == {1}
