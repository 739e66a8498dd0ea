"""Where the time of a resumed turn goes: what is made of the moments that the engine tells."""

from __future__ import annotations

import pytest

from kvstore_bench.waterfall.picture import plot
from kvstore_bench.waterfall.stages import STAGES, medians, read_marks, stages_of

LOADED = [
    ("asked", 10.001),
    ("offered", 10.003),
    ("ordered", 10.004),
    ("loaded", 10.02),
    ("computing", 10.021),
    ("computed", 10.1),
]


def test_the_stages_of_a_load_follow_each_other_and_make_the_whole() -> None:
    earlier = [(name, when - 5) for name, when in LOADED]
    again = [("offered", 10.0035), ("computed", 10.2)]
    found = stages_of([*earlier, *LOADED, *again], 10.0, 10.11)
    assert list(found) == list(STAGES)
    assert found["load"] == pytest.approx(16)
    assert sum(found.values()) == pytest.approx(110)


def test_a_hit_of_the_engine_has_no_load() -> None:
    marks = [each for each in LOADED if each[0] not in ("ordered", "loaded")]
    found = stages_of(marks, 10.0, 10.11)
    assert list(found) == ["request", "schedule", "compute", "answer"]
    assert found["schedule"] == pytest.approx(20)
    assert sum(found.values()) == pytest.approx(110)


def test_a_median_needs_every_request() -> None:
    requests = [{"request": 1.0, "load": 4.0}, {"request": 3.0}, {"request": 2.0, "load": 5.0}]
    assert medians(requests) == {"request": 2.0}
    assert medians([]) == {}


def test_a_line_that_is_still_written_is_left_out() -> None:
    assert read_marks("asked 1.5\noffered 2.5\nloa") == [("asked", 1.5), ("offered", 2.5)]


def test_a_picture_is_drawn(tmp_path) -> None:
    stages = {"device": {"request": 1.0, "compute": 70.0}, "dram": dict.fromkeys(STAGES, 5.0)}
    plot(stages, tmp_path / "waterfall.png", title="a turn")
    assert (tmp_path / "waterfall.png").stat().st_size > 5_000
