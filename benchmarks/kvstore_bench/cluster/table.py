"""The result of `kvstore bench cluster` as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore_bench.cluster.vllm_plan import FAULTS
from kvstore_bench.console.ratio_tables import (
    print_ratios,
    print_with_speeds,
    table_of,
)

MEANINGS = {
    "peer_get_vs_iperf3": "read from a peer's DRAM, verified, at this share of iperf3's speed",
    "peer_get_sealed_vs_iperf3": "the same, encrypted on its way",
    "peer_get_256k_vs_iperf3": "the same in clear, in records of 256 KiB",
    "peer_files_vs_plain_reads": "read from a peer's files, beside plain direct reads of them",
    "first_window_ms": "until the first 16 MiB of a prefix are usable, ms",
    "local_get_ratio": "gets of the lender's own engines while it lends, beside without",
    "local_get_ratio_at_a_tenth": "the same with cluster.serve_bytes_per_s at a tenth",
    "local_get_ratio_beside_iperf3": "the same beside iperf3, which sends as many bytes",
    "acquire_added_us_p50": "what the view adds to an acquire that nobody can answer, us",
    "acquire_added_us_p99": "the same, p99",
    "view_bytes_per_head": "memory of the daemon for a head of a peer",
    "view_cpu_share": "of a core, for following all peers",
    "staleness_s_p99": "from a put until another daemon finds it, p99, s",
}


ENGINE_MEANINGS = {
    "remote_ttft_vs_cold": "first token of a prompt that the other host has / of one nobody has",
    "remote_ttft_vs_local": "the same / of one in the own daemon's DRAM",
    "worst_ttft_vs_recompute": "the longest while the other host fails / of computing",
    "pd_decode_computed_blocks": "blocks that the decoding engine computed, at most",
    "pd_handoff_concurrent_vs_sequential": "from prefill to first token: both at once / in turn",
    "different_answers": "answers that were not those of the first engine",
}


def print_engines(result: Mapping[str, Any]) -> None:
    """Print the ratios, then how long the first token took while the other host failed."""
    faults = result["faults"]
    rows = [
        (
            FAULTS[fault],
            f"{case['ttft_vs_recompute']:.2f}",
            f"{case['worst_ttft_vs_recompute']:.2f}",
            ", ".join(sorted({each["reason"] or "-" for each in case["asked"]})),
        )
        for fault, case in faults["cases"].items()
    ]
    rows.append(("computing", "1.00", f"{faults['worst_recompute_vs_recompute']:.2f}", ""))
    title = "First token while the other host fails, beside computing"
    columns = ("the other host", "median", "worst", "what ended the hit")
    print_ratios("Two hosts with vLLM", ENGINE_MEANINGS, result, table_of(title, columns, rows))


def print_cluster(result: Mapping[str, Any]) -> None:
    """Print the ratios, then the speeds they were made of."""
    print_with_speeds("Two daemons", MEANINGS, result)
