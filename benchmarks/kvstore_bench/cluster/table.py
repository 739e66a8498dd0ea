"""The result of `kvstore bench cluster` as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore_bench.console.ratio_tables import print_with_speeds

MEANINGS = {
    "peer_get_vs_iperf3": "read from a peer's DRAM, verified, at this share of iperf3's speed",
    "peer_get_sealed_vs_iperf3": "the same, encrypted on its way",
    "peer_get_256k_vs_iperf3": "the same in clear, in records of 256 KiB",
    "peer_files_vs_plain_reads": "read from a peer's files, beside plain direct reads of them",
    "first_window_ms": "until the first 16 MiB of a prefix are usable, ms",
    "local_get_ratio": "gets of the lender's own engines while it lends, beside without",
    "local_get_ratio_at_a_tenth": "the same with cluster.serve_bytes_per_s at a tenth",
}


def print_cluster(result: Mapping[str, Any]) -> None:
    """Print the ratios, then the speeds they were made of."""
    print_with_speeds("Two daemons", MEANINGS, result)
