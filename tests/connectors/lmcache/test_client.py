"""The native client against a real daemon: what comes back, what is refused, and how soon."""

from __future__ import annotations

import os
import signal
import statistics
import time

import numpy as np
import pytest

from kvstore import Client as Admin
from kvstore import ConfigError, Incompatible
from kvstore.system import engine_versions
from kvstore.testing.daemon import Daemon
from kvstore.testing.damage import damage_resident
from kvstore.testing.wait import until
from kvstore_lmcache.client import Client
from kvstore_lmcache.names import Names
from kvstore_lmcache.settings import Settings
from tests.connectors.lmcache.conftest import PAGE_NBYTES, WEIGHTS, Native, Pages, object_keys


def test_pages_come_back_byte_for_byte_key_by_key(native: Native) -> None:
    keys, pages = object_keys("a", 40), Pages(40).fill(1)
    assert native.set(keys[:20] + keys[21:], pages.views[:20] + pages.views[21:])
    expected = [True] * 20 + [False] + [True] * 19
    assert native.exists(keys) == expected
    got = Pages(40)
    assert native.get(keys, got.views) == expected
    assert np.array_equal(got.rows[expected], pages.rows[expected])
    assert native.client.counters.as_dict()["loaded"] == 39


def test_nothing_is_shared_by_ranks_groups_models_and_salts(native: Native) -> None:
    """Nor by keys that are the same text once the separators are taken away."""
    chunk = "ab" * 16
    keys = [
        f"m@01000100@0@{chunk}",
        f"m@01000101@0@{chunk}",
        f"m@01000100@1@{chunk}",
        f"n@01000100@0@{chunk}",
        f"m@01000100@0@{chunk}@s",
        f"m@01000100@0@{chunk}@t",
        f"m@01000100@0@{chunk}aa@s",
        f"m@01000100@0@{chunk}@aas",
    ]
    pages = Pages(len(keys)).fill(2)
    for at, key in enumerate(keys):
        assert native.exists([key]) == [False]
        assert native.set([key], [pages.views[at]])
    got = Pages(len(keys))
    assert native.get(keys, got.views) == [True] * len(keys)
    assert np.array_equal(got.rows, pages.rows)


