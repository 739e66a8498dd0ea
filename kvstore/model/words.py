"""How commands and the page say numbers, and the reasons of misses, to people."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from kvstore.model.outcome import Ending, Reason

TENANTS_SHOWN = 10
SHORT_CHARS = 12  # of an id in hex, where people read it
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIME_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))

# What happened, with {left} for how long ago, and what to do about it.
_REASONS: dict[Reason, tuple[str, str]] = {
    Reason.NEVER_STORED: (
        "never stored (the daemon remembers evictions of the last {left})",
        "the prompt is new from there on; if it should not be, compare its tokens, cache salt and "
        "LoRA adapter with those of the request that stored it",
    ),
    Reason.BEING_WRITTEN: (
        "reserved by a writer that has not committed it yet",
        "nothing: it will be a hit in a moment",
    ),
    Reason.LOST: (
        "evicted from the arena {left} ago to make room, and the file tier had no copy of it",
        "raise dram.capacity, or give the daemon a file tier that is large and fast enough "
        "(file.path, file.capacity)",
    ),
    Reason.EVICTED: (
        "evicted {left} ago, because the file tier was at its cap",
        "raise file.capacity",
    ),
    Reason.DELETED: ("deleted {left} ago by a client or `kvstore delete`", ""),
    Reason.CLEARED: ("cleared {left} ago by a client or `kvstore clear`", ""),
    Reason.CORRUPT: (
        "dropped {left} ago, because its bytes did not match their checksum",
        "check the memory and the disk of this machine; kvstore_corrupt_blocks_total counts "
        "where it was found",
    ),
    Reason.OTHER_NAMESPACE: (
        "nothing of this namespace is stored, but another namespace of the same model holds blocks",
        "give both engines the same settings if they should share blocks; these differ",
    ),
    Reason.DEADLINE: (
        "in the file tier, but not promoted before the request's deadline",
        "raise load_deadline_s of the connector or dram.capacity, or use a faster disk",
    ),
    Reason.NO_ROOM: (
        "in the file tier, but no slot of the arena could be freed for it: all are leased, "
        "pinned or not yet written",
        "raise dram.capacity",
    ),
    Reason.READ_FAILED: (
        "in the file tier, but the disk failed to read it",
        "look at the daemon's log and at `dmesg`",
    ),
    Reason.DEVICE_OUT: (
        "on a disk of the file tier that was taken out of use {left} ago",
        "look at `kvstore status`, the daemon's log and `dmesg`; the daemon "
        "uses the disk again as soon as it works",
    ),
    Reason.LEASED_BYTES: (
        "stored, but leases held as much of the arena as is allowed",
        "nothing if it is rare: the engine asks again; otherwise raise dram.capacity or "
        "limits.leased_fraction",
    ),
    Reason.SLOWER: (
        "stored, but computing it is faster than loading it",
        "nothing: the request was answered sooner; a faster disk makes such hits longer",
    ),
    Reason.COARSE: (
        "stored without its fine part, which the request insisted on",
        "raise dram.fine_share or dram.capacity, or set file.fidelity=fine to keep fine parts",
    ),
    Reason.PEER_GONE: (
        "another daemon had more of the prefix, but ended, or let go of it before it was read",
        "nothing if it is rare; `kvstore members` shows who is there",
    ),
    Reason.PEER_BUSY: (
        "another daemon has more of the prefix, but serves others",
        "raise cluster.serve_reads there; or cluster.serve_bytes_per_s, if it is not 0",
    ),
    Reason.PEER_SLOW: (
        "another daemon has more of the prefix, but did not answer in time",
        "look at `kvstore members`, and at the network to it",
    ),
    Reason.PEER_CORRUPT: (
        "another daemon sent bytes that do not match their checksum; they were not used",
        "look at its disks and memory, and at the network to it; three such answers in ten "
        "minutes, and it is not asked any more for as long",
    ),
    Reason.POOL_GONE: (
        "the pool had more of the prefix, but does not answer any more, or has dropped it",
        "look at `kvstore status`, and at mooncake_master and the hosts that give it memory",
    ),
    Reason.POOL_SLOW: (
        "the pool has more of the prefix, but did not answer in time",
        "look at mooncake_master, and at the network to it and to the hosts of the pool",
    ),
    Reason.POOL_CORRUPT: (
        "the pool sent bytes that are not what was put; they were not used, and are removed there",
        "look at the memory of its hosts and at the network; who may reach it may change it",
    ),
    Reason.OVER_SHARE: (
        "evicted {left} ago: tenant over its share, and others took back what was lent to it",
        "raise what this tenant is guaranteed (tenants.NAME.dram.guaranteed, .file.guaranteed)",
    ),
    Reason.UNKNOWN: ("a reason this release does not know", "use the daemon's release of kvstore"),
}


def rounded(value: float, digits: int = 3) -> str:
    """Return a number rounded to so many digits, or to a whole one; never with an exponent."""
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{Decimal(f'{value:.{digits}g}'):f}"


def size(nbytes: float) -> str:
    """Return "3.1 GiB"."""
    unit = 0
    while abs(nbytes) >= 1024 and unit < len(_SIZE_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{rounded(nbytes, 4)} {_SIZE_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Return "2.5 h" or "12 ms"."""
    for length, unit in _TIME_UNITS:
        if float(f"{seconds / length:.3g}") >= 1:
            return f"{rounded(seconds / length)} {unit}"
    return f"{rounded(seconds * 1000)} ms"


