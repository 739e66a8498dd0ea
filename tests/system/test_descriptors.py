"""Links of all listeners together leave descriptors for others, and each listener has its part."""

from __future__ import annotations

import resource

import pytest

from kvstore.system.descriptors import (
    CONNECTIONS_MAX,
    CONNECTIONS_MIN,
    SHARES,
    LinkPool,
    connections_max,
)


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have 160 descriptors, of which links of a kind may have 40."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (160, 160))
    assert 160 // SHARES == 40


def test_who_takes_all_that_it_can_leaves_each_other_its_part() -> None:
    pool = LinkPool(1000)
    greedy, *others = (pool.listener() for _ in range(4))
    while greedy.take():
        pass
    assert greedy.links == 20 + 5
    for other in others:
        while other.take():
            pass
        assert other.links == 5
    greedy.give_back()
    assert others[0].take()
    assert not greedy.take()
    others[0].give_back()
    assert greedy.take()


def test_the_part_of_a_listener_that_is_closed_is_the_others() -> None:
    pool = LinkPool(1000)
    one, other = pool.listener(), pool.listener()
    while one.take():
        pass
    assert one.links == 30
    other.close()
    while one.take():
        pass
    assert one.links == 40


def test_a_link_that_takes_two_descriptors_counts_twice() -> None:
    alone = LinkPool(1000, descriptors=2).listener()
    while alone.take():
        pass
    assert alone.links == 20
    few = LinkPool(4).listener()
    while few.take():
        pass
    assert few.links == 4


def test_an_odd_number_of_links_is_all_used() -> None:
    alone = LinkPool(5).listener()
    while alone.take():
        pass
    assert alone.links == 5


def test_connections_of_grpc_have_half_a_share_at_the_start_and_never_all_of_the_rest() -> None:
    assert [connections_max(listeners) for listeners in (1, 2, 3)] == [20, 10, CONNECTIONS_MIN]


def test_listeners_that_come_one_by_one_stay_within_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 16, 1 << 16))
    at_first = 20
    parts = [connections_max(at_first)] * at_first
    parts += [connections_max(listeners) for listeners in range(at_first + 1, 2 * at_first + 1)]
    assert sum(parts[:at_first]) <= (1 << 16) // SHARES // 2
    assert sum(parts) <= (1 << 16) // SHARES
    assert min(parts) >= 200


def test_without_a_limit_a_listener_has_all_that_there_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (unlimited, unlimited))
    assert connections_max(3) == CONNECTIONS_MAX
