"""What people are told of lossy blocks: `kvstore status`, `top`, `explain` and the metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from kvstore import Client
from kvstore.cli.top import _rows, summary
from kvstore.model.block import BlockKey, padded
from kvstore.model.words import size
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys
from kvstore.testing.wait import until
from tests.cli.run import kvstore
from tests.server.test_fine_parts import BASE, BLOCKS, EXACT, FINE, Writer, read, without_fine

BARE = 10  # blocks of a second prefix, which has no fine parts
KEYS, OTHERS = sample_keys("told", BLOCKS), sample_keys("bare", BARE)
REFINED = BLOCKS - 1  # the first block is exact
STORED = 2 * padded(EXACT) + (BLOCKS + BARE - 2) * padded(BASE) + REFINED * padded(FINE)
RAW = (BLOCKS + BARE) * EXACT
KEPT = (
    f"ep in dram: {BLOCKS + BARE} blocks, {REFINED} with fine parts, {size(STORED)} for "
    f"{size(RAW)} of KV ({RAW / STORED:.2f}x)"
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("file.path=") as daemon:
        yield daemon.start()


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    """Who has stored the two prefixes, and has read them."""
    with Client(daemon.target, name="lossy engine") as client:
        Writer(client).put(KEYS)
        without_fine(client, OTHERS)
        assert read(client, KEYS, request_id="fine") == (BLOCKS, REFINED)
        assert read(client, OTHERS, request_id="bare") == (BARE, 0)
        yield client


def printed(*command: str) -> str:
    done = kvstore(*command)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_status_says_how_many_blocks_there_are_by_fidelity(daemon: Daemon, client: Client) -> None:
    assert f"kept {KEPT}" in printed("status", "--target", daemon.target)


def test_metrics_say_it_under_the_right_names(daemon: Daemon, client: Client) -> None:
    labels = '{fidelity="ep",tier="dram"}'
    expected = {
        f"kvstore_fidelity_blocks{labels}": BLOCKS + BARE,
        f"kvstore_refined_blocks{labels}": REFINED,
        f"kvstore_stored_bytes{labels}": STORED,
        f"kvstore_raw_bytes{labels}": RAW,
        "kvstore_base_hit_blocks_total": BARE - 1,
    }
    url = f"http://127.0.0.1:{daemon.metrics_port}/metrics"

    def told() -> dict[str, float]:
        with urlopen(url, timeout=10) as answer:
            lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
        return {name: float(value) for name, _, value in lines if name in expected}

    until(lambda: told().get(f"kvstore_raw_bytes{labels}") == RAW)  # gauges are set now and then
    assert told() == expected


def test_explain_says_which_request_came_without_fine_parts(daemon: Daemon, client: Client) -> None:
    told = f"{BARE - 1} of these blocks came without their fine part"
    assert told in printed("explain", "bare", "--target", daemon.target)
    assert "fine part" not in printed("explain", "fine", "--target", daemon.target)


def test_top_shows_blocks_by_fidelity(daemon: Daemon, client: Client) -> None:
    options = ("--once", "--interval", "0.1", "--target", daemon.target)
    shown = printed("top", *options)
    assert f"kept {KEPT}" in shown
    assert "fine parts 0/s dropped from dram for room, 0 blocks/s served without theirs" in shown
    frame = json.loads(kvstore("top", "--json", *options).output)
    (kept,) = frame["fidelities"]
    assert (kept["blocks"], kept["refined_blocks"]) == (BLOCKS + BARE, REFINED)
    assert frame["fine_parts"] == {"thinned_per_s": 0, "base_hits_per_s": 0}


def test_top_counts_what_was_thinned_and_served_without_fine_parts() -> None:
    """In an interval of 10 s, as if it were."""
    with (
        Daemon("dram.capacity=8MiB", "dram.extent=8MiB", "file.path=") as daemon,
        Client(daemon.start().target) as client,
    ):
        before = client.admin.stats()
        prefixes: list[list[BlockKey]] = [sample_keys(f"thin {n}", BLOCKS) for n in range(18)]
        for keys in prefixes:
            Writer(client).put(keys)
        assert read(client, prefixes[0]) == (BLOCKS, 0)
        after = client.admin.stats()
        frame = summary(before, after, 10.0)
        thinned = after["dram"]["thinned_records"]
        assert thinned >= 18
        assert frame["fine_parts"] == {
            "thinned_per_s": thinned / 10,
            "base_hits_per_s": REFINED / 10,
        }
        assert dict(_rows(frame))["fine parts"] == (
            f"{thinned / 10:.0f}/s dropped from dram for room, 2 blocks/s served without theirs"
        )


def test_an_exact_daemon_is_not_told_of_fine_parts() -> None:
    with Daemon() as daemon:
        daemon.start()
        shown = printed("top", "--once", "--interval", "0.1", "--target", daemon.target)
    assert "fine parts" not in shown
    assert "kept" not in shown
