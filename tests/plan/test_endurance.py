"""A write budget keeps the drives that room and bandwidth need within their endurance."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvstore.plan import Budgeted, Drive, Needs, Sizing, Target, needs_of, size_tiers
from kvstore.plan import within_endurance as found_within
from kvstore.replay import Workload, replay, workload_of
from kvstore.replay.bounds import Bounds
from kvstore.replay.synth import KINDS, synthesize_trace, with_rate
from kvstore.settings import ADMISSIONS

TARGET = Target(hits=0.9, dram_hits=0.3, policy="lru", record_nbytes=64 << 20)
DRIVE = Drive(nbytes=4 << 40, dwpd=1.0, read=6 << 30, write=3 << 30)


@pytest.fixture(scope="module")
def workload() -> Workload:
    demand = replace(KINDS["agent"], context_tokens_max=40_000)
    asked = synthesize_trace(with_rate(demand, 4.0), requests=350, warmup=350, seed=1)
    rows = (each.to_row() for each in asked)
    return workload_of(rows, name="agents", block_tokens=512, warmup=350)


@pytest.fixture(scope="module")
def sizing(workload: Workload) -> Sizing:
    return size_tiers(workload, TARGET)


@pytest.fixture(scope="module")
def needs(sizing: Sizing) -> Needs:
    return needs_of(sizing, DRIVE, bytes_per_token=128 << 10)


@pytest.fixture(scope="module")
def budgeted(workload: Workload, sizing: Sizing, needs: Needs) -> Budgeted:
    found = found_within(workload, sizing, needs, DRIVE)
    assert found is not None
    return found


def test_the_drives_that_room_and_bandwidth_need_are_enough(
    needs: Needs, budgeted: Budgeted
) -> None:
    others = [count for reason, count in needs.drives.items() if reason != "endurance"]
    assert needs.drives["endurance"] > max(others) == budgeted.drives
    allowed = budgeted.drives * DRIVE.nbytes * DRIVE.dwpd
    assert 0 < budgeted.sizing.written_per_day <= allowed
    # A day may see a 24th more than the setting says.
    assert budgeted.write_bytes_per_day * 25 / 24 == pytest.approx(allowed)
    within = needs_of(budgeted.sizing, DRIVE, bytes_per_token=128 << 10)
    assert max(within.drives.values()) <= budgeted.drives


def test_the_hits_are_those_of_a_replay_with_these_settings(
    workload: Workload, sizing: Sizing, budgeted: Budgeted
) -> None:
    setup = budgeted.sizing.result.setup
    assert (setup.admission, setup.dram_blocks) == (
        budgeted.admission,
        sizing.result.setup.dram_blocks,
    )
    assert 0 < setup.write_bytes_per_day <= budgeted.write_bytes_per_day
    again = replay(workload, setup, Bounds(workload))
    assert again.token_hit_ratio == budgeted.sizing.result.token_hit_ratio
    assert again.token_hit_ratio < sizing.result.token_hit_ratio
    assert (
        again.token_hit_ratio
        > replay(
            workload, replace(setup, file_blocks=0, admission="all"), Bounds(workload)
        ).token_hit_ratio
    )
    for admission in ADMISSIONS:
        other = replay(workload, replace(setup, admission=admission), Bounds(workload))
        wrote = other.written_blocks * setup.record_nbytes / budgeted.sizing.seconds * 86400
        if wrote <= budgeted.drives * DRIVE.nbytes * DRIVE.dwpd:
            assert other.token_hit_ratio <= again.token_hit_ratio + 0.01


def test_traffic_of_many_daemons_has_the_budget_of_all_their_drives(
    workload: Workload, sizing: Sizing
) -> None:
    needs = needs_of(sizing, DRIVE, bytes_per_token=128 << 10, scale=10.0)
    found = found_within(workload, sizing, needs, DRIVE, scale=10.0)
    assert found is not None
    assert found.write_bytes_per_day == pytest.approx(found.drives * DRIVE.nbytes * 24 / 25)
    assert 10.0 * found.sizing.written_per_day <= found.drives * DRIVE.nbytes


def test_drives_that_endure_every_write_need_no_budget(
    workload: Workload, sizing: Sizing, needs: Needs
) -> None:
    lasting = replace(DRIVE, dwpd=1000.0)
    needs = needs_of(sizing, lasting, bytes_per_token=128 << 10)
    replays = itertools.count()
    assert found_within(workload, sizing, needs, lasting, progress=lambda: next(replays)) is None
    assert next(replays) == 0
