"""What `make test-lmcache` counts of loads that are repeated, and when it fails."""

from __future__ import annotations

from collections.abc import Callable

from kvstore_bench.lmcache.__main__ import broken
from kvstore_bench.lmcache.loads import Found, Loaded

CHUNKS = 32


def answers(*loads: Loaded) -> Callable[[], Loaded]:
    """Return what answers these one after the other, the last one again and again."""
    left = list(loads)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_what_was_wrong_stays_wrong_when_it_is_loaded_again() -> None:
    found = Found()
    lost = found.load_all(answers(Loaded(16, 3), Loaded(20, 1), Loaded(CHUNKS, 0)), CHUNKS)
    assert (lost, found.wrong, found.late, found.verified) == (0, 4, 16, CHUNKS)


def test_what_is_not_found_in_time_is_lost() -> None:
    found = Found()
    assert found.load_all(answers(Loaded(0, 0), Loaded(20, 0)), CHUNKS, again_s=0.2) == 12
    assert (found.late, found.verified) == (CHUNKS, 20)


def test_a_wrong_chunk_of_any_load_fails_the_run() -> None:
    result = {
        "verified": 10_016,
        "wrong": 0,
        "lost": {"daemon": 0},
        "lookup_ms": {"p50": 1.0, "p99": 2.0},
        "lookup_delay_ms": [10.0],
        "lookup_delay_after_ms": {"p99": 1.0},
    }
    assert not broken(result, 10_016)
    found = Found()
    found.load(answers(Loaded(CHUNKS, 1)))
    assert broken({**result, "wrong": found.wrong}, 10_016) == ["wrong = 0"]