def test_a_record_of_another_length_is_a_miss(native: Native) -> None:
    key, page = object_keys("length", 1), Pages(1).fill(3)
    assert native.set(key, page.views)
    for nbytes in (PAGE_NBYTES // 2, PAGE_NBYTES - 1, PAGE_NBYTES + 4096):
        longer = Pages(1, nbytes)
        assert native.get(key, longer.views) == [False]
        assert not longer.rows.any()
    assert native.exists(key) == [True]


MALFORMED = (
    "",
    "m",
    "m@0@0",
    "m@01000100@0@xyz",
    "m@01000100@0@abc",
    "m@01000100@0@ab@salt@more",
    "m@1@0@ab",
    "m@01000100@0@ab@",
    "m@01000100@0@AB",
    "m" * 5000 + "@01000100@0@ab",
)


def test_malformed_keys_are_misses_beside_a_good_one(native: Native) -> None:
    keys, pages = [*MALFORMED, *object_keys("good", 1)], Pages(len(MALFORMED) + 1).fill(4)
    expected = [False] * len(MALFORMED) + [True]
    assert not native.set(keys, pages.views)
    assert native.exists(keys) == expected
    assert native.get(keys, Pages(len(keys)).views) == expected
    assert native.delete(keys) == expected
    assert native.client.counters.as_dict()["malformed"] == 4 * len(MALFORMED)


def test_pages_beyond_the_bound_and_empty_ones_are_refused(native: Native) -> None:
    keys, small = object_keys("bound", 3), Pages(1).fill(5)
    views = [small.views[0], memoryview(bytearray((4 << 20) + 1)), memoryview(b"")]
    assert not native.set(keys, views)
    assert native.exists(keys) == [True, False, False]
    assert native.client.counters.as_dict()["too_large"] == 2


def test_the_same_key_twice_in_one_batch(native: Native) -> None:
    keys, pages = object_keys("twice", 1) * 2, Pages(1).fill(6)
    assert native.set(keys, pages.views * 2)
    got = Pages(2)
    assert native.get(keys, got.views) == [True, True]
    assert np.array_equal(got.rows, np.repeat(pages.rows, 2, axis=0))


def test_a_store_that_is_full_makes_room_and_says_what_is_left(lmcache: None) -> None:
    with (
        Daemon("dram.capacity=8MiB", "dram.extent=8MiB", file=False) as daemon,
        Native(target=daemon.start().target, page_mib_max=2, save_deadline_s=0.2) as native,
    ):
        keys, pages = object_keys("full", 256), Pages(256).fill(7)
        native.set(keys, pages.views)
        got = Pages(256)
        found = native.get(keys, got.views)
        assert np.array_equal(got.rows[found], pages.rows[found])
        assert 0 < sum(found) < 256


def test_deleted_pages_are_gone(native: Native) -> None:
    keys, pages = object_keys("delete", 4), Pages(4).fill(8)
    assert native.set(keys, pages.views)
    assert native.delete(keys[1:3]) == [True, True]
    assert native.exists(keys) == [True, False, False, True]


def test_what_was_flushed_outlives_sigkill_of_both(lmcache: None, mortal: Daemon) -> None:
    keys, pages = object_keys("kill", 32), Pages(32).fill(9)
    params = {"target": mortal.target, "page_mib_max": 4}
    with Native(**params) as before:
        assert before.set(keys, pages.views)
        assert before.client.flush()
        mortal.kill()
        mortal.start()
        until(lambda: all(before.exists(keys)))  # the client finds it again by itself
    with Native(**params) as after:
        got = Pages(32)
        until(lambda: after.client.available)
        assert all(after.get(keys, got.views))
        assert np.array_equal(got.rows, pages.rows)


def test_a_rotten_record_is_a_miss_and_is_dropped(native: Native, daemon: Daemon) -> None:
    keys, pages = object_keys("rot", 8), Pages(8).fill(10)
    assert native.set(keys, pages.views)
    names = Names(Settings(page_mib_max=4), engine_versions.version("lmcache"))
    place = names.object_place(keys[3], WEIGHTS)
    with Admin(daemon.target) as admin:
        admin.register(place.namespace)
        damage_resident(admin, place.namespace.id, [place.key])
    got, found = Pages(8), [True] * 3 + [False] + [True] * 4
    assert native.get(keys, got.views) == found
    assert np.array_equal(got.rows[found], pages.rows[found])
    assert native.set(keys[3:4], pages.views[3:4])
    assert all(native.get(keys, got.views))


def test_a_stopped_daemon_delays_one_lookup_a_dead_one_none(lmcache: None, mortal: Daemon) -> None:
    with Native(target=mortal.target, page_mib_max=4) as native:
        keys, pages = object_keys("stop", 16), Pages(16).fill(11)
        assert native.set(keys, pages.views)
        until(lambda: all(native.exists(keys)))
        os.kill(mortal.pid, signal.SIGSTOP)
        try:
            took = []
            for _ in range(50):
                began = time.perf_counter()
                assert native.exists(keys) == [False] * 16
                took.append(time.perf_counter() - began)
                assert native.get(keys, Pages(16).views) == [False] * 16
        finally:
            os.kill(mortal.pid, signal.SIGCONT)
        assert max(took) < 0.5  # exactly how long is measured by `make test-lmcache`
        assert statistics.median(took) < 0.02
        until(lambda: all(native.exists(keys)))
        check_dead(native, mortal)


def check_dead(native: Native, daemon: Daemon) -> None:
    keys, pages = object_keys("dead", 4), Pages(4).fill(12)
    daemon.kill()
    before = native.client.counters.as_dict()["away"]
    until(lambda: not native.client.available)
    began = time.perf_counter()
    assert native.exists(keys) == native.get(keys, pages.views) == [False] * 4
    assert not native.set(keys, pages.views)
    assert time.perf_counter() - began < 0.1
    assert native.client.counters.as_dict()["away"] == before + 12


def test_a_daemon_that_comes_later_is_found(lmcache: None) -> None:
    with Daemon() as daemon, Native(target=daemon.target, page_mib_max=4) as native:
        keys, pages = object_keys("later", 2), Pages(2).fill(13)
        assert not native.set(keys, pages.views)
        daemon.start()
        until(lambda: native.set(keys, pages.views))
        until(lambda: native.exists(keys) == [True, True])


def test_what_is_under_way_at_the_end_is_waited_for(native: Native) -> None:
    keys, pages = object_keys("close", 64), Pages(64).fill(14)
    for _ in range(8):
        native.client.submit_batch_set(keys, pages.views)
    native.client.close()
    native.client.close()
    assert native.client.drain_completions() or native.client.counters.as_dict()["saved"]
    assert native.client.counters.as_dict()["saved"] == 8 * 64


def test_over_in_flight_max_is_refused_and_counted(daemon: Daemon, lmcache: None) -> None:
    with Native(target=daemon.target, page_mib_max=4, in_flight_max=1) as native:
        keys, pages = object_keys("busy", 32), Pages(32).fill(15)
        until(lambda: native.set(keys[:1], pages.views[:1]))
        numbers = [native.client.submit_batch_set(keys, pages.views) for _ in range(20)]
        outcomes = [native._outcome(number) for number in numbers]
        refused = [error for ok, error, _ in outcomes if not ok]
        assert refused
        assert native.client.counters.as_dict()["busy"] == 32 * len(refused)


@pytest.mark.parametrize(
    "params",
    [
        {"socket": "unix:/x"},
        {"target": "127.0.0.1:7700"},
        {"lookup_deadline_s": 0},
        {"page_mib_max": 4096},
        {"page_mib_max": "64"},
        {"weights_id": 7},
    ],
)
def test_unknown_and_malformed_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="known keys: target, "):
        Client(**params)


