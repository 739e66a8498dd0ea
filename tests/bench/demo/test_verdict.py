"""What counts as passed."""

import os
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from kvstore.model.errors import Unavailable
from kvstore_bench.demo.book import Book
from kvstore_bench.demo.disk import PIECE_NBYTES, PlainReads
from kvstore_bench.demo.engine import Reply
from kvstore_bench.demo.table import checks_table
from kvstore_bench.demo.verdict import (
    LIMITS,
    checks,
    headline,
    phase_summaries,
    wrong_outputs,
)
from kvstore_bench.demo.workload import Tokens, Turn

PAIRS = [(1.0, 1.0)] * 10


def book_with(**ttft_s: float) -> Book:
    """One resumed turn a phase, with the same answer in each."""
    book = Book()
    for phase, value in ttft_s.items():
        add(book, phase, value, (1, 2, 3))
    return book


def add(book: Book, phase: str, ttft_s: float, tokens: Tokens, number: int = 2) -> None:
    book.add(phase, Turn(0, number), Reply(ttft_s, ttft_s + 1, tokens))


def test_ratios_are_of_the_phase_and_the_turns_without_connector() -> None:
    numbers = headline(book_with(none=10.0, dram=1.0, device_dram=0.8), PAIRS, 0, 0)
    assert numbers["ttft_ratio_dram"] == 0.1
    assert numbers["ttft_vs_device_hit_dram"] == 1.25
    assert numbers["ttft_ratio_restart"] is None


def test_what_a_restart_costs_is_compared_with_plain_reads_of_its_bytes() -> None:
    book = book_with(none=10.0, restart=1.0, device_restart=0.7)
    assert headline(book, PAIRS, 0, 0)["restart_extra_vs_disk"] is None
    book.disk_s += [0.1, 0.2, 9.0]
    assert headline(book, PAIRS, 0, 0)["restart_extra_vs_disk"] == pytest.approx(1.5)


def test_plain_reads_are_of_what_files_hold(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        PlainReads(tmp_path)
    with (tmp_path / "a.segment").open("wb") as file:
        file.write(os.urandom(2 * PIECE_NBYTES))
        file.truncate(64 * PIECE_NBYTES)
    reads = PlainReads(tmp_path)
    assert {offset for _, offset in islice(reads._pieces, 9)} == {0, PIECE_NBYTES}
    assert reads.seconds(PIECE_NBYTES // 2) > 0
    assert reads.seconds(5 * PIECE_NBYTES) > 0


def test_phases_that_did_not_run_are_not_judged() -> None:
    judged = {check.field for check in checks(headline(book_with(none=1.0), PAIRS, 0, 0))}
    assert "ttft_ratio_dram" not in judged
    assert {"wrong_outputs", "leaks", "ttft_ratio_cold_upper95"} <= judged


def test_a_ratio_above_its_limit_fails() -> None:
    numbers = headline(book_with(none=10.0, dram=1.3), PAIRS, 0, 0)
    failed = {check.field for check in checks(numbers) if not check.passed}
    assert failed == {"ttft_ratio_dram"}


def test_a_ratio_at_its_limit_passes() -> None:
    limit = LIMITS["ttft_ratio_dram"]
    assert all(check.passed for check in checks({"ttft_ratio_dram": limit}))


def test_what_is_promised_is_shown_as_missed_and_does_not_fail(capsys) -> None:
    numbers = {
        "ttft_vs_device_hit_dram": 1.2,
        "ttft_vs_device_hit_replica": 1.05,
        "restart_extra_vs_disk": 2.0,
    }
    found = checks(numbers)
    assert all(check.passed for check in found)
    assert {check.field: check.promised for check in found if check.missed} == {
        "ttft_vs_device_hit_dram": 1.10,
        "restart_extra_vs_disk": 1.3,
    }
    Console(width=200).print(checks_table(found))
    lines = capsys.readouterr().out.splitlines()
    (dram,) = (line for line in lines if "ttft_vs_device_hit_dram" in line)
    assert f"<= {LIMITS['ttft_vs_device_hit_dram']}" in dram
    assert "1.1 " in dram
    assert "missed" in dram


@pytest.mark.parametrize(
    "field", ["ttft_vs_device_hit_dram", "restart_extra_vs_disk", "loads_failed"]
)
def test_what_is_far_beyond_a_promise_fails(field: str) -> None:
    assert [check.passed for check in checks({field: 40.0})] == [False]


def test_too_few_loads_fail_however_fast_it_was() -> None:
    numbers = {"ttft_ratio_dram": 0.01, "loaded_dram": 0.5}
    failed = {check.field for check in checks(numbers) if not check.passed}
    assert failed == {"loaded_dram"}


def test_one_wrong_token_and_one_leak_fail() -> None:
    failed = {c.field for c in checks({"wrong_outputs": 1, "leaks": 1}) if not c.passed}
    assert failed == {"wrong_outputs", "leaks"}


def test_a_differing_answer_is_found_where_it_differs() -> None:
    book = book_with(none=1.0, dram=1.0)
    add(book, "restart", 1.0, (1, 9))
    wrong = wrong_outputs(book, exact=True)
    assert [(each["phase"], each["at"]) for each in wrong] == [("restart", 1)]


def test_a_shorter_replay_is_compared_as_far_as_it_goes() -> None:
    book = book_with(none=1.0)
    add(book, "dram", 1.0, (1, 2))
    assert wrong_outputs(book, exact=True) == []


def test_first_turns_are_compared_too() -> None:
    book = Book()
    add(book, "first", 1.0, (1, 2), number=1)
    add(book, "cold", 1.0, (7, 2), number=1)
    assert len(wrong_outputs(book, exact=True)) == 1


def test_lower_precision_is_judged_by_its_float32_pass() -> None:
    book = book_with(none=1.0, none32=1.0)
    add(book, "dram", 1.0, (9, 9, 9))
    assert wrong_outputs(book, exact=False) == []
    add(book, "dram32", 1.0, (1, 9, 9))
    assert [each["phase"] for each in wrong_outputs(book, exact=False)] == ["dram32"]


def test_a_turn_that_was_asked_several_times_counts_with_its_median() -> None:
    book = book_with(none=1.0)
    for ttft_s in (0.1, 0.9, 0.2):
        add(book, "dram", ttft_s, (1,))
    assert headline(book, [], 0, 0)["ttft_ratio_dram"] == pytest.approx(0.2)
    assert phase_summaries(book)["dram"]["resumed_ttft_s"]["count"] == 1


def test_a_wrong_answer_in_a_later_pass_is_found() -> None:
    book = book_with()
    add(book, "none", 1.0, (1, 2, 3))
    add(book, "dram", 0.1, (1, 2))
    add(book, "dram", 0.1, (7,))
    (wrong,) = wrong_outputs(book, exact=True)
    assert wrong["got"] == [7]
