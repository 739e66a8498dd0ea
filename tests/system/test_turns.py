"""Turns at a pool of threads: by weight and bytes, and never behind another user's queue."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from kvstore.system.turns import QUANTUM_NBYTES, Sized, TurnPool


def served(weights: dict[str, float], jobs: int, nbytes: int, count: int) -> dict[str, int]:
    """Queue jobs of each user behind a closed gate, open it, and count the first ones served."""
    pool, gate = TurnPool(1, "test-turns"), threading.Event()
    first = pool.user(1.0).submit(gate.wait)
    order: list[str] = []
    futures = []
    for name, weight in weights.items():
        user = pool.user(weight)
        futures += [user.submit(Sized(lambda n=name: order.append(n), nbytes)) for _ in range(jobs)]
    gate.set()
    for future in [first, *futures]:
        future.result(10)
    pool.close()
    return {name: order[:count].count(name) for name in weights}


def test_users_of_one_weight_move_the_same_bytes() -> None:
    found = served({"a": 1.0, "b": 1.0}, 100, QUANTUM_NBYTES, 100)
    assert abs(found["a"] - found["b"]) <= 1


def test_a_heavier_user_moves_more() -> None:
    found = served({"light": 1.0, "heavy": 3.0}, 200, QUANTUM_NBYTES, 200)
    assert 2.8 <= found["heavy"] / found["light"] <= 3.2


def test_a_long_queue_delays_another_user_by_a_quantum() -> None:
    pool, gate = TurnPool(1, "test-turns"), threading.Event()
    noisy, quiet = pool.user(1.0), pool.user(1.0)
    noisy.submit(gate.wait)
    order: list[str] = []
    jobs = [noisy.submit(Sized(lambda: order.append("noisy"), 1 << 20)) for _ in range(1000)]
    jobs.append(quiet.submit(Sized(lambda: order.append("quiet"), 1 << 20)))
    gate.set()
    for job in jobs:
        job.result(10)
    pool.close()
    assert order.index("quiet") <= 4


def test_errors_and_cancels_are_those_of_the_job() -> None:
    pool, gate = TurnPool(1, "test-turns"), threading.Event()
    user = pool.user(1.0)
    user.submit(gate.wait)
    failing, cancelled = user.submit(int, "x"), user.submit(int, "1")
    assert cancelled.cancel()
    gate.set()
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(10)
    with pytest.raises(CancelledError):
        cancelled.result(10)
    assert user.submit(int, "7").result(10) == 7
    pool.close()
