"""KV pages of SGLang's own host pools come back byte for byte, and only to whom they belong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstore import Client as Admin
from kvstore import ConfigError, Incompatible
from kvstore.system import engine_versions
from kvstore.testing.daemon import Daemon
from kvstore.testing.damage import damage_resident
from kvstore.testing.wait import until
from tests.connectors.sglang.inside.engine import (
    Rank,
    config_of,
    fill,
    hashes,
    indices_of,
    mha,
    mla,
    page_of,
)

POOLS = {
    "mha layer_first": lambda: mha("layer_first"),
    "mha page_first": lambda: mha("page_first"),
    "mha page_first_direct": lambda: mha("page_first_direct"),
    "mha page_head": lambda: mha("page_head"),
    "mha fp8": lambda: mha(dtype=torch.float8_e4m3fn),
    "mha of 64 tokens": lambda: mha(page_tokens=64),
    "mha with other values": lambda: mha("page_first", v_dim=32),
    "mla layer_first": lambda: mla("layer_first"),
    "mla page_first": lambda: mla("page_first"),
    "mla page_first_direct": lambda: mla("page_first_direct"),
}


@pytest.mark.parametrize("kind", POOLS)
def test_pages_come_back_byte_for_byte(daemon: Daemon, kind: str) -> None:
    """Into another pool, at other places; all but the one that was not stored."""
    keys, count = hashes(kind, 3), 3
    with (
        Rank(daemon.target, POOLS[kind]()).fill(1) as one,
        Rank(daemon.target, POOLS[kind]()).fill(2) as other,
    ):
        assert one.save(keys[:1] + keys[2:], [2, 0]) == [True] * (count - 1)
        assert one.storage.batch_exists(keys) == 1
        before = [other.page(number) for number in range(4)]
        assert other.load(keys, [3, 1, 0]) == [True, False, True]
        assert (other.page(3), other.page(0)) == (one.page(2), one.page(0))
        assert other.page(2) == before[2]  # nobody asked for it
        assert one.storage._pools["kv"].in_place


@pytest.mark.parametrize("kind", [kind for kind in POOLS if "other values" not in kind])
def test_both_of_sglangs_interfaces_read_each_others_pages(daemon: Daemon, kind: str) -> None:
    keys = hashes(f"generic {kind}", 4)
    with Rank(daemon.target, POOLS[kind]()).fill(3) as rank:
        pool = rank.pool
        starts = [number * pool.page_size for number in range(2)]
        assert rank.save(keys[:2], [0, 1]) == [True, True]
        assert rank.storage.batch_set(keys[2:], [pool.get_data_page(at) for at in starts])
        targets = [torch.zeros_like(pool.get_data_page(0)) for _ in keys]
        found = rank.storage.batch_get(keys, targets)
        expected = [rank.page(0), rank.page(1)] * 2
        assert [bytes(each.view(torch.uint8).numpy().tobytes()) for each in found] == expected
        assert rank.load(keys[2:], [2, 0]) == [True, True]
        assert (rank.page(2), rank.page(0)) == (expected[0], expected[1])
        assert rank.storage.get(keys[3], targets[0]) is targets[0]
        assert rank.storage.get(hashes("nobody's", 1)[0], targets[0]) is None
        assert rank.storage.get(keys[3], torch.zeros(7, dtype=torch.uint8)) is None
        assert rank.storage.get(keys[3]) is None
        assert rank.storage.set(keys[3], None) is False


def test_a_prefix_is_as_long_as_it_is_stored(daemon: Daemon) -> None:
    keys = hashes("prefix", 300)
    with Rank(daemon.target).fill(4) as rank:
        for begin in range(0, 300, 60):
            some = [key for key in keys[begin : begin + 60] if key != keys[250]]
            assert all(rank.save(some, range(len(some))))
        assert rank.storage.batch_exists(keys[:200]) == 200
        assert rank.storage.batch_exists(keys) == 250
        assert rank.storage.batch_exists(keys[251:]) == 49
        assert (rank.storage.exists(keys[0]), rank.storage.exists(keys[250])) == (True, False)
        assert rank.storage.batch_exists([]) == 0


def test_latent_attention_is_stored_once_for_all_ranks(daemon: Daemon) -> None:
    keys = hashes("latent", 4)
    shared = {"is_mla_model": True, "model": "org/latent", "weights": "latent"}
    with (
        Rank(daemon.target, mla(), tp_rank=0, tp_size=2, **shared).fill(5) as first,
        Rank(daemon.target, mla(), tp_rank=1, tp_size=2, **shared) as second,
        Rank(daemon.target, mla(), tp_rank=0, tp_size=1, **shared) as alone,
    ):
        assert all(first.save(keys, range(4)))
        for other in (second, alone):
            assert all(other.load(keys, range(4)))
            assert [other.page(at) for at in range(4)] == [first.page(at) for at in range(4)]
        assert all(second.save(keys, range(4)))
    with Admin(daemon.target) as admin:
        (use,) = [each for each in admin.admin.namespaces() if each.model == "org/latent"]
        assert use.blocks == 4


OTHERS: dict[str, dict[str, Any]] = {
    "another rank": {"tp_rank": 1, "tp_size": 2},
    "another degree": {"tp_rank": 0, "tp_size": 2},
    "another stage": {"pp_rank": 1, "pp_size": 2},
    "another part of the context": {"attn_cp_rank": 1, "attn_cp_size": 2},
    "other weights": {"weights": "another model's"},
}


@pytest.mark.parametrize("what", OTHERS)
def test_nothing_is_shared_with(daemon: Daemon, what: str) -> None:
    keys = hashes(f"not shared with {what}", 2)
    with Rank(daemon.target).fill(6) as one, Rank(daemon.target, **OTHERS[what]) as other:
        assert all(one.save(keys, [0, 1]))
        assert other.storage.batch_exists(keys) == 0
        assert other.load(keys, [0, 1]) == [False, False]
        assert all(other.fill(7).save(keys, [0, 1]))
        assert all(one.load(keys, [2, 3]))
        assert [one.page(2), one.page(3)] == [one.page(0), one.page(1)]


def test_nothing_is_shared_with_pages_of_another_kind(daemon: Daemon) -> None:
    """Pages of just as many bytes, too: of another layout, of another dtype."""
    keys = hashes("kinds", 2)
    pools = [mha("layer_first"), mha("page_first"), mha("page_head"), mha(dtype=torch.float16)]
    with Rank(daemon.target, mha("page_first_direct")).fill(8) as one:
        assert all(one.save(keys, [0, 1]))
        for pool in [*pools, mha(page_tokens=8), mha(heads=1), mla()]:
            with Rank(daemon.target, pool) as other:
                assert other.storage.batch_exists(keys) == 0


def test_what_served_names_are_called_does_not_matter(daemon: Daemon) -> None:
    """The weights do: engines call the same model by names of their own."""
    keys = hashes("called", 1)
    with Rank(daemon.target, model="a").fill(9) as one, Rank(daemon.target, model="b") as other:
        assert all(one.save(keys, [0]))
        assert all(other.load(keys, [0]))
        assert other.page(0) == one.page(0)


@pytest.mark.parametrize("interface", ["v1", "flat pages"])
def test_engines_of_other_degrees_share_what_is_cut_by_heads(
    daemon: Daemon, interface: str
) -> None:
    """One rank with four heads stores, two ranks with two heads each load; and back."""
    keys, layout = hashes(f"degrees {interface}", 3), "page_head"
    lcm = {"tp_lcm_size": 2, "should_split_heads": True, "weights": interface}
    of_two = {"tp_lcm_size": 2, "tp_size": 2, "weights": interface}
    with (
        Rank(daemon.target, mha(layout, heads=4), **lcm).fill(21) as whole,
        Rank(daemon.target, mha(layout, heads=2), tp_rank=0, **of_two) as left,
        Rank(daemon.target, mha(layout, heads=2), tp_rank=1, **of_two) as right,
    ):
        pool = whole.pool
        if interface == "v1":
            assert whole.save(keys, [0, 1, 2]) == [True] * 3
        else:
            starts = [at * pool.page_size for at in range(3)]
            assert whole.storage.batch_set(keys, [pool.get_data_page(at) for at in starts])
        assert left.load(keys, [3, 4, 5]) == right.load(keys, [5, 4, 3]) == [True] * 3
        for at, (one, other) in enumerate([(3, 5), (4, 4), (5, 3)]):
            heads = [left.pool.kv_buffer[:, one], right.pool.kv_buffer[:, other]]
            assert same_bits(torch.cat(heads, dim=1), pool.kv_buffer[:, at])
        more = hashes(f"degrees back {interface}", 2)
        left.fill(22)
        right.fill(23)
        assert all(left.save(more, [0, 1]))
        assert whole.storage.batch_exists(more) == 0  # a half is no page
        assert whole.load(more, [6, 7]) == [False, False]
        assert all(right.save(more, [0, 1]))
        assert whole.storage.batch_exists(more) == 2
        if interface == "v1":
            assert whole.load(more, [6, 7]) == [True, True]
        else:
            flat = whole.storage.batch_get(more, [pool.get_data_page(0).clone() for _ in more])
            for at, page in zip((6, 7), flat, strict=True):
                pool.set_from_flat_data_page(at * pool.page_size, page)
        for at in range(2):
            heads = [left.pool.kv_buffer[:, at], right.pool.kv_buffer[:, at]]
            assert same_bits(torch.cat(heads, dim=1), pool.kv_buffer[:, 6 + at])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def test_a_rotten_record_is_a_miss_and_is_dropped(daemon: Daemon) -> None:
    keys = hashes("rot", 4)
    with Rank(daemon.target).fill(10) as rank, Admin(daemon.target) as admin:
        assert all(rank.save(keys, range(4)))
        place = rank.storage._places("kv", keys)[2]
        admin.register(place.namespace)
        damage_resident(admin, place.namespace.id, [place.key])
        assert rank.load(keys, [4, 5, 6, 7]) == [True, True, False, True]
        assert [rank.page(at) for at in (4, 5, 7)] == [rank.page(at) for at in (0, 1, 3)]
        assert rank.save(keys[2:3], [2]) == [True]
        assert all(rank.load(keys, [4, 5, 6, 7]))


def test_a_full_store_makes_room_and_what_is_left_is_right() -> None:
    with Daemon("dram.capacity=8MiB", "dram.extent=8MiB", file=False) as daemon:
        daemon.start()
        pool = mha(page_tokens=64, heads=16)
        with Rank(daemon.target, pool, save_deadline_s=0.5).fill(11) as rank:
            keys = hashes("full", 90)  # of 192 KiB each
            for begin in range(0, 90, 3):
                rank.save(keys[begin : begin + 3], [0, 1, 2])
            good = 0
            for at, key in enumerate(keys):
                if rank.load([key], [5]) == [True]:
                    assert rank.page(5) == rank.page(at % 3)
                    good += 1
            assert 0 < good < 90


def test_what_does_not_fit_together_is_refused_and_counted(daemon: Daemon) -> None:
    keys = hashes("fit", 2)
    with Rank(daemon.target).fill(12) as rank:
        short = indices_of(rank.pool, [0])
        assert rank.storage.batch_set_v1(keys, short) == [False, False]
        assert rank.storage.batch_get_v1(keys, short) == [False, False]
        assert rank.storage.batch_get_v1(keys, None) == [False, False]
        beyond = indices_of(rank.pool, [0, 10**6])
        assert rank.storage.batch_set_v1(keys, beyond) == [False, False]
        assert rank.storage.batch_get_v1(keys, beyond) == [False, False]
        assert rank.storage.batch_exists(keys) == 0
        odd = ["", "k" * 5000, keys[0]]
        assert rank.save(odd, [0, 1, 2]) == [False, False, True]
        assert rank.load(odd, [3, 4, 5]) == [False, False, True]
        assert rank.page(5) == rank.page(2)
        assert rank.storage.counters.as_dict()["malformed"] >= 6
        assert rank.storage.counters.as_dict()["failed"] >= 4


def test_clear_deletes_what_this_rank_has_and_nothing_else(daemon: Daemon) -> None:
    keys = hashes("clear", 3)
    with Rank(daemon.target).fill(13) as one, Rank(daemon.target, weights="kept").fill(14) as kept:
        assert all(one.save(keys, range(3)))
        assert all(kept.save(keys, range(3)))
        with Rank(daemon.target) as later:
            later.storage.clear()
        assert one.storage.batch_exists(keys) == 0
        assert kept.storage.batch_exists(keys) == 3


def test_what_was_flushed_outlives_sigkill_of_both(mortal: Daemon) -> None:
    keys = hashes("kill", 32)
    with Rank(mortal.target).fill(15) as before:
        expected = [before.page(at) for at in range(32)]
        assert all(before.save(keys, range(32)))
        assert before.storage.flush()
    mortal.kill()
    mortal.start()
    with Rank(mortal.target) as after:
        until(lambda: after.storage.batch_exists(keys) == 32)
        assert all(after.load(keys, range(32)))
        assert [after.page(at) for at in range(32)] == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"socket": "unix:/x"}, "known keys: target, weights, "),
        ({"load_deadline_s": 0}, "known keys"),
        ({"should_split_heads": True, "tp_lcm_size": 2}, "leave tp_lcm_size out"),
        (
            {"dcp_size": 2, "tp_size": 2, "is_mla_model": True, "logical_page_size": 8},
            "DCP",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(
    daemon: Daemon, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises((ConfigError, Incompatible), match=says):
        Rank(daemon.target, **changes)


def test_another_version_is_refused_unless_it_is_to_be_tried(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = hashes("version", 1)
    with Rank(daemon.target).fill(16) as tested:
        assert all(tested.save(keys, [0]))
    monkeypatch.setattr(engine_versions, "version", lambda _: "0.6.0")
    with pytest.raises(Incompatible, match=r"0\.6\.0 is not tested .* 0\.5\.23"):
        Rank(daemon.target)
    with Rank(daemon.target, allow_untested=True) as untested:
        assert untested.storage.batch_exists(keys) == 0  # its bytes may mean something else
        assert untested.save(keys, [0]) == [True]


def test_what_operators_see(daemon: Daemon) -> None:
    with Rank(daemon.target, model="org/seen", weights="seen").fill(17) as rank:
        assert all(rank.save(hashes("seen", 3), range(3)))
    with Admin(daemon.target) as admin:
        (use,) = [each for each in admin.admin.namespaces() if each.model == "org/seen"]
        assert use.namespace is not None
        assert use.blocks == 3
        identity = dict(use.namespace.identity)
        assert (identity["engine"], identity["pool"]) == ("sglang 0.5.23", "kv")


def test_the_config_is_sglangs(daemon: Daemon) -> None:
    """The tests say of a rank what SGLang's controller does."""
    config = config_of(daemon.target)
    assert config.extra_config["class_name"] == "Storage"
    assert config.is_storage_writer
    assert page_of(fill(mha(), 1), 0) != page_of(fill(mha(), 2), 0)
