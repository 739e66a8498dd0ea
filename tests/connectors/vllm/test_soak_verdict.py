"""What a soak's looks come to, and what of it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.connectors.vllm.soak_verdict import (
    NONE_MAY_BE,
    Sample,
    failures,
    growth_in_life,
    growth_of,
    line_of,
    reports_of,
)

MIB = 1 << 20
SECONDS = 7200.0


def look(at_s: float, **more: int) -> Sample:
    process = {"rss_anon_bytes": 100 * MIB, "descriptors": 30, "extents": 2, "threads": 20}
    dram = {"used_bytes": MIB, "leased_bytes": 0, "limbo_bytes": 0, "leases": 1}
    return Sample(at_s, process | more, process, dram, 30.0, 40.0, (0.5, 1.0))


def report(samples: list[Sample], **more: Any) -> dict[str, Any]:
    found = dict.fromkeys(NONE_MAY_BE, 0) | {"held": {}}
    used = {"finished": 9, "saved_blocks": 9, "loads": 9, "kept": 9}
    kills = {"daemon": 2, "engine": 1}
    reports = reports_of(samples, SECONDS)
    found |= {"growth_in_life": growth_in_life(samples, SECONDS)}
    return {"seconds": SECONDS, **found, **used, "kills": kills, "reports": reports, **more}


def looks(**last: int) -> list[Sample]:
    """Two looks in each quarter; those of the last one differ."""
    hours = [look(SECONDS / 8 * number) for number in range(6)]
    return hours + [look(SECONDS / 8 * number, **last) for number in (6, 7)]


def test_a_quarter_has_medians_a_hit_ratio_and_p99() -> None:
    samples = [*looks(), look(SECONDS + 9, threads=40)]
    samples[0] = replace(samples[0], answer_s=tuple(map(float, range(200))))
    reports = reports_of(samples, SECONDS)
    assert [each["until_s"] for each in reports] == [1800, 3600, 5400, 7200]
    assert reports[0]["p99_s"] == 199 - 2
    assert reports[-1]["hit_ratio"] == 0.75
    assert reports[-1]["engine"]["threads"] == 20
    assert reports[-1]["answers"] == 6
    assert "30 descriptors, 20 threads" in line_of(reports[0])
    assert not failures(report(looks()))


@pytest.mark.parametrize(
    ("last", "what"),
    [
        ({"rss_anon_bytes": 103 * MIB}, "engine grew by 3.0 %"),
        ({"descriptors": 31}, "engine leaks descriptors: 1"),
        ({"threads": 22}, "engine leaks threads: 2"),
        ({"extents": 3}, "engine leaks extents: 1"),
    ],
)
def test_growth_from_the_second_quarter_to_the_last_fails(last, what) -> None:
    assert failures(report(looks(**last))) == [what]


@pytest.mark.parametrize(
    ("leak", "what"),
    [
        ({"rss_anon_bytes": 103 * MIB}, "engine grew by 3.0 %"),
        ({"descriptors": 31}, "engine leaks descriptors: 1"),
    ],
)
def test_a_leak_of_a_process_that_is_killed_later_fails(leak, what) -> None:
    """Those that come after it are young."""
    samples = looks()
    samples[3] = look(samples[3].at_s, **leak)
    assert failures(report(samples)) == [what]
    assert failures(report([*samples[:3], *samples[4:]])) == [
        "no process was seen twice before the first kill"
    ]


def test_memory_that_goes_up_and_down_is_no_leak() -> None:
    samples = looks()
    samples[3] = look(samples[3].at_s, rss_anon_bytes=130 * MIB)
    assert failures(report(samples)) == ["engine grew by 30.0 %"]
    samples.append(look(samples[3].at_s + 1))
    samples += [look(samples[2].at_s + 1, rss_anon_bytes=130 * MIB)] * 2
    assert not failures(report(samples))


def test_what_the_first_quarter_had_as_well_is_no_leak() -> None:
    samples = looks(descriptors=31, threads=21)
    samples[:2] = [look(each.at_s, descriptors=31, threads=21) for each in samples[:2]]
    assert not failures(report(samples))
    samples[3] = look(samples[3].at_s, descriptors=31)
    assert not failures(report(samples))
    samples[3] = look(samples[3].at_s, descriptors=32)
    assert failures(report(samples)) == ["engine leaks descriptors: 1"]


def test_a_short_run_may_warm_up() -> None:
    grown = report(looks(rss_anon_bytes=150 * MIB), seconds=600.0)
    assert growth_of(grown["reports"])["engine"]["memory_share"] == 0.5
    assert not failures(grown)
    assert not failures(report(looks(threads=24), seconds=600.0))
    assert failures(report(looks(threads=25), seconds=600.0)) == ["engine leaks threads: 5"]
    assert failures(report(looks(rss_anon_bytes=200 * MIB), seconds=600.0))


@pytest.mark.parametrize("name", NONE_MAY_BE)
def test_what_is_wrong_lost_hung_or_held_fails(name) -> None:
    assert failures(report(looks(), **{name: 1})) == [f"{name}: 1"]


@pytest.mark.parametrize("name", ["finished", "saved_blocks", "loads", "kept"])
def test_what_was_not_tried_fails(name) -> None:
    assert failures(report(looks(), **{name: 0})) == [f"no {name}: it was not tried"]


def test_a_run_without_kills_or_without_a_quarter_fails() -> None:
    alive = report(looks(), kills={"daemon": 1, "engine": 0})
    assert failures(alive) == ["engine was never killed"]
    assert failures(report(looks()[:6])) == ["only 3 of 4 quarters were seen"]
