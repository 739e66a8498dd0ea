"""The circuit breaker as a state machine, on a clock of the test's."""

from kvstore.system.breaker import BACKOFF_MAX_S, BACKOFF_MIN_S, Breaker, State


class Clock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


def test_a_lost_connection_opens_it_at_once_and_once() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.trip()
    clock.time_s += BACKOFF_MIN_S / 2
    breaker.trip()
    assert breaker.state is State.OPEN
    assert breaker.retry_after_s <= BACKOFF_MIN_S / 2 + 1e-9


def test_it_is_half_open_after_the_backoff_but_lets_no_calls_pass() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.trip()
    clock.time_s += BACKOFF_MIN_S
    assert breaker.state is State.HALF_OPEN
    assert not breaker.closed
    assert breaker.retry_after_s == 0.0


def test_failed_probes_double_the_backoff_up_to_its_bound() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.trip()
    waits = []
    for _ in range(8):
        clock.time_s += breaker.retry_after_s
        breaker.probe_failed()
        waits.append(round(breaker.retry_after_s, 6))
    assert waits[:4] == [0.2, 0.4, 0.8, 1.6]
    assert waits[-1] == BACKOFF_MAX_S


def test_a_probe_that_succeeds_closes_it_and_forgets_the_past() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.trip()
    breaker.probe_failed()
    breaker.success()
    assert breaker.closed
    breaker.trip()
    assert breaker.retry_after_s <= BACKOFF_MIN_S + 1e-9
