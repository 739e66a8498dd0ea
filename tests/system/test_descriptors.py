"""Links of all listeners together leave descriptors for others, and each listener has its part."""

from __future__ import annotations

import resource

import pytest

from kvstore.system.descriptors import SHARES, LinkPool


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
