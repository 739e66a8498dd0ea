"""Threads that send to peers rest while engines of this host copy."""

from __future__ import annotations

import pytest

from kvstore.peer.yielding import CORES_SHARE, REST_S_MAX, Turns, Yielding


@pytest.mark.parametrize("cores", [1, 2, 8])
@pytest.mark.parametrize("senders", [1, 4, 8])
def test_while_engines_copy_all_senders_together_have_one_part_of_the_processors(cores, senders):
    worked_s = 1e-4
    rest_s = Yielding(lambda: True, cores).rest_s(worked_s, senders)
    used = senders * worked_s / (worked_s + rest_s)  # of a processor
    assert used == pytest.approx(min(senders, cores / CORES_SHARE))


def test_with_processors_enough_nobody_rests():
    assert Yielding(lambda: True, 8 * CORES_SHARE).rest_s(1.0, 8) == 0


def test_while_no_engine_copies_nobody_rests():
    assert Yielding(lambda: False, 1).rest_s(1.0, 8) == 0


def test_a_rest_is_shorter_than_the_silence_that_a_peer_bears():
    assert Yielding(lambda: True, 1).rest_s(10.0, 1000) == REST_S_MAX


def test_a_thread_rests_for_its_work_and_not_for_its_waits(monkeypatch):
    rests, clock = [], iter([0.0, 0.001, 0.001])
    monkeypatch.setattr("kvstore.peer.yielding.time.sleep", rests.append)
    monkeypatch.setattr("kvstore.peer.yielding.time.thread_time", lambda: next(clock))
    turns = Turns(Yielding(lambda: True, 2), lambda: 4)
    turns.rest()
    turns.rest()  # nothing was done since
    assert rests == [pytest.approx(0.001 * (4 * CORES_SHARE / 2 - 1))]
