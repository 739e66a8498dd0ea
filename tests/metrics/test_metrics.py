"""The metrics of a real daemon, read as Prometheus reads them."""

import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvstore as package
from kvstore import Client
from kvstore.metrics import CHECKED_BY, TASKS, Metrics
from kvstore.model.block import BlockKey, Part, Span
from kvstore.model.errors import KVStoreError
from kvstore.testing.daemon import Daemon
from kvstore.testing.damage import damage_resident
from kvstore.testing.samples import (
    RECORD_NBYTES,
    sample_keys,
    sample_namespace,
    sample_records,
)
from kvstore.testing.wait import until

PADDED = 20480
BLOCK_TOKENS = 16


def scrape(daemon: Daemon) -> dict[str, float]:
    """Return each sample by its name and its label values, in the order of the labels' names."""
    url = f"http://127.0.0.1:{daemon.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            " ".join((sample.name, *sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.start()


def test_one_life_of_blocks_is_counted_tier_by_tier(daemon: Daemon) -> None:
    keys = sample_keys("metrics", 10)
    with Client(daemon.target) as client:
        ns = client.register(sample_namespace())
        client.put(ns, keys[:8], sample_records(keys[:8]), durable=True)
        grant = client.acquire(ns, keys, request_id="r")
        client.release(grant.lease_id)
        seen = scrape(daemon)
    assert seen["kvstore_lookup_blocks_total"] == 10
    assert seen["kvstore_lookup_tokens_total"] == 10 * BLOCK_TOKENS
    assert seen["kvstore_hit_blocks_total dram"] == 8
    assert seen["kvstore_hit_tokens_total dram"] == 8 * BLOCK_TOKENS
    assert seen["kvstore_requests_total never_stored"] == 1
    assert seen["kvstore_tier_bytes_total read dram"] == 8 * PADDED
    assert seen["kvstore_tier_bytes_total write dram"] == 8 * PADDED
    assert seen["kvstore_tier_bytes_total write file"] > 8 * RECORD_NBYTES
    assert seen["kvstore_write_behind_seconds_count"] >= 1
    assert seen["kvstore_rpc_seconds_count Acquire"] == 1
    assert seen["kvstore_build_info 0.1.0"] == 1
    assert seen["process_resident_memory_bytes"] > 1 << 20


