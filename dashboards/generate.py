"""Write kvstore.json, the Grafana dashboard, from the list below: `python dashboards/generate.py`.

A test checks that every metric named here exists, that every metric kvstore exports is shown, and
that kvstore.json is what this writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

OUTPUT = Path(__file__).with_name("kvstore.json")
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
OF = '{instance=~"$instance"}'
OVER = "[$__rate_interval]"


class Query(NamedTuple):
    expr: str
    legend: str


class Panel(NamedTuple):
    title: str
    unit: str  # as Grafana names it
    queries: tuple[Query, ...]
    description: str = ""


def rate(metric: str, *by: str, legend: str = "") -> Query:
    """Show how fast a counter grows, one line for each value of the labels `by`."""
    shown = legend or " ".join(f"{{{{{label}}}}}" for label in by)
    return Query(f"sum by ({', '.join(by)}) (rate({metric}{OF}{OVER}))", shown)


def gauge(metric: str, legend: str) -> Query:
    return Query(f"{metric}{OF}", legend)


def quantile(share: float, metric: str, *by: str) -> Query:
    labels = ", ".join(("le", *by))
    name = " ".join((f"p{share * 100:g}", *(f"{{{{{label}}}}}" for label in by)))
    return Query(
        f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{OF}{OVER})))", name
    )


def ratio(tier: str) -> Query:
    hits = f'sum(rate(kvstore_hit_blocks_total{{tier="{tier}", instance=~"$instance"}}{OVER}))'
    return Query(f"{hits} / sum(rate(kvstore_lookup_blocks_total{OF}{OVER}))", tier)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Hits": (
        Panel(
            "Hit ratio by tier",
            "percentunit",
            (ratio("dram"), ratio("file"), ratio("object"), ratio("peer"), ratio("pool")),
            "Blocks served over blocks asked for.",
        ),
        Panel(
            "Hit ratio by model",
            "percentunit",
            (
                Query(
                    f"sum by (model) (rate(kvstore_model_hit_blocks_total{OF}{OVER}))"
                    f" / sum by (model) (rate(kvstore_model_lookup_blocks_total{OF}{OVER}))",
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            "Hit ratio by namespace",
            "percentunit",
            (
                Query(
                    f"sum by (namespace) (rate(kvstore_namespace_hit_blocks_total{OF}{OVER})) / "
                    f"sum by (namespace) (rate(kvstore_namespace_lookup_blocks_total{OF}{OVER}))",
                    "{{namespace}}",
                ),
            ),
        ),
        Panel(
            "What ended hits",
            "reqps",
            (rate("kvstore_requests_total", "ended_by"),),
            "complete: the whole prefix was a hit. For single requests: kvstore explain.",
        ),
        Panel(
            "Tokens",
            "short",
            (
                rate("kvstore_lookup_tokens_total", "instance", legend="asked for"),
                rate("kvstore_hit_tokens_total", "tier"),
            ),
            "A second.",
        ),
        Panel(
            "Prefill saved",
            "s",
            (rate("kvstore_saved_prefill_seconds_total", "instance"),),
            "Seconds of prefill a second, as engines say how fast they are.",
        ),
    ),
    "Tiers": (
        Panel("Arena", "bytes", (gauge("kvstore_dram_bytes", "{{state}}"),)),
        Panel(
            "Arena stopped growing",
            "short",
            (rate("kvstore_arena_growth_pauses_total", "instance"),),
            "Too little memory was free; it goes on when there is room again.",
        ),
        Panel("File tier", "bytes", (gauge("kvstore_file_bytes", "{{state}}"),)),
        Panel(
            "Disks of the file tier", "bytes", (gauge("kvstore_file_device_bytes", "{{device}}"),)
        ),
        Panel("Blocks", "short", (gauge("kvstore_blocks", "{{tier}}"),)),
        Panel(
            "Orders of eviction",
            "percentunit",
            (
                gauge("kvstore_shadow_hit_ratio", "{{tier}} by {{order}}"),
                gauge("kvstore_policy_follows", "{{tier}} follows {{order}}"),
                rate("kvstore_policy_failures_total", "tier", legend="policies failed, {{tier}}"),
            ),
            "What small models of each tier hit lately, and which of them the tier follows.",
        ),
        Panel("Bytes by model", "bytes", (gauge("kvstore_model_bytes", "{{model}} {{tier}}"),)),
        Panel(
            "Bytes by namespace",
            "bytes",
            (gauge("kvstore_namespace_bytes", "{{namespace}} {{tier}}"),),
        ),
        Panel("Blocks by model", "short", (gauge("kvstore_model_blocks", "{{model}}"),)),
        Panel(
            "Blocks by fidelity",
            "short",
            (
                gauge("kvstore_fidelity_blocks", "{{fidelity}} {{tier}}"),
                gauge("kvstore_refined_blocks", "{{fidelity}} {{tier}}, with fine parts"),
            ),
        ),
        Panel(
            "Bytes stored, and as engines hold them",
            "bytes",
            (
                gauge("kvstore_stored_bytes", "{{fidelity}} {{tier}} stored"),
                gauge("kvstore_raw_bytes", "{{fidelity}} {{tier}} raw"),
            ),
        ),
        Panel(
            "Fine parts that were missing",
            "short",
            (
                rate("kvstore_base_hit_blocks_total", "instance", legend="served without"),
                rate("kvstore_thinned_blocks_total", "instance", legend="dropped for room"),
            ),
            "A second. Blocks of lossy namespaces.",
        ),
        Panel("Bandwidth", "Bps", (rate("kvstore_tier_bytes_total", "tier", "direction"),)),
        Panel(
            "Blocks that left",
            "short",
            (rate("kvstore_evicted_blocks_total", "tier", "reason"),),
            "A second. lost: left the arena without a copy in the file tier.",
        ),
        Panel(
            "Blocks brought up",
            "short",
            (rate("kvstore_promoted_blocks_total", "instance", legend="file to dram"),),
        ),
    ),
    "Time": (
        Panel(
            "Calls, p99",
            "s",
            (quantile(0.99, "kvstore_rpc_seconds", "method"),),
            "Acquire and Reserve include the time they were told to wait.",
        ),
        Panel("Calls, median", "s", (quantile(0.5, "kvstore_rpc_seconds", "method"),)),
        Panel(
            "Frames up, batches down",
            "s",
            (
                quantile(0.5, "kvstore_promote_seconds"),
                quantile(0.99, "kvstore_promote_seconds"),
                quantile(0.99, "kvstore_write_behind_seconds"),
            ),
            "Time to bring a frame up (first two), and to write a batch behind.",
        ),
        Panel(
            "Load or recompute",
            "short",
            (rate("kvstore_load_decisions_total", "decision"),),
            "What was decided about prefixes in slower tiers; cut: given up on the way.",
        ),
        Panel(
            "Loads, expected and real",
            "s",
            (
                quantile(0.5, "kvstore_load_predicted_seconds"),
                quantile(0.5, "kvstore_load_seconds"),
                quantile(0.99, "kvstore_load_seconds"),
            ),
        ),
    ),
    "Hints": (
        Panel(
            "Hints",
            "reqps",
            (rate("kvstore_hints_total", "kind", "result"),),
            "result: done, or what was in the way of doing all of it.",
        ),
        Panel(
            "Blocks of hints",
            "short",
            (rate("kvstore_hint_blocks_total", "kind"),),
            "A second; of prefetch: that have come up.",
        ),
    ),
    "Durability and queues": (
        Panel(
            "Durable lag",
            "s",
            (gauge("kvstore_durable_lag_seconds", "age of the oldest block not durable"),),
            "What a crash may lose.",
        ),
        Panel("Not durable yet", "bytes", (gauge("kvstore_dirty_bytes", "bytes"),)),
        Panel(
            "Queues",
            "short",
            (
                gauge("kvstore_queue_depth", "{{queue}}"),
                gauge("kvstore_rpcs_running", "calls"),
            ),
        ),
        Panel(
            "Recorded",
            "reqps",
            (rate("kvstore_recorded_requests_total", "state"),),
            "For `kvstore trace record`; dropped: it did not keep up.",
        ),
        Panel(
            "Monitored",
            "reqps",
            (rate("kvstore_monitored_requests_total", "state"),),
            "For `kvstore monitor`; dropped: it did not keep up.",
        ),
    ),
    "Refused, wrong, failed": (
        Panel("Records refused", "short", (rate("kvstore_refused_parts_total", "reason"),)),
        Panel(
            "Wrong checksums",
            "short",
            (rate("kvstore_corrupt_blocks_total", "where"),),
            "By who noticed. These blocks were dropped, never served.",
        ),
        Panel(
            "Reported as corrupt",
            "short",
            (rate("kvstore_reported_blocks_total", "result"),),
            "By readers, and what the daemon found in its own copies.",
        ),
        Panel(
            "Holes in the arena",
            "Bps",
            (
                rate("kvstore_punched_bytes_total", "instance"),
                rate("kvstore_touched_again_bytes_total", "instance", legend="touched again"),
            ),
            "Memory that a client gave back to the system; it is refilled. Memory that the daemon "
            "gave back and a client touched again; it is given back again.",
        ),
        Panel(
            "Disk",
            "short",
            (
                rate("kvstore_write_behind_errors_total", "instance", legend="writes failed"),
                rate("kvstore_read_errors_total", "instance", legend="reads failed"),
                gauge("kvstore_file_failing", "failing now"),
                rate("kvstore_unwritten_records_total", "instance", legend="over the write budget"),
            ),
        ),
        Panel(
            "Background tasks started again",
            "short",
            (rate("kvstore_task_failures_total", "task"),),
            "After an unexpected error, which the log has: a bug, please report it.",
        ),
        Panel(
            "State of disks",
            "short",
            (gauge("kvstore_file_device_state", "{{device}} {{state}}"),),
            "1 for the state a directory of the file tier is in.",
        ),
        Panel("Calls refused", "reqps", (rate("kvstore_rpc_errors_total", "error", "reason"),)),
        Panel(
            "Credentials and audit log",
            "short",
            (
                rate("kvstore_credential_reloads_total", "what", "result"),
                rate("kvstore_audit_lines_total", "result", legend="audit lines {{result}}/s"),
            ),
            "Files of credentials that were read again; failed: the last good ones stay in use.",
        ),
        Panel(
            "Sessions and leases",
            "short",
            (
                gauge("kvstore_sessions", "sessions"),
                gauge("kvstore_leases", "leases"),
                rate("kvstore_expired_leases_total", "instance", legend="expired leases/s"),
            ),
        ),
        Panel(
            "Daemon",
            "short",
            (
                Query(f"rate(process_cpu_seconds_total{OF}{OVER})", "CPU cores"),
                gauge("kvstore_build_info", "up, release {{version}}"),
            ),
        ),
    ),
    "Object tier": (
        Panel("Bucket", "bytes", (gauge("kvstore_object_bytes", "{{state}}"),)),
        Panel(
            "Requests",
            "reqps",
            (
                rate("kvstore_object_requests_total", "kind"),
                rate("kvstore_object_retries_total", "kind", legend="{{kind}}, again"),
            ),
            "Each one costs.",
        ),
        Panel(
            "Errors",
            "reqps",
            (
                rate("kvstore_object_errors_total", "kind", "reason"),
                gauge("kvstore_object_breaker_open", "breaker open"),
            ),
        ),
        Panel(
            "Not written, and collected",
            "short",
            (
                rate("kvstore_object_refused_writes_total", "reason", legend="refused {{reason}}"),
                rate("kvstore_object_collected_total", "reason", legend="deleted {{reason}}"),
            ),
            "Objects a second.",
        ),
    ),
    "Other hosts": (
        Panel("Members", "short", (gauge("kvstore_peers", "{{state}}"),)),
        Panel("Bandwidth", "Bps", (rate("kvstore_peer_bytes_total", "direction"),)),
        Panel("Reads", "reqps", (rate("kvstore_peer_reads_total", "outcome"),)),
        Panel("Answers, p99", "s", (quantile(0.99, "kvstore_peer_match_seconds", "outcome"),)),
        Panel(
            "Not asked, and refused",
            "reqps",
            (rate("kvstore_peer_refused_total", "reason"),),
            "Requests that named a source of no member, and what other daemons were refused.",
        ),
        Panel(
            "Deletes that etcd keeps",
            "ops",
            (rate("kvstore_fleet_deletes_total", "outcome"),),
            "Kept, applied, and not kept: those may come back with a daemon that was away.",
        ),
    ),
    "Pool": (
        Panel("State", "short", (gauge("kvstore_pool_state", "{{state}}"),)),
        Panel("Calls", "reqps", (rate("kvstore_pool_requests_total", "operation", "outcome"),)),
        Panel(
            "Not put",
            "short",
            (rate("kvstore_pool_refused_records_total", "reason"),),
            "Records a second.",
        ),
    ),
    "Events for routers": (
        Panel("Events sent", "ops", (rate("kvstore_events_total", "type"),)),
        Panel(
            "Batches, and who joined",
            "ops",
            (
                rate("kvstore_event_batches_total", legend="batches"),
                rate("kvstore_event_joins_total", legend="joined"),
            ),
            "Whoever joins is told everything again.",
        ),
        Panel("Replays", "ops", (rate("kvstore_event_replays_total", "outcome"),)),
        Panel(
            "Not sent, or not announced",
            "ops",
            (rate("kvstore_event_drops_total", "reason"),),
            "unread: a subscriber does not read.",
        ),
        Panel("Blocks with tokens", "short", (gauge("kvstore_event_blocks", "blocks"),)),
    ),
    "In the engine (vLLM)": (
        Panel(
            "Moved",
            "Bps",
            (
                rate("vllm:kvstore_loaded_bytes_total", "instance", legend="loaded {{instance}}"),
                rate("vllm:kvstore_saved_bytes_total", "instance", legend="saved {{instance}}"),
                rate("vllm:kvstore_saved_raw_bytes_total", "instance", legend="raw {{instance}}"),
                rate("vllm:kvstore_bounced_bytes_total", "instance", legend="bounced {{instance}}"),
            ),
            "raw: what was saved, as the engine holds it. bounced: through a buffer, because the "
            "GPU does not reach the daemon's memory (yet).",
        ),
        Panel(
            "Loaded records by fidelity",
            "short",
            (
                rate("vllm:kvstore_loaded_blocks_total", "instance", legend="all"),
                rate("vllm:kvstore_loaded_lossy_blocks_total", "instance", legend="lossy"),
                rate(
                    "vllm:kvstore_loaded_base_blocks_total",
                    "instance",
                    legend="lossy, without a fine part",
                ),
            ),
            "Records a second.",
        ),
        Panel(
            "Loads and lookups that failed",
            "reqps",
            (
                rate("vllm:kvstore_loads_failed_total", "instance", legend="loads"),
                rate("vllm:kvstore_loads_given_up_total", "instance", legend="loads, given up"),
                rate("vllm:kvstore_lookups_failed_total", "instance", legend="lookups"),
                rate("vllm:kvstore_lookups_late_total", "instance", legend="lookups, late"),
                rate("vllm:kvstore_corrupt_blocks_total", "instance", legend="wrong checksums"),
                rate("vllm:kvstore_corrupt_fine_blocks_total", "instance", legend="fine parts"),
            ),
        ),
        Panel(
            "Breaker",
            "short",
            (
                gauge("vllm:kvstore_breakers_open", "open now {{instance}}"),
                rate("vllm:kvstore_breaker_trips_total", "instance", legend="trips/s"),
            ),
            "Clients of an engine that refuse calls at once: the daemon does not answer.",
        ),
        Panel(
            "Hints of requests",
            "reqps",
            (
                rate("vllm:kvstore_hints_total", "instance", legend="sent"),
                rate("vllm:kvstore_hints_failed_total", "instance", legend="failed"),
                rate("vllm:kvstore_hints_ignored_total", "instance", legend="unreadable"),
            ),
        ),
        Panel(
            "Saves dropped",
            "reqps",
            (
                rate("vllm:kvstore_saves_dropped_queue_total", "instance", legend="queue full"),
                rate("vllm:kvstore_saves_dropped_down_total", "instance", legend="daemon away"),
                rate("vllm:kvstore_saves_dropped_reuse_total", "instance", legend="block reused"),
                rate("vllm:kvstore_refused_blocks_total", "instance", legend="no room"),
            ),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(_row(title, top, len(panels) + 1))
        top += 1
        for index, panel in enumerate(row):
            at = index * PANEL_WIDTH
            place = (at % COLUMNS, top + at // COLUMNS * PANEL_HEIGHT)
            panels.append(_panel(panel, place, len(panels) + 1))
        top += -(-len(row) * PANEL_WIDTH // COLUMNS) * PANEL_HEIGHT
    return {
        "uid": "kvstore",
        "title": "kvstore",
        "tags": ["kvstore", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _instances()]},
        "panels": panels,
    }


def _row(title: str, top: int, number: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}


def _panel(panel: Panel, place: tuple[int, int], number: int) -> dict[str, Any]:
    x, y = place
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query.expr, "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "source"}


def _instances() -> dict[str, Any]:
    query = 'label_values({__name__=~"kvstore_build_info|vllm:kvstore_lookups_total"}, instance)'
    return {
        "name": "instance",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def render() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(render(), encoding="utf-8")