def test_an_unknown_version_is_refused_unless_it_is_to_be_tried(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(engine_versions.ALLOW, raising=False)
    monkeypatch.setattr(engine_versions, "version", lambda _: "0.9.0")
    with pytest.raises(Incompatible, match=r"0\.9\.0 is not tested .* 0\.5\.6; .*allow_untested"):
        Client(target=daemon.target)
    with Native(target=daemon.target, allow_untested=True, page_mib_max=4) as native:
        keys, pages = object_keys("untested", 1), Pages(1).fill(16)
        until(lambda: native.set(keys, pages.views))


def test_without_lmcache_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise engine_versions.PackageNotFoundError(name)

    monkeypatch.setattr(engine_versions, "version", version)
    with pytest.raises(Incompatible, match=r"kvstore-tiers\[lmcache\]"):
        Client()


def test_what_operators_see(native: Native, daemon: Daemon) -> None:
    keys, pages = object_keys("seen", 3, model="org/seen"), Pages(3).fill(17)
    assert native.set(keys, pages.views)
    with Admin(daemon.target) as admin:
        (use,) = [each for each in admin.admin.namespaces() if each.model == "org/seen"]
        assert use.namespace is not None
        engine = dict(use.namespace.identity)["engine"]
        assert engine == f"lmcache {engine_versions.version('lmcache')}"
        assert use.blocks == 3


def test_a_daemon_that_takes_few_keys_at_once_has_all_pages(lmcache: None) -> None:
    with (
        Daemon("limits.batch_keys_max=16") as daemon,
        Native(target=daemon.start().target, page_mib_max=4, lookup_deadline_s=10) as native,
    ):
        keys, pages, got = object_keys("few", 50), Pages(50).fill(18), Pages(50)
        assert native.set(keys, pages.views)
        assert native.exists(keys) == [True] * 50
        assert native.get(keys, got.views) == [True] * 50
        assert np.array_equal(got.rows, pages.rows)
        assert native.delete(keys) == [True] * 50
        assert native.exists(keys) == [False] * 50


def test_a_task_that_comes_while_the_client_closes_ends_as_well(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` waits for tasks that have begun, but not for ever."""
    keys, pages = object_keys("gone", 2), Pages(2).fill(19)
    native.client._client.close()
    monkeypatch.setattr(Admin, "available", True)  # as it was a moment before
    assert native.exists(keys) == native.get(keys, pages.views) == [False, False]
    assert not native.set(keys, pages.views)
    assert native.client._in_flight == 0
