"""Every metric kvstore exports: one place for names, units, labels and help texts.

One `Metrics` per node, on a registry of its own, so that several nodes fit into one process. Blocks
are counted once per call, never one by one. Bandwidth is the rate of `tier_bytes`, a hit ratio the
rate of `hit_blocks` over that of `lookup_blocks`. One idea: what is exported is declared here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

PREFIX = "kvstore_"
# A call on the unix socket takes 0.3 ms; past 30 s every wait has ended.
SECONDS_BUCKETS = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)

FIDELITY = ("fidelity", "tier")  # labels
CHECKED_BY = (
    "put",
    "write_behind",
    "promote",
    "reader",
    "scrub",
    "arena",
    "object",
    "pool",
    "pair",
)
TASKS = (
    *("arena_links", "bucket", "cap", "credentials", "deletes", "devices", "events", "health"),
    *("holes", "house", "left_arenas", "lend_dram", "lend_file", "lend_object"),
    *("members.ask", "members.follow", "members.held", "members.renew", "members.save"),
    *("peers", "pool", "pool_put", "recall", "scrub", "tenants_house", "upload", "write_behind"),
)
"""What `keep_running` runs. Some daemons run a part of it; all export all, from the start on."""
BEGUN = ("corrupt_blocks", "task_failures")  # exported as 0 by each label, from the start on


class Metrics:
    """The metrics of one node. `tier`: dram, file, object, pool; `direction` is read or write."""

    def __init__(self, registry: CollectorRegistry | None = None, version: str = "") -> None:
        self.registry = registry or CollectorRegistry()
        self._counted: list[Counter | Histogram] = []
        self._lookups()
        self._tiers()
        self._policies()
        self._fidelity()
        self._moves()
        self._hints()
        self._losses()
        self._objects()
        self._peers()
        self._pool()
        self._events()
        self._clients()
        self._gauge("build_info", "1; its label is the version", "version").labels(version).set(1)
        ProcessCollector(registry=self.registry)  # CPU, memory and descriptors of the daemon
        self._left: dict[tuple[str, str], int] = {}
        self._unwritten = 0
        self._growth_pauses = 0
        self._device_states: dict[str, str] = {}
        self._models: set[str] = set()
        self._namespaces: set[str] = set()
        self._thinned = 0
        self._policy_failures: dict[str, int] = {}

    def publish(self, stats: Mapping[str, Any], left: Mapping[tuple[str, str], int]) -> None:
        """Set the gauges from `Store.stats()`, and count the blocks that left, by tier and reason.

        All other counters are kept where things happen.
        """
        for state in ("used", "reserved", "capacity", "leased", "limbo", "pinned"):
            self.dram_bytes.labels(state).set(stats["dram"][f"{state}_bytes"])
        for state in ("physical", "capacity", "leased"):
            self.file_bytes.labels(state).set(stats["file"][f"{state}_bytes"])
        for tier in ("dram", "file"):
            self.blocks.labels(tier).set(stats[tier]["blocks"])
        self._publish_models(stats["models"])
        self._publish_namespaces(stats["namespace_use"])
        self._publish_fidelities(stats["fidelities"])
        self.thinned.inc(stats["dram"]["thinned_records"] - self._thinned)
        self._thinned = stats["dram"]["thinned_records"]
        for name, depth in stats["queues"].items():
            self.queue_depth.labels(name).set(depth)
        self.unwritten.inc(stats["file"]["unwritten_records"] - self._unwritten)
        self._unwritten = stats["file"]["unwritten_records"]
        self._publish_policies(stats["policies"])
        for labels, count in left.items():
            self.evictions.labels(*labels).inc(count - self._left.get(labels, 0))
            self._left[labels] = count
        pauses = stats["dram"]["growth_pauses"]
        self.arena_growth_pauses.inc(pauses - self._growth_pauses)
        self._growth_pauses = pauses
        for device in stats["file"].get("devices", ()):
            self._publish_device(device["path"], device["state"], device["physical_bytes"])
        self.dirty_bytes.set(stats["dirty_bytes"])
        self.durable_lag_seconds.set(stats["durable_lag_s"])
        self.file_failing.set(stats["file"].get("state") == "failing")
        self.sessions.set(stats["sessions"])
        self.leases.set(stats["leases"])

    def _publish_policies(self, policies: Mapping[str, Mapping[str, Any]]) -> None:
        for tier, policy in policies.items():
            failures = self.policy_failures.labels(tier)
            failures.inc(policy["failures"] - self._policy_failures.get(tier, 0))
            self._policy_failures[tier] = policy["failures"]
            for order, ratio in policy.get("shadow_hit_ratios", {}).items():
                self.shadow_hit_ratio.labels(tier, order).set(ratio)
                self.policy_follows.labels(tier, order).set(order == policy["follows"])

    def _publish_models(self, models: Sequence[Mapping[str, Any]]) -> None:
        for model in models:
            self.model_blocks.labels(model["model"]).set(model["blocks"])
            for tier in ("dram", "file"):
                self.model_bytes.labels(model["model"], tier).set(model[f"{tier}_bytes"])
        shown = {model["model"] for model in models}
        for gone in self._models - shown:  # it has made room for another one
            _remove(self.model_blocks, gone)
            _remove(self.model_lookups, gone)
            for tier in ("dram", "file", "object", "peer", "pool"):
                _remove(self.model_hits, gone, tier)
                _remove(self.model_bytes, gone, tier)
        self._models = shown

    def _publish_namespaces(self, namespaces: Sequence[Mapping[str, Any]]) -> None:
        for each in namespaces:
            for tier in ("dram", "file"):
                self.namespace_bytes.labels(each["namespace"], tier).set(each[f"{tier}_bytes"])
        shown = {each["namespace"] for each in namespaces}
        for gone in self._namespaces - shown:
            _remove(self.namespace_lookups, gone)
            for tier in ("dram", "file", "object", "peer", "pool"):
                _remove(self.namespace_hits, gone, tier)
                _remove(self.namespace_bytes, gone, tier)
        self._namespaces = shown

    def _publish_fidelities(self, fidelities: Sequence[Mapping[str, Any]]) -> None:
        gauges = {
            "blocks": self.fidelity_blocks,
            "refined_blocks": self.refined_blocks,
            "stored_bytes": self.stored_bytes,
            "raw_bytes": self.raw_bytes,
        }
        for gauge in gauges.values():
            gauge.clear()
        for each in fidelities:
            for name, gauge in gauges.items():
                gauge.labels(each["fidelity"], each["tier"]).set(each[name])

    def _publish_device(self, path: str, state: str, physical_nbytes: int) -> None:
        before = self._device_states.get(path, state)
        self.file_device_state.labels(path, before).set(0)
        self.file_device_state.labels(path, state).set(1)
        self._device_states[path] = state
        self.file_device_bytes.labels(path).set(physical_nbytes)

    def task_failed(self, task: str) -> None:
        """Count a background task that ended with an unexpected error: see `keep_running`."""
        self.task_failures.labels(task).inc()

    def audited(self, result: str, lines: int) -> None:
        """Count lines of the audit log: written, dropped. Any thread may call it."""
        self.audit_lines.labels(result).inc(lines)

    def totals(self) -> dict[str, Any]:
        """Return what was counted since the start: a number by name, or by label values too.

        Names are without prefix and `_total`; several label values are joined by "/"; a histogram
        is {"count": observations, "sum": seconds}. Gauges are left out: see `Store.stats()`. So are
        places and tasks of `BEGUN` that have counted nothing.
        """
        found: dict[str, Any] = {}
        for family in chain.from_iterable(metric.collect() for metric in self._counted):
            name = family.name.removeprefix(PREFIX)
            for sample in family.samples:
                kind = sample.name.rpartition("_")[2]
                if kind not in ("total", "count", "sum"):
                    continue
                if name in BEGUN and not sample.value:
                    continue
                place = found.setdefault(name, {})
                if sample.labels:
                    place = place.setdefault("/".join(sample.labels.values()), {})
                place[kind] = sample.value
        return {name: _folded(value) for name, value in found.items()}

    def _lookups(self) -> None:
        self.requests = self._counter(
            "requests",
            "Prefixes asked for by acquire, by what ended the hit; complete: all was hit",
            "ended_by",
        )
        self.lookups = self._counter(
            "lookup_blocks", "Blocks asked for by acquire (for get: records)"
        )
        self.lookup_tokens = self._counter("lookup_tokens", "Tokens of the blocks asked for")
        self.hits = self._counter("hit_blocks", "Blocks served, by the tier that had them", "tier")
        self.hit_tokens = self._counter("hit_tokens", "Tokens of the blocks served", "tier")
        self.saved_prefill_seconds = self._counter(
            "saved_prefill_seconds",
            "Prefill time of the blocks served, as the engines that asked say how fast they are; "
            "of engines that do not say it, nothing",
        )
        self.model_lookups = self._counter(
            "model_lookup_blocks", "lookup_blocks by model: at most 64, then other", "model"
        )
        self.model_hits = self._counter("model_hit_blocks", "hit_blocks by model", "model", "tier")
        self.namespace_lookups = self._counter(
            "namespace_lookup_blocks",
            "lookup_blocks by namespace, the first 12 digits of its id: at most 64, then other",
            "namespace",
        )
        self.namespace_hits = self._counter(
            "namespace_hit_blocks", "hit_blocks by namespace", "namespace", "tier"
        )

    def _tiers(self) -> None:
        self.blocks = self._gauge("blocks", "Blocks stored, by tier", "tier")
        self.bytes = self._counter(
            "tier_bytes",
            "Bytes read from a tier, written to it, or scrubbed (also verified after a report); "
            "lent: leased to clients that read the files of the file tier themselves",
            "tier",
            "direction",
        )
        self.evictions = self._counter(
            "evicted_blocks",
            "Blocks dropped from a tier: evicted (to make room), lost (the same, without a copy "
            "in the file tier), deleted, cleared, corrupt, device_out (its disk is out of use), "
            "over_share (its tenant gave room back that others had lent it)",
            "tier",
            "reason",
        )
        self.model_blocks = self._gauge(
            "model_blocks",
            "Blocks stored, by model: at most 64, then other; unknown: on disk, not named yet",
            "model",
        )
        self.model_bytes = self._gauge(
            "model_bytes",
            "Bytes of the blocks of a model, by tier: dram, file",
            "model",
            "tier",
        )
        self.namespace_bytes = self._gauge(
            "namespace_bytes",
            "Bytes of the blocks of a namespace, by tier: dram, file",
            "namespace",
            "tier",
        )
        self.dram_bytes = self._gauge(
            "dram_bytes",
            "Bytes of the arena: used, reserved (allocated so far), capacity, leased, limbo "
            "(expired leases that are not released), pinned",
            "state",
        )
        self.arena_growth_pauses = self._counter(
            "arena_growth_pauses",
            "Times that the arena stopped growing because too little memory was free",
        )
        self.file_bytes = self._gauge(
            "file_bytes", "Bytes of the file tier: physical, capacity, leased", "state"
        )
        self.file_device_bytes = self._gauge(
            "file_device_bytes", "Physical bytes in each directory of the file tier", "device"
        )
        self.file_device_state = self._gauge(
            "file_device_state",
            "1 for the state each directory of the file tier is in: ok; only read: full, "
            "read_only, failing; out of use: missing, failed, hung",
            "device",
            "state",
        )

    def _policies(self) -> None:
        self.policy_failures = self._counter(
            "policy_failures", "Eviction policies that raised and gave way to lru, by tier", "tier"
        )
        self.policy_follows = self._gauge(
            "policy_follows",
            "1 for the order that the tier's eviction policy follows now",
            "tier",
            "order",
        )
        self.shadow_hit_ratio = self._gauge(
            "shadow_hit_ratio",
            "What the small models of a tier hit lately of the blocks they were asked for, by the "
            "order in which they evict",
            "tier",
            "order",
        )

    def _fidelity(self) -> None:
        self.fidelity_blocks = self._gauge(
            "fidelity_blocks", "Blocks by fidelity (exact, or a lossy one) and tier", *FIDELITY
        )
        self.refined_blocks = self._gauge(
            "refined_blocks", "Of these, blocks that have their fine part in the tier", *FIDELITY
        )
        self.stored_bytes = self._gauge(
            "stored_bytes", "Bytes of the blocks by fidelity and tier, as stored", *FIDELITY
        )
        self.raw_bytes = self._gauge(
            "raw_bytes", "Bytes of the same blocks as an engine holds them", *FIDELITY
        )
        self.thinned = self._counter(
            "thinned_blocks", "Fine parts that were dropped from the arena to make room"
        )
        self.base_hit_blocks = self._counter(
            "base_hit_blocks", "Blocks served without a fine part that they should have"
        )

    def _moves(self) -> None:
        self.promotions = self._counter(
            "promoted_blocks", "Blocks promoted from the file tier to DRAM"
        )
        self.promote_seconds = self._seconds(
            "promote_seconds", "Time to promote one frame, its wait for a slot included"
        )
        self.load_decisions = self._counter(
            "load_decisions",
            "Prefixes in slower tiers, asked for by engines that report their prefill speed: load, "
            "explore (the time of such a load is unknown or outdated), refuse (recomputing is "
            "faster); cut: loads that were abandoned because they took too long",
            "decision",
        )
        self.load_predicted_seconds = self._seconds(
            "load_predicted_seconds", "Predicted time of finished loads"
        )
        self.load_seconds = self._seconds("load_seconds", "Measured time of finished loads")
        self.write_behind_seconds = self._seconds(
            "write_behind_seconds",
            "Time to write one batch to the file tier, its fdatasync included",
        )
        self.queue_depth = self._gauge(
            "queue_depth",
            "Waiting or in progress: promote (frames), write_behind (records), room (puts), recall "
            "(runs found at the last start and not indexed yet)",
            "queue",
        )
        self.dirty_bytes = self._gauge("dirty_bytes", "Committed bytes that are not durable yet")
        self.durable_lag_seconds = self._gauge(
            "durable_lag_seconds", "Age of the oldest committed block that is not durable yet"
        )

    def _hints(self) -> None:
        self.hints = self._counter(
            "hints",
            "Hints taken, by kind (end, expect, prefetch, pin, demote) and result: done, or why "
            "some blocks were left out: unknown_session, not_stored, shared, cap, deadline, "
            "no_room, read_failed, no_file_tier, not_written, busy",
            "kind",
            "result",
        )
        self.hint_blocks = self._counter(
            "hint_blocks",
            "Blocks that hints changed; for prefetch: promoted blocks",
            "kind",
        )

    def _losses(self) -> None:
        self.refusals = self._counter("refused_parts", "Records not stored, by reason", "reason")
        self.unwritten = self._counter(
            "unwritten_records", "Records kept in DRAM alone because of file.write_per_day"
        )
        self.corrupt_blocks = self._counter(
            "corrupt_blocks",
            "Blocks dropped because bytes did not match a checksum, by where it was found: put, "
            "write_behind, promote, reader, scrub (rewritten where the arena has a copy), arena "
            "(holes that a client punched into it), object (whole objects), pool (values), pair "
            "(fine parts found beside another base than their own)",
            "where",
        )
        _begin(self.corrupt_blocks, CHECKED_BY)
        self.punched_bytes = self._counter(
            "punched_bytes",
            "Bytes of the arena that a client returned to the system; allocated again",
        )
        self.touched_again_bytes = self._counter(
            "touched_again_bytes",
            "Bytes of the arena that a client touched after they were returned to the system",
        )
        self.reported_blocks = self._counter(
            "reported_blocks",
            "Blocks that readers reported as corrupt: dropped (a stored copy was wrong), kept "
            "(all stored copies are right), unknown (not stored), unverified (too many reports, "
            "or a disk that does not answer)",
            "result",
        )
        self.task_failures = self._counter(
            "task_failures",
            "Background tasks that ended with an unexpected error and were started again, by task",
            "task",
        )
        _begin(self.task_failures, TASKS)
        self.write_behind_errors = self._counter(
            "write_behind_errors", "Writes to the file tier that failed"
        )
        self.read_errors = self._counter("read_errors", "Reads from the file tier that failed")
        self.file_failing = self._gauge("file_failing", "1 while the file tier fails to write")

    def _objects(self) -> None:
        self.object_requests = self._counter(
            "object_requests",
            "Requests sent to the object store, by kind: list, head, get, put, delete",
            "kind",
        )
        self.object_errors = self._counter(
            "object_errors",
            "Requests to the object store that failed: timeout, throttled, server, connection, "
            "short, refused",
            "kind",
            "reason",
        )
        self.object_retries = self._counter(
            "object_retries", "Requests to the object store that were tried again", "kind"
        )
        self.object_refused_writes = self._counter(
            "object_refused_writes",
            "Runs not written to the object store: full, busy (too many bytes in flight), breaker, "
            "unsurveyed (the bucket is not counted yet), or the error",
            "reason",
        )
        self.object_collected = self._counter(
            "object_collected", "Objects deleted by this daemon: age, capacity, deleted", "reason"
        )
        self.object_bytes = self._gauge(
            "object_bytes", "Bytes of the object tier: counted, capacity, in_flight", "state"
        )
        self.object_breaker_open = self._gauge(
            "object_breaker_open",
            "1 while the circuit breaker refuses requests to the object store",
        )

    def _peers(self) -> None:
        self.peer_bytes = self._counter(
            "peer_bytes", "Bytes of records moved between daemons: borrowed, lent", "direction"
        )
        self.peer_reads = self._counter(
            "peer_reads",
            "Reads from other daemons, by how they ended: read, missing, peer_gone, peer_busy, "
            "peer_slow, peer_corrupt, peer_incompatible",
            "outcome",
        )
        self.peer_match_seconds = self._seconds(
            "peer_match_seconds", "Time in which other daemons said what they have", "outcome"
        )
        self.peer_refused = self._counter(
            "peer_refused",
            "What was refused between daemons, by why: a source that a request names and that is "
            "no member (unknown) or cannot be asked (unreachable); peers that are busy or another "
            "fleet's, that send garbage, do not read what they asked for (peer_slow), and others",
            "reason",
        )
        self.fleet_deletes = self._counter(
            "fleet_deletes",
            "Deletes of the fleet that etcd keeps: kept, not_kept, applied, unread (etcd did not "
            "answer), refused (no delete), dropped_all (away for too long)",
            "outcome",
        )
        self.peers = self._gauge(
            "peers", "Other daemons of the fleet: up, down, draining, quarantined", "state"
        )

    def _pool(self) -> None:
        self.pool_requests = self._counter(
            "pool_requests",
            "Calls to the pool, by operation (exists, sizes, get, put, remove, purge) and outcome: "
            "ok, gone, slow, busy",
            "operation",
            "outcome",
        )
        self.pool_refused_records = self._counter(
            "pool_refused_records",
            "Records not put into the pool: queue, evicted and not_durable (before their turn), "
            "large, corrupt, full (the pool has no room), gone, slow, busy",
            "reason",
        )
        self.pool_state = self._gauge(
            "pool_state", "1 for the state the pool is in: starting, up, down", "state"
        )

    def _events(self) -> None:
        self.events = self._counter(
            "events",
            "KV events sent to routers: BlockStored (of consecutive blocks), BlockRemoved, "
            "AllBlocksCleared",
            "type",
        )
        self.event_batches = self._counter("event_batches", "Batches of KV events sent")
        self.event_joins = self._counter(
            "event_joins", "Subscriptions to KV events; each is told everything again"
        )
        self.event_replays = self._counter(
            "event_replays",
            "Replays of KV events: kept, whole (not kept any more, so all is told), future "
            "(nothing to send yet), refused (no sequence number), busy, unread (not taken in 10 s)",
            "outcome",
        )
        self.event_drops = self._counter(
            "event_drops",
            "What was not announced, or not sent, by why: unread (a batch, to subscribers that do "
            "not read), queue (the publisher is behind), name (an @ in a model's or an engine's), "
            "namespaces (too many), failed; blocks: adapters (too many), uncommitted and parent "
            "(too many wait for their commit, or for their parent)",
            "reason",
        )
        self.event_blocks = self._gauge("event_blocks", "Blocks whose tokens are kept for events")

    def _clients(self) -> None:
        self.sessions = self._gauge("sessions", "Sessions open")
        self.leases = self._gauge("leases", "Leases and reservations held")
        self.expired_leases = self._counter(
            "expired_leases", "Leases not released by their deadline"
        )
        self.recorded = self._counter(
            "recorded_requests",
            "Requests recorded for `kvstore trace record`: sent, dropped (it did not keep up)",
            "state",
        )
        self.monitored = self._counter(
            "monitored_requests",
            "Requests told to `kvstore monitor`: sent, dropped (it did not keep up)",
            "state",
        )
        self.rpcs_running = self._gauge("rpcs_running", "Calls in progress")
        self.rpc_seconds = self._seconds(
            "rpc_seconds", "Time to answer a call, its requested wait included", "method"
        )
        self.credential_reloads = self._counter(
            "credential_reloads",
            "Times that files of tokens, certificate were read again: ok, failed (the last good "
            "ones stay in use)",
            "what",
            "result",
        )
        self.audit_lines = self._counter(
            "audit_lines",
            "Lines of the audit log: written, dropped (no room, or it fails)",
            "result",
        )
        self.rpc_errors = self._counter(
            "rpc_errors",
            "Calls refused, by class of error and reason: limbo, sessions, draining, late, "
            "slow_stream, streams, busy, reports; role, credential (none, or not valid), guesses "
            "(too many wrong tokens), tenant, revoked",
            "method",
            "error",
            "reason",
        )

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        counter = Counter(PREFIX + name, doc, labels, registry=self.registry)
        self._counted.append(counter)
        return counter

    def _gauge(self, name: str, doc: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, doc, labels, registry=self.registry)

    def _seconds(self, name: str, doc: str, *labels: str) -> Histogram:
        histogram = Histogram(
            PREFIX + name, doc, labels, registry=self.registry, buckets=SECONDS_BUCKETS
        )
        self._counted.append(histogram)
        return histogram


def _begin(counter: Counter, labels: Sequence[str]) -> None:
    """Export a counter as 0 by each label: Prometheus' increase() sees no growth in the first value
    of a series, so an alert would miss the first event."""
    for each in labels:
        counter.labels(each)


def _remove(metric: Counter | Gauge, *labels: str) -> None:
    with contextlib.suppress(KeyError):  # it was not there
        metric.remove(*labels)


def _folded(value: Any) -> Any:
    """Return {"total": x} as x, at every depth."""
    if not isinstance(value, dict):
        return value
    return value["total"] if "total" in value else {k: _folded(v) for k, v in value.items()}
