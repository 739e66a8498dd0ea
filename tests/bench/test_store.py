"""`kvstore bench store` on a real daemon: every figure is there, made of what was timed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvstore import Client, InvalidRequest
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.cli import bench
from kvstore_bench.store import sides, store
from kvstore_bench.store import threads as by_threads
from kvstore_bench.store.store import StorePlan, Timing, alternate, run
from kvstore_kernels import native

SMALL = StorePlan(2, 1 << 20, 5, match_rounds=5)


def test_the_json_has_every_ratio_and_what_it_was_made_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_threads, "WATCH_S", 0.2)
    arguments = ["store", "--records", "2", "--record-mib", "1", "--rounds", "5", "--json"]
    arguments += ["--coded-mib", "0", "--threads", "1,3"]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    seconds = result["seconds"]
    assert result["local_get_ratio"] == pytest.approx(
        seconds["memcpy"]["p50"] / seconds["get"]["p50"]
    )
    assert result["match_1000_vs_empty_rpc"] > 0
    assert seconds["put"]["rounds"] == 5
    assert "match_1000_p99_ms" not in result
    assert set(result["threads"]) == {"1", "3"}
    for row in result["threads"].values():
        speeds = row["gb_per_s"]
        assert row["local_get_ratio"] == pytest.approx(speeds["get"] / speeds["memcpy"])
        assert row["local_put_ratio"] == pytest.approx(speeds["put"] / speeds["memcpy"])
    for held in (result, *result["threads"].values()):
        assert set(held["gil_held_s_per_gb"]) == {"get", "put"}


@pytest.mark.parametrize("verified", [True, False])
def test_a_get_that_brings_nothing_is_noticed(
    monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    get_into = Client.get_into

    def lies(client, namespace, keys, targets, *, verify=True):
        if verify is verified:
            return [True] * len(keys)
        return get_into(client, namespace, keys, targets, verify=verify)

    monkeypatch.setattr(Client, "get_into", lies)
    with pytest.raises(Unavailable, match="came back wrong"):
        run(SMALL, print)


def test_one_of_several_clients_that_gets_nothing_is_noticed() -> None:
    with Daemon("dram.capacity=64MiB", file=False) as daemon:
        daemon.start()
        with Client(daemon.target) as honest, Client(daemon.target) as lying:
            lying.get_into = lambda namespace, keys, *_: [True] * len(keys)  # type: ignore[method-assign]
            with pytest.raises(Unavailable, match="came back wrong: lying"):
                sides.measure({"lying": lying, "honest": honest}, SMALL)


def test_puts_and_gets_are_timed_in_turns_with_the_plain_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[set[str]] = []

    def watched(each, *rest):
        timed.append(set(each))
        return alternate(each, *rest)

    monkeypatch.setattr(by_threads, "WATCH_S", 0.1)
    for module in (store, by_threads):
        monkeypatch.setattr(module, "alternate", watched)
    run(SMALL, print)
    by_threads.run(SMALL, [], print)
    assert timed == [{"memcpy", "get", "get_unverified", "put"}, {"memcpy", "get", "put"}]


def test_each_round_times_every_side_once_and_readies_those_that_need_it() -> None:
    calls: list[str] = []
    named = {name: lambda name=name: calls.append(name) for name in ("copy", "put")}
    alternate(named, 2, {"put": lambda: calls.append("delete")})
    assert calls == ["delete", "put", "copy", "copy", "delete", "put", "delete", "put", "copy"]


@pytest.mark.parametrize("threads", ["0", "x", "65"])
def test_numbers_of_threads_that_make_no_sense_are_refused(threads) -> None:
    done = CliRunner().invoke(bench, ["store", "--threads", threads])
    assert done.exit_code == 2
    assert "numbers from 1 to 64" in done.output


def test_a_client_with_no_threads_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="copy_threads=0"):
        Client("unix:/nowhere", copy_threads=0)


def test_tls_is_measured_beside_plaintext() -> None:
    arguments = ["store", "--tls", "--records", "2", "--record-mib", "1", "--rounds", "5", "--json"]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    seconds = result["seconds"]
    assert result["tls"]["unary_p50_vs_plain"] == pytest.approx(
        seconds["unary_tls"]["p50"] / seconds["unary_plain"]["p50"]
    )
    assert result["tls"]["stream_vs_plain"] == pytest.approx(
        seconds["stream_plain"]["p50"] / seconds["stream_tls"]["p50"]
    )


@pytest.mark.skipif(bool(native.reason()), reason=native.reason())
def test_coded_records_are_compared_with_raw_ones() -> None:
    pytest.importorskip("torch")
    from kvstore_bench.store.coded import CodedPlan
    from kvstore_bench.store.coded import run as run_coded

    result = run_coded(CodedPlan(4 << 20, rounds=2, watch_s=0.2), None, lambda text: None)
    gb_s = result["coded"]["gb_s"]
    assert result["get_vs_raw"] == pytest.approx(gb_s["get_raw"] / gb_s["get_l3"])
    assert result["put_vs_raw"] == pytest.approx(gb_s["put_raw"] / gb_s["put_l3"])
    assert 1.3 < result["coded"]["ratio"] < 1.5
    assert set(result["lock_held_share"]) == {"get_raw", "get_l3", "put_raw", "put_l3"}


def test_matches_are_timed_beside_a_writer_among_many_blocks() -> None:
    said: list[str] = []
    plan = StorePlan(2, 1 << 20, 5, match_rounds=5, resident_blocks=3000, writer_s=1.0)
    result = run(plan, said.append)
    assert result["resident_blocks"] == 3000
    assert result["seconds"]["match_loaded"]["rounds"] >= 2
    assert result["match_1000_p99_ms"] == pytest.approx(
        1e3 * result["seconds"]["match_loaded"]["p99"]
    )
    assert len(said) == 3


def test_a_timing_keeps_its_order() -> None:
    timing = Timing.of([0.004, 0.001, 0.003, 0.002])
    assert timing.p25 < timing.p50 < timing.p75 <= timing.p99 <= 0.004
    assert timing.rounds == 4
