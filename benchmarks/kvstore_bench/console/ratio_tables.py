"""The results of `kvstore bench store` and its like as a person reads them.

rich is imported where it prints: the commands that ask for JSON do without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

MEANINGS = {
    "local_get_ratio": "get, verified, at this share of the speed of a plain copy",
    "local_get_ratio_unverified": "get, unverified",
    "local_put_ratio": "put, checksum included",
    "match_1000_p50_ms": "match of 1000 keys, median, ms",
    "match_1000_vs_empty_rpc": "the same / an RPC of as many bytes that does nothing",
    "match_1000_p99_ms": "match of 1000 keys, p99 with many blocks and a busy writer, ms",
    "memcpy_gb_per_s": "a plain copy here, GB/s",
    "get_vs_raw": "time to move and decode coded records / to move raw ones, checksums in both",
    "put_vs_raw": "time to encode and move them / to move raw ones",
}


TLS_MEANINGS = {
    "unary_p50_vs_plain": "a call, median / the same over plaintext",
    "stream_vs_plain": "get, streamed and verified, at this share of plaintext's speed",
    "unary_p50_ms": "a call over TLS, median, ms",
    "stream_gb_per_s": "get over TLS, GB/s",
}

TIER_MEANINGS = {
    "read_vs_fio": "cold reads into the arena, verified, at this share of fio's speed",
    "write_vs_fio": "durable writes, at this share of fio's speed",
    "raw_gb_s_vs_fio": "bytes before coding restored, decoded, at this share of fio's speed",
    "written_vs_raw": "bytes written to disk per byte that was put, before coding",
    "first_block_extra_ms": "first block of a cold prefix there, beyond one direct read, ms",
}

OBJECT_MEANINGS = {
    "read_vs_raw": "found, read and verified, at this share of plain gets' speed",
    "write_vs_raw": "written with checksums, at this share of plain puts' speed",
    "absent_requests_cold": "requests to find out that a prefix is not there",
    "absent_requests_warm": "the same, once more",
}

SCRUB_MEANINGS = {
    "flips_found": "flipped bits that the daemon found by itself",
    "flips": "of so many",
    "found_s": "seconds until then, at full speed",
    "read_ratio_while_scrubbing": "speed of cold reads beside it, of that without",
}

RECOVERY_MEANINGS = {
    "first_hit_s": "seconds from the start of the process to a hit",
    "complete_s": "to knowing every block",
}

RESUMED_MEANINGS = {
    "ttft_dram_vs_cold": "time to first token from DRAM / without kvstore",
    "ttft_file_vs_cold": "the same from files, after SIGKILL of the daemon",
    "ttft_saving_vs_cold": "the same with nothing stored: what looking it up costs",
    "ttft_cold_s": "seconds without kvstore",
    "ttft_dram_s": "seconds from DRAM",
    "ttft_file_s": "seconds from files",
}

GPU_MEANINGS = {
    "gather_vs_copy": "gather with checksums, at this share of a device copy's speed",
    "scatter_vs_copy": "scatter with checksums, the same",
    "sm_ms_per_gb": "ms for which moving a GB holds the SMs",
    "d2h_vs_pinned": "pages to arena, at this share of a plain pinned copy's speed",
    "h2d_vs_pinned": "arena to pages, the same",
    "save_gb_s": "GB/s of a long prefix to the daemon, as the engine holds it",
    "restore_gb_s": "the same back",
    "l3_save_gb_s": "the same to the daemon, coded on the device",
    "l3_restore_gb_s": "the same back",
    "ttft_32k_dram_vs_cold": "time to first token of 32k tokens, from DRAM / without kvstore",
    "ttft_32k_nvme_vs_cold": "the same from files, after SIGKILL of the daemon",
    "ttft_32k_dram_l3_vs_raw": "from DRAM, of records coded exactly / of raw ones",
    "ttft_32k_nvme_l3_vs_raw": "the same from files",
    "ttft_32k_dram_ep_vs_raw": "from DRAM, of lossy records / of raw ones",
    "ttft_32k_nvme_ep_vs_raw": "the same from files, which keep base parts alone",
}

_PEER_FIELDS = ("ratio", "encode_gb_s", "decode_gb_s")

TENANT_MEANINGS = {
    "hit_ratio_vs_alone": "hits of the quiet tenant, beside it alone",
    "acquire_p99_vs_alone": "p99 of its acquire, the same",
    "acquire_p99_copies_vs_alone": "the same beside processes that only copy memory",
    "bandwidth_vs_guarantee": "its reads from disk, beside its part by weight of it alone",
    "borrowed_share": "part of the free room that one tenant got",
    "given_back_s": "seconds that a GiB more took to put, because it had to be given back",
    "cap_overshoot_bytes": "most bytes over a cap, of the worst tenant and tier",
    "idle_rss_mib_each": "MiB of an idle tenant, beside its arena",
    "idle_cpu_share": "of a core, for all idle tenants",
}

AMONG_MEANINGS = {
    "match_vs_alone": "match of 1000 keys, time beside a daemon without tenants",
    "get_vs_alone": "get, the same",
    "put_vs_alone": "put, the same",
}
SEALED_MEANINGS = {
    "sealed_get_vs_direct": "get, speed beside a direct arena",
    "sealed_put_vs_direct": "put, the same",
}


def print_store(result: Mapping[str, Any]) -> None:
    """Print the ratios, then what they were made of."""
    times = _table("Milliseconds", ("", "p25", "p50", "p75", "p99", "rounds"))
    for name, timing in result["seconds"].items():
        values = [f"{1e3 * timing[each]:.2f}" for each in ("p25", "p50", "p75", "p99")]
        times.add_row(name, *values, str(timing["rounds"]))
    _print(_ratios("Local path", MEANINGS, result), times)
    if shares := result.get("lock_held_share"):
        table = _table("Copies in memory", ("", "GB/s", "interpreter lock held"))
        for name, share in shares.items():
            table.add_row(name, f"{result['coded']['gb_s'][name]:.1f}", f"{100 * share:.0f} %")
        _print(table)
    _print(_threads_table(result))


def _threads_table(result: Mapping[str, Any]) -> Table:
    """Return the rows of each number of threads, and how long the lock is held."""
    own = ", ".join(
        f"{name} {seconds:.3f} s" for name, seconds in result["gil_held_s_per_gb"].items()
    )
    table = _table(
        f"Interpreter lock held for a GB: {own}",
        ("threads", "memcpy", "get", "put", "get / memcpy", "lock, get", "put"),
    )
    for count, row in result["threads"].items():
        speeds = [f"{row['gb_per_s'][name]:.1f} GB/s" for name in ("memcpy", "get", "put")]
        held = [f"{row['gil_held_s_per_gb'][name]:.3f} s" for name in ("get", "put")]
        table.add_row(count, *speeds, f"{row['local_get_ratio']:.2f}", *held)
    return table


def print_tls(result: Mapping[str, Any]) -> None:
    """Print the ratios."""
    _print(_ratios("TLS with a token, beside plaintext TCP", TLS_MEANINGS, result["tls"]))


def print_sealed(result: Mapping[str, Any]) -> None:
    """Print what a sealed arena costs, then the times it was made of."""
    _print(_ratios("Sealed arena", SEALED_MEANINGS, result), _milliseconds(result["seconds"]))


def print_among(result: Mapping[str, Any]) -> None:
    """Print what a tenant pays for not being alone, then the times it was made of."""
    title = f"One of {result['tenants']} tenants"
    _print(_ratios(title, AMONG_MEANINGS, result), _milliseconds(result["seconds"]))


def _milliseconds(seconds: Mapping[str, Any]) -> Any:
    times = _table("Milliseconds", ("", "p25", "p50", "p75", "p99", "rounds"))
    for name, timing in seconds.items():
        values = [f"{1e3 * timing[each]:.2f}" for each in ("p25", "p50", "p75", "p99")]
        times.add_row(name, *values, str(timing["rounds"]))
    return times


def print_tenants(result: Mapping[str, Any]) -> None:
    """Print what a quiet tenant notices, and what idle ones cost."""
    count = result["plan"]["durable_tenants"]
    durable = {f"durable_{count}_vs_1": f"durable commits of 4 MiB, {count} tenants beside one"}
    _print(_ratios("Tenants", TENANT_MEANINGS | durable, result))


def print_tier(result: Mapping[str, Any]) -> None:
    """Print the ratios, then the speeds they were made of."""
    print_with_speeds("File tier", TIER_MEANINGS, result)
    if held := result.get("gil_held_s_per_gb"):
        gb_per_s = {name: each["p50"] / 1e9 for name, each in result["bytes_per_s"].items()}
        own = {"gb_per_s": gb_per_s, "gil_held_s_per_gb": held}
        rows = {f"{result['plan']['depth']}, as above": own, **result.get("threads", {})}
        _print(_file_threads_table(rows))


def _file_threads_table(threads: Mapping[str, Any]) -> Table:
    """Return how fast the tier is and how long locks are held, a row a number of threads."""
    table = _table(
        "Interpreter lock held for a GB, seconds",
        ("threads", "read GB/s", "write GB/s", "daemon, read", "write", "client, read", "write"),
    )
    for count, row in threads.items():
        speeds = (f"{row['gb_per_s'][kind]:.2f}" for kind in ("read", "write"))
        held = row["gil_held_s_per_gb"]
        names = ("read", "write", "client_read", "client_write")
        table.add_row(count, *speeds, *(f"{held[name]:.3f}" for name in names))
    return table


def print_recovery(result: Mapping[str, Any]) -> None:
    """Print how long it took."""
    title = f"Recovery of {result['plan']['blocks']:,} blocks"
    _print(_ratios(title, RECOVERY_MEANINGS, result))


def print_events(result: Mapping[str, Any]) -> None:
    """Print what events cost, and how true an index is."""
    bars = {
        "event_to_visible_ms_p50": ("commit to the indexer's answer, p50 ms", "at most 50"),
        "put_ratio_with_events": ("puts with events / without", "0.95"),
        "memory_bytes_per_block": ("bytes a block of 16 tokens", "at most 120"),
        "index_equals_daemon": ("prompts of which indexer and daemon say the same", "1.0"),
        "claimed_but_absent": ("blocks claimed and not there, after faults", "at most 0.01"),
        "present_but_unknown": ("blocks there and not claimed, after faults", "at most 0.05"),
    }
    table = _table("KV events", ("what", "measured", "goal"))
    for field, (what, goal) in bars.items():
        if field in result:
            table.add_row(what, f"{result[field]:.4g}", goal)
    _print(table)


def print_index(result: Mapping[str, Any]) -> None:
    """Print a row a policy."""
    title = f"{result['plan']['blocks']:,} resident blocks"
    columns = {
        "resident_blocks": "blocks",
        "bytes_per_block": "bytes a block",
        "match_p50_us": "match of 64, p50 us",
        "put_p50_us": "put of 64, p50 us",
        "pause_ms": "longest call, ms",
        "pause_cpu_ms": "longest call, ms of processor time",
    }
    columns = {field: title for field, title in columns.items() if field in result}
    table = _table(title, ("policy", *columns.values()))
    for policy in result["plan"]["policies"]:
        table.add_row(policy, *(f"{result[field][policy]:,.0f}" for field in columns))
    _print(table)
    if "l3" in result:
        _print(_coded_index(result))


def _coded_index(result: Mapping[str, Any]) -> Table:
    ratio = result["match_fine_vs_plain"]
    title = f"Coded records; a match with fine parts takes {ratio:.2f} of one without"
    table = _table(title, ("policy, record", "bytes a block", "arena filled", "small one"))
    for policy in result["plan"]["policies"]:
        for form in ("l3", "ep", "hybrid"):
            found = {name: each[policy] for name, each in result[form].items()}
            nbytes = f"{found['bytes_per_block']:,.0f}" if "bytes_per_block" in found else ""
            fills = (f"{100 * found[name]:.1f} %" for name in ("arena_fill", "arena_fill_small"))
            table.add_row(f"{policy}, {form}", nbytes, *fills)
    return table


def print_codec(result: Mapping[str, Any]) -> None:
    """Print a row a form and a peer: how small, how fast."""
    from kvstore_bench.codec.picture import points

    title = f"KV in bfloat16, one core, {result['isa']}; a copy: {result['memcpy_gb_s']:.1f} GB/s"
    table = _table(title, ("", "times smaller", "encode GB/s", "decode GB/s"))
    for name, *figures in points(result):
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    _print(table)


def print_fidelity(result: Mapping[str, Any]) -> None:
    """Print a row a rung: how small, how different."""
    from kvstore_bench.fidelity.picture import rows

    exact = f"exact KV has perplexity {result['exact']['perplexity']:.2f}"
    columns = ("", "times smaller", "KL", "worst text", "same token %", "perplexity")
    table = _table(f"{result['model']}: {exact}", columns)
    for title, each in rows(result):
        lost = (f"{each[field]:.1e}" if each[field] else "0" for field in ("kl", "kl_max"))
        same = f"{100 * each['top1']:.1f}"
        table.add_row(title, f"{each['ratio']:.2f}", *lost, same, f"{each['perplexity']:.2f}")
    _print(table)


def print_resumed(result: Mapping[str, Any]) -> None:
    """Print the ratios and the medians they were made of."""
    title = f"Resumed prompts of {result['plan']['prompt_tokens']:,} tokens: {result['model']}"
    _print(_ratios(title, RESUMED_MEANINGS, result))


def print_gpu(result: Mapping[str, Any]) -> None:
    """Print the ratios, and nvCOMP's ANS beside L3 where it is installed."""
    tables = [_ratios(result["device"], GPU_MEANINGS, result)]
    if ans := result.get("nvcomp_ans"):
        columns = ("", "times smaller", "encode GB/s", "decode GB/s")
        figures = {f"nvCOMP ANS, {ans['data_type']}": (*map(ans.get, _PEER_FIELDS),)}
        if result["coding"]:
            speeds = (1e3 * result[field] for field in ("l3_encode_tb_s", "l3_decode_tb_s"))
            figures["L3"] = (result["l3_ratio"], *speeds)
        rows = [
            (name, f"{ratio:.2f}", *(f"{speed:.0f}" for speed in speeds))
            for name, (ratio, *speeds) in figures.items()
        ]
        tables.append(table_of("Exact, on the same tensors", columns, rows))
    _print(*tables)