def percent(part: float, whole: float) -> str:
    """Return "83 %", or "-" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def share_lines(tenants: dict[str, Any]) -> list[str]:
    """Return a line for each tenant: what it has of each tier, as the operator's stats say it."""
    lines = []
    for name, stats in list(tenants.items())[:TENANTS_SHOWN]:
        tiers = [
            f"{tier} {size(of['used_bytes'])} used, {size(of['guaranteed_bytes'])} guaranteed, cap "
            f"{size(of['cap_bytes'])}"
            + (f", {size(of['lent_bytes'])} lent" * bool(of["lent_bytes"]))
            for tier, of in stats.get("share", {}).items()
        ]
        lines.append(f"{name}: " + "; ".join(tiers))
    if len(tenants) > TENANTS_SHOWN:
        lines.append(f"and {len(tenants) - TENANTS_SHOWN} more: kvstore tenant list")
    return lines


def fidelity_lines(stats: dict[str, Any]) -> list[str]:
    """Return a line for each fidelity and tier: what a daemon's stats say it has there."""
    lines = []
    for each in stats.get("fidelities", ()):
        refined = f", {each['refined_blocks']} with fine parts" if each["refined_blocks"] else ""
        saved = each["raw_bytes"] / max(1, each["stored_bytes"])
        lines.append(
            f"{each['fidelity']} in {each['tier']}: {each['blocks']} blocks{refined}, "
            f"{size(each['stored_bytes'])} for {size(each['raw_bytes'])} of KV ({saved:.2f}x)"
        )
    return lines


def printable(text: str) -> str:
    """Return what a client has named, without what a terminal would take for a command."""
    return "".join(each if each.isprintable() else "?" for each in text)


def bar(part: float, whole: float, width: int = 20) -> str:
    """Return "[#####     ]"."""
    filled = round(width * min(1.0, part / whole)) if whole else 0
    return f"[{'#' * filled}{' ' * (width - filled)}]"


def reason_text(reason: Reason, left_s: float) -> str:
    """Return what happened to a block, as words."""
    return _REASONS[reason][0].format(left=duration(left_s))


def reason_words(reason: Reason) -> str:
    """Return the same, with {left} in the place of how long ago."""
    return _REASONS[reason][0]


def advice_text(reason: Reason) -> str:
    """Return what to do about a miss; "" for nothing."""
    return _REASONS[reason][1]


def ending_lines(ending: Ending) -> list[str]:
    """Return what ended a hit, and then what to do about it, if anything."""
    group = f" (KV cache group {ending.group})" if ending.group else ""
    lines = [f"block {ending.block}{group}: {reason_text(ending.reason, ending.left_s)}"]
    advice = advice_text(ending.reason)
    if advice:
        lines.append(f"what to do: {advice}{':' if ending.differs else ''}")
    return lines + [f"  {field}" for field in ending.differs]
