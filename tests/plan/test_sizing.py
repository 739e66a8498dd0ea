"""Sizes reach their target and hardly more, and drives follow from what was counted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore.plan import Drive, Prices, Sizing, Target, needs_of, size_tiers
from kvstore.replay import Setup, Workload, replay, workload_of
from kvstore.replay.bounds import Bounds
from kvstore.replay.synth import KINDS, synthesize

MIB = 1 << 20
DRIVE = Drive(nbytes=1 << 40, dwpd=1.0, read=1 << 30, write=1 << 30)
TARGET = Target(hits=0.8, dram_hits=0.5, policy="lru", record_nbytes=64 * MIB)


@pytest.fixture(scope="module")
def workload() -> Workload:
    asked = itertools.islice(synthesize(KINDS["chat"], seed=1), 1500)
    return workload_of((each.to_row() for each in asked), name="chat", block_tokens=512)


@pytest.fixture(scope="module")
def sizing(workload: Workload) -> Sizing:
    return size_tiers(workload, TARGET)


def test_the_target_is_reached_and_a_tenth_less_room_would_not_do(
    workload: Workload, sizing: Sizing
) -> None:
    result, setup = sizing.result, sizing.result.setup
    assert result.token_hit_ratio >= 0.8 * result.infinite
    assert result.dram_hit_ratio >= 0.5 * result.token_hit_ratio
    bounds = Bounds(workload)
    alone = Setup(dram_blocks=int(0.9 * setup.file_blocks), record_nbytes=64 * MIB)
    assert replay(workload, alone, bounds).token_hit_ratio < 0.8 * result.infinite
    less = replace(setup, dram_blocks=int(0.9 * setup.dram_blocks))
    fewer = replay(workload, less, bounds)
    assert fewer.dram_hit_ratio < 0.5 * fewer.token_hit_ratio


def test_dram_has_room_to_lease_the_largest_prompt(workload: Workload, sizing: Sizing) -> None:
    little = size_tiers(workload, replace(TARGET, dram_hits=0.0)).result.setup
    largest = max(len(request.blocks) for request in workload.requests)
    assert little.leasable_blocks >= largest


def test_more_hits_take_more_room(workload: Workload, sizing: Sizing) -> None:
    more = size_tiers(workload, replace(TARGET, hits=0.97)).result.setup
    assert more.file_blocks > sizing.result.setup.file_blocks


def test_needs_follow_from_what_was_counted_and_grow_with_the_traffic(sizing: Sizing) -> None:
    result, block = sizing.result, 64 * MIB
    one = needs_of(sizing, DRIVE, bytes_per_token=128 << 10, prefill_tokens_per_s=10_000.0)
    assert one.dram_bytes == result.setup.dram_blocks * block
    assert one.writes_per_day == result.traffic.file_writes * block / sizing.seconds * 86400
    assert one.peak_read == sizing.peak_reads * block / 60 >= one.mean_read
    assert one.break_even == 10_000 * (128 << 10)
    assert one.drives["break-even"] == 2
    ten = needs_of(sizing, DRIVE, bytes_per_token=128 << 10, scale=10.0)
    assert ten.file_bytes == 10 * one.file_bytes
    assert ten.writes_per_day == pytest.approx(10 * one.writes_per_day)
    assert ten.break_even is None
    assert ten.drives["endurance"] == -(-ten.writes_per_day // DRIVE.nbytes)


def test_what_warms_the_tiers_up_is_not_counted(workload: Workload) -> None:
    warm = replace(workload, warmup=500)
    found = size_tiers(warm, TARGET)
    result = found.result
    assert (result.requests, warm.seconds) == (1000, found.seconds)
    assert result.tokens == sum(request.tokens for request in workload.requests[500:])
    node_hits = result.traffic.dram_hits + result.traffic.file_hits
    assert node_hits * 512 / result.tokens == pytest.approx(result.token_hit_ratio)
    assert 0.8 * result.infinite <= result.token_hit_ratio <= result.optimum <= result.infinite
    everything = replay(workload, result.setup, Bounds(workload))
    only = replay(warm, result.setup, Bounds(warm))
    assert only.traffic.dram_writes < everything.traffic.dram_writes
    assert only.traffic.unwritten == 0
    seen: set[int] = set()
    for request in workload.requests[:500]:
        seen.update(request.blocks)
    known = 0
    for request in workload.requests[500:]:
        known += len(seen.intersection(request.blocks))
        seen.update(request.blocks)
    assert result.infinite == pytest.approx(known * 512 / result.tokens)


def test_a_short_trace_is_not_spread_over_a_minute(workload: Workload) -> None:
    requests = [replace(each, at_s=each.at_s / 1000) for each in workload.requests]
    short = size_tiers(replace(workload, requests=requests), TARGET)
    assert short.seconds == pytest.approx(workload.seconds / 1000)
    assert short.peak_s == short.seconds < 60
    needs = needs_of(short, DRIVE, bytes_per_token=1.0)
    assert needs.peak_read >= needs.mean_read
    assert needs.peak_write * 86400 >= needs.writes_per_day


def test_a_hit_costs_its_share_of_what_was_bought(sizing: Sizing) -> None:
    prices = Prices(dram_gib_month=2.0, drive_month=100.0, gpu_hour=3.6)
    needs = needs_of(sizing, DRIVE, bytes_per_token=1.0, prefill_tokens_per_s=1000.0, prices=prices)
    month = 2.0 * needs.dram_bytes / (1 << 30) + 100.0 * max(needs.drives.values())
    hits = sizing.result.hit_requests * 30 * 86400 / sizing.seconds
    assert needs.cost_per_hit == pytest.approx(month / hits)
    assert needs.recompute_per_million_tokens == pytest.approx(1.0)
    needs = needs_of(
        sizing, DRIVE, bytes_per_token=1.0, prefill_tokens_per_s=1000.0, prices=prices, gpus=8
    )
    assert needs.recompute_per_million_tokens == pytest.approx(8.0)


def test_nothing_that_repeats_needs_nothing() -> None:
    asked = list(itertools.islice(synthesize(KINDS["chat"], seed=1), 1))
    alone = workload_of([each.to_row() for each in asked], name="one", block_tokens=512)
    with pytest.raises(InvalidRequest, match="no request of this workload repeats"):
        size_tiers(alone, TARGET)
    with pytest.raises(InvalidRequest, match="from 0 to 1"):
        replace(TARGET, hits=0.0)