def print_object_tier(result: Mapping[str, Any]) -> None:
    """Print the ratios, then the speeds they were made of."""
    print_with_speeds("Object tier", OBJECT_MEANINGS, result)


ENCRYPTED_MEANINGS = {
    "read_vs_plain": "cold reads with a root key, beside without one",
    "write_vs_plain": "the same for writes, until they are durable or stored",
    "cpu_s_per_gib_more": "CPU seconds per GiB that it costs, the worse of reads and writes",
    "absent_requests_cold": "requests for a prefix that nobody stored",
    "absent_requests_warm": "the same, asked again",
}


def print_encrypted(result: Mapping[str, Any]) -> None:
    """Print the ratios, then the speeds they were made of."""
    print_with_speeds("Encryption", ENCRYPTED_MEANINGS, result)


def print_scrub(result: Mapping[str, Any]) -> None:
    """Print what was found and what it cost."""
    print_with_speeds("Scrub", SCRUB_MEANINGS, result)


def print_ratios(
    title: str, meanings: Mapping[str, str], result: Mapping[str, Any], *tables: Table
) -> None:
    """Print the ratios, then tables."""
    _print(_ratios(title, meanings, result), *tables)


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column is text and whose others are numbers."""
    table = _table(title, columns)
    for row in rows:
        table.add_row(*row)
    return table


def print_with_speeds(title: str, meanings: Mapping[str, str], result: Mapping[str, Any]) -> None:
    """Print the ratios, then the speeds they were made of."""
    speeds = _table("MB/s", ("", "min", "median", "max"))
    for name, each in result["bytes_per_s"].items():
        speeds.add_row(name, *(f"{each[key] / 1e6:.0f}" for key in ("min", "p50", "max")))
    _print(_ratios(title, meanings, result), speeds)


def _ratios(title: str, meanings: Mapping[str, str], result: Mapping[str, Any]) -> Table:
    table = _table(title, ("", "measured", "meaning"))
    table.columns[2].justify = "left"
    for field, meaning in meanings.items():
        if field in result:
            value = result[field]
            table.add_row(field, "-" if value is None else f"{value:.3g}", meaning)
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    """Return a table whose first column is text and whose others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _print(*tables: Table) -> None:
    from rich.console import Console

    for table in tables:
        Console().print(table)
