"""Long prompts: what a run watches, judges and refuses. `make long` runs it on a real vLLM."""

from __future__ import annotations

import threading
import time

import pytest
from click.testing import CliRunner

from kvstore import Client
from kvstore.model.block import Group, Namespace
from kvstore.model.errors import Unavailable
from kvstore.model.keys import KeyChain, root_key
from kvstore.testing.daemon import Daemon
from kvstore_bench.demo.machine import describe
from kvstore_bench.long.__main__ import main
from kvstore_bench.long.course import (
    SPARE_TOKENS,
    TITLES,
    Answered,
    Course,
    Plan,
    is_wrong,
    prompt_of,
)
from kvstore_bench.long.model import FIRST_TOKEN, TOKENS_MAX, VOCAB
from kvstore_bench.long.picture import plot
from kvstore_bench.long.snapshots import Snapshot, Snapshots
from kvstore_bench.long.verdict import checks_of, numbers_of

LENGTHS = (8192, 131072)
LOADED = {8192: 8096.0, 131072: 130976.0}  # by a real engine: whole blocks before the last token
SPEC = Namespace(16, (Group("all", 4096),), (("model", "long"),))


def answered(phase: str, length: int, ttft_s: float, *, wrong: bool = False) -> Answered:
    loaded = 0.0 if "cold" in phase else LOADED[length]
    return Answered(phase, length, ttft_s, loaded, 0.1, wrong)


def course_of(tmp_path, *more: Answered) -> Course:
    course = Course(Plan(tmp_path, describe(), LENGTHS, 1, 1), None, None, Snapshots())
    for length in LENGTHS:
        course.answered.append(answered("cold", length, 100.0))
        for phase in ("dram", "file", "restart"):
            course.answered.append(answered(phase, length, 2.0))
    course.answered += [
        answered("small_cold", LENGTHS[-1], 100.0),
        answered("small", LENGTHS[-1], 80),
        answered("killed_save", LENGTHS[-1], 50),
    ]
    course.answered += more
    course.snapshots.taken += [Snapshot(1.0, phase, 1, 8, 0, 0, 1, 0) for phase in TITLES]
    return course


def failed(course: Course) -> set[str]:
    fields = numbers_of(course)
    return {each.field for each in checks_of(fields, LENGTHS[-1], []) if not each.passed}


def test_a_good_run_passes(tmp_path) -> None:
    fields = numbers_of(course_of(tmp_path))
    assert fields["ttft_128k_dram_vs_cold"] == 0.02
    assert fields["ttft_8k_restart_vs_cold"] == 0.02
    assert fields["loaded_share_min"] == 1
    assert not failed(course_of(tmp_path))


@pytest.mark.parametrize(
    ("more", "field"),
    [
        (answered("killed_load", LENGTHS[-1], 1.0, wrong=True), "wrong"),
        (answered("file", LENGTHS[-1], 40.0), "ttft_128k_file_vs_cold"),
        (Answered("starved", LENGTHS[-1], 1.0, 100.0, 0.1, False), "loaded_share_min"),
        (Answered("killed_save", LENGTHS[-1], 1.0, 0.0, 0.1, False), "partly_loaded_tokens_min"),
        (Answered("small", LENGTHS[-1], 1.0, 0.0, 0.1, False), "partly_loaded_tokens_min"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_goes_wrong_is_found(tmp_path, more, field) -> None:
    assert failed(course_of(tmp_path, more)) == {field}


def test_what_exceeds_a_cap_hangs_or_dies_is_found(tmp_path) -> None:
    course = course_of(tmp_path)
    course.snapshots.taken.append(Snapshot(1.0, "cold", 9, 8, 0, 0, 0, over_cap_bytes=1))
    course.hung.append("no answer")
    course.dead.append("engine")
    course.leases_left = 1
    assert failed(course) == {"over_cap_bytes", "hung", "engine_dead", "leases_left"}


def test_a_phase_that_nobody_watched_fails(tmp_path) -> None:
    course = course_of(tmp_path)
    course.snapshots.taken = [each for each in course.snapshots.taken if each.phase != "file"]
    assert failed(course) == {"phases_unseen"}
    course.snapshots.taken = []
    assert numbers_of(course)["phases_unseen"] == len(TITLES)


@pytest.mark.parametrize(
    ("loaded", "answer", "own", "computed", "wrong"),
    [
        (64.0, (1, 2), (1, 2), (1, 2), False),
        (64.0, (1, 3), (1, 3), (1, 2), True),  # what was loaded is in the engine's cache now
        (64.0, (1, 3), (1, 2), (1, 2), True),
        (64.0, (1, 2), (1, 2), None, True),
        (0.0, (1, 3), (1, 2), (1, 2), False),
        (0.0, (1, 3), (1, 3), (1, 2), True),
    ],
)
def test_a_resumed_answer_is_that_of_what_was_computed(loaded, answer, own, computed, wrong):
    assert is_wrong(loaded, answer, own, computed) is wrong


def test_prompts_leave_room_for_their_answers() -> None:
    prompt = prompt_of(TOKENS_MAX, 0)
    assert len(prompt) == TOKENS_MAX - SPARE_TOKENS
    assert all(FIRST_TOKEN <= token < VOCAB for token in prompt)
    assert prompt == prompt_of(TOKENS_MAX, 0) != prompt_of(TOKENS_MAX, 1)


def test_snapshots_follow_a_daemon_and_see_moments() -> None:
    keys = KeyChain(root_key(SPEC.id), 16).update(list(range(64)))
    with Daemon("dram.capacity=16MiB") as daemon, Snapshots() as snapshots:
        daemon.start()
        snapshots.phase = "here"
        snapshots.watch(daemon.target)
        ending = threading.Event()
        meanwhile = threading.Thread(target=ending.wait)
        meanwhile.start()
        with Client(daemon.target) as client:
            client.register(SPEC)
            client.put(SPEC.id, keys, [bytes(4096)] * len(keys))
            there = lambda stats: stats["dram"]["blocks"] == len(keys)  # noqa: E731
            assert snapshots.await_moment(there, meanwhile, 10.0)
            never = lambda stats: stats["leases"] > 0  # noqa: E731
            with pytest.raises(Unavailable, match="has not come"):
                snapshots.await_moment(never, meanwhile, 0.05)
            ending.set()
            meanwhile.join()
            assert not snapshots.await_moment(never, meanwhile, 10.0)
            end = time.monotonic() + 10
            while not snapshots.taken or not snapshots.taken[-1].dram_bytes:
                assert time.monotonic() < end
                time.sleep(0.05)
    last = snapshots.taken[-1]
    assert last.phase == "here"
    assert last.dram_bytes == len(keys) * 4096
    assert last.dram_capacity_bytes == 16 << 20
    assert last.over_cap_bytes == 0
    assert snapshots.rows()[-1]["dram_bytes"] == last.dram_bytes


def test_a_picture_is_drawn(tmp_path) -> None:
    course = course_of(tmp_path)
    taken = [Snapshot(at / 2, "cold", at, 64, 0, 0, at, 0) for at in range(20)]
    plot(course.answered, taken, tmp_path / "long.png", title="long")
    assert (tmp_path / "long.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "lengths", ["", "x", "8192,4096", "100", "8192,8192", "200000", "8192,200000"]
)
def test_lengths_that_make_no_sense_are_refused(lengths) -> None:
    found = CliRunner().invoke(main, ["--lengths", lengths])
    assert found.exit_code == 2
    assert "--lengths" in found.output