def test_bytes_and_hits_are_told_by_model(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        for model, count in (("google/gemma", 4), ("other vendor", 2)):
            keys = sample_keys(model, 5)
            ns = client.register(sample_namespace(model))
            client.put(ns, keys[:count], sample_records(keys[:count]), durable=True)
            client.release(client.acquire(ns, keys).lease_id)
        until(lambda: scrape(daemon).get("kvstore_model_blocks other vendor") == 2)
        seen = scrape(daemon)
        client.admin.clear()
        until(lambda: scrape(daemon)["kvstore_model_bytes google/gemma dram"] == 0)
    label = sample_namespace("google/gemma").id.hex()[:12]
    assert seen[f"kvstore_namespace_bytes {label} dram"] == 4 * PADDED
    assert seen[f"kvstore_namespace_lookup_blocks_total {label}"] == 5
    assert seen[f"kvstore_namespace_hit_blocks_total {label} dram"] == 4
    assert seen["kvstore_model_blocks google/gemma"] == 4
    assert seen["kvstore_model_bytes google/gemma dram"] == 4 * PADDED
    assert seen["kvstore_model_bytes google/gemma file"] == 4 * PADDED
    assert seen["kvstore_model_lookup_blocks_total google/gemma"] == 5
    assert seen["kvstore_model_hit_blocks_total google/gemma dram"] == 4
    assert seen["kvstore_model_hit_blocks_total other vendor dram"] == 2


def test_what_comes_up_from_the_file_tier_is_counted_there(daemon: Daemon) -> None:
    keys = sample_keys("metrics", 8)
    with Client(daemon.target) as client:
        ns = client.register(sample_namespace())
        client.put(ns, keys, sample_records(keys), durable=True)
    assert daemon.stop() == 0
    daemon.start()
    with Client(daemon.target) as client:
        client.register(sample_namespace())
        assert None not in client.get(ns, keys[:3])
        grant = client.acquire(ns, keys, wait_s=5)
        assert grant.hit_blocks == 8
        seen = scrape(daemon)
    assert seen["kvstore_hit_blocks_total file"] == 8
    assert seen["kvstore_hit_blocks_total dram"] == 3, "those that the get had brought up"
    assert seen["kvstore_lookup_blocks_total"] == 11
    assert seen["kvstore_requests_total complete"] == 1
    assert seen["kvstore_promoted_blocks_total"] == 8
    assert seen["kvstore_promote_seconds_count"] >= 1
    assert seen["kvstore_tier_bytes_total read file"] >= 8 * PADDED


def test_what_leaves_is_counted_by_tier_and_reason(daemon: Daemon) -> None:
    keys = sample_keys("leaving", 6)
    with Client(daemon.target) as client:
        ns = client.register(sample_namespace())
        client.put(ns, keys, sample_records(keys), durable=True)
        client.admin.delete(ns, keys[:2])
        damage_resident(client, ns, keys[2:3])
        assert client.admin.delete(ns, keys[2:4], corrupt=True) == 1
        client.admin.clear(ns)
        until(lambda: "kvstore_evicted_blocks_total cleared dram" in scrape(daemon))
        seen = scrape(daemon)
    for tier, cleared in (("dram", 3), ("file", 4)):
        assert seen[f"kvstore_evicted_blocks_total deleted {tier}"] == 2
        assert seen[f"kvstore_evicted_blocks_total cleared {tier}"] == cleared
    assert seen["kvstore_evicted_blocks_total corrupt dram"] == 1
    assert seen["kvstore_corrupt_blocks_total reader"] == 1
    assert seen["kvstore_reported_blocks_total dropped"] == 1
    assert seen["kvstore_reported_blocks_total kept"] == 1


def test_what_alerts_watch_is_there_before_it_happens() -> None:
    """increase() does not see the first value of a series."""
    metrics = Metrics()
    assert metrics.registry.get_sample_value("kvstore_corrupt_blocks_total", {"where": "put"}) == 0
    assert {"corrupt_blocks", "task_failures"}.isdisjoint(metrics.totals())
    sources = [each.read_text() for each in Path(package.__file__).parent.rglob("*.py")]
    places, tasks = set[str](), {"events"}  # which runs as a thread
    for source in sources:
        places |= set(re.findall(r'corrupt_blocks\.labels\("(\w+)"\)', source))
        if "import keep_running" in source:
            tasks |= set(re.findall(r'\(\s*"([a-z_.]+)", [a-z.]+\.\w+', source))
    assert places <= set(CHECKED_BY)
    assert len(tasks) > 20
    assert tasks == set(TASKS)
    for task in tasks:
        labels = {"task": task}
        assert metrics.registry.get_sample_value("kvstore_task_failures_total", labels) == 0


def test_refusals_and_errors_are_counted_by_class() -> None:
    with Daemon("dram.capacity=1MiB", file=False) as daemon:
        daemon.start()
        keys = sample_keys("many", 60)
        with Client(daemon.target) as client:
            ns = client.register(sample_namespace())
            spans = [Span(Part(0, 0), 0, len(keys))]
            client.reserve(ns, keys, first_block=0, parent=None, spans=spans)
            with pytest.raises(KVStoreError):
                client.match(ns, [BlockKey(os.urandom(32))], skip_blocks=2)
            seen = scrape(daemon)
    assert seen["kvstore_refused_parts_total no_room"] == 60 - (1 << 20) // PADDED
    assert seen["kvstore_rpc_errors_total InvalidRequest Match "] == 1
    assert seen["kvstore_rpcs_running"] == 0


def test_leases_that_run_out_and_limbo_are_counted() -> None:
    with Daemon("limits.lease_s=0.5") as daemon:
        daemon.start()
        keys = sample_keys("limbo", 2)
        with Client(daemon.target) as client:
            ns = client.register(sample_namespace())
            client.put(ns, keys, sample_records(keys))
            client.acquire(ns, keys)
            until(lambda: scrape(daemon)["kvstore_dram_bytes limbo"] == 2 * PADDED)
            seen = scrape(daemon)
    assert seen["kvstore_expired_leases_total"] == 1
    assert seen["kvstore_leases"] == 1
    assert seen["kvstore_sessions"] == 1


def test_totals_fold_what_the_registry_holds() -> None:
    metrics = Metrics()
    metrics.lookups.inc(3)
    metrics.hits.labels("dram").inc(2)
    metrics.rpc_errors.labels("Match", "Unavailable", "limbo").inc()
    metrics.promote_seconds.observe(0.5)
    totals = metrics.totals()
    assert totals["lookup_blocks"] == 3
    assert totals["hit_blocks"] == {"dram": 2}
    assert totals["rpc_errors"] == {"Match/Unavailable/limbo": 1}
    assert totals["promote_seconds"] == {"count": 1, "sum": 0.5}
    assert "blocks" not in totals


def test_a_namespace_that_made_room_for_another_is_shown_no_more() -> None:
    metrics = Metrics()
    metrics.namespace_hits.labels("old", "dram").inc()
    for label in ("old", "new"):
        metrics._publish_namespaces([{"namespace": label, "dram_bytes": 1, "file_bytes": 1}])
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    shown = {sample.labels.get("namespace") for sample in samples}
    assert (shown & {"old", "new"}) == {"new"}


def test_a_model_that_made_room_for_another_is_shown_no_more() -> None:
    metrics = Metrics()
    use = {"blocks": 1, "dram_bytes": 1, "file_bytes": 1}
    metrics.model_hits.labels("old", "dram").inc()
    for model in ("old", "new"):
        metrics._publish_models([{"model": model, **use}])
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    shown = {sample.labels.get("model") for sample in samples}
    assert (shown & {"old", "new"}) == {"new"}
