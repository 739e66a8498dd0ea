"""The longest are kept, few of them, for a day; what is fast leaves no trace."""

import random

from kvstore.decide.slow_log import KEPT_MAX, KEPT_S, KINDS, SlowLog, Waits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_longest_of_each_kind_are_kept() -> None:
    log, draw = SlowLog(Clock()), random.Random(1)
    times = [draw.random() for _ in range(1000)]
    for kind in KINDS:
        for took_s in times:
            log.note(kind, took_s, blocks=1)
    for kind in KINDS:
        assert [each.took_s for each in log.find(kind)] == sorted(times)[: -KEPT_MAX - 1 : -1]
    found = log.find()
    assert len(found) == len(KINDS) * KEPT_MAX
    assert found == sorted(found, key=lambda each: -each.took_s)
    assert len(log.find("save", over_s=sorted(times)[-3])) == 3
    log.reset()
    assert log.find() == []
    log.note("load", 0.0, blocks=1)
    assert len(log.find("load")) == 1


def test_what_was_slow_yesterday_makes_room() -> None:
    clock = Clock()
    log = SlowLog(clock)
    for _ in range(KEPT_MAX):
        log.note("load", 9.0, blocks=1)
    log.note("load", 1.0, blocks=1)
    assert {each.took_s for each in log.find()} == {9.0}
    clock.now += KEPT_S + 1
    log.tick()
    log.note("load", 1.0, blocks=1)
    assert [each.took_s for each in log.find()] == [1.0]
    assert log.kept_s == KEPT_S


def test_waits_add_up_by_what_was_waited_for_and_are_few() -> None:
    clock = Clock()
    waits = Waits(clock)
    for what, seconds in (("disk", 1.0), ("room", 0.5), ("disk", 2.0)):
        with waits.on(what):
            clock.now += seconds
    assert waits.seconds == {"disk": 3.0, "room": 0.5}
    for number in range(100):
        with waits.on(str(number)):
            pass
    assert len(waits.seconds) == 16
