"""What a daemon's numbers mean for those who run it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvstore.model.words import duration, percent, size

_DEVICE_ADVICE = {
    "missing": "mount it, or take it out of file.path; until then deletes are refused",
    "full": "make room on it, or set file.free_min; its blocks are served",
    "read_only": "look at `dmesg` and remount it; its blocks are served, deletes are refused",
}
_NO_DAMAGE = {
    "put": "clients sent bytes that are not those of their checksums: look at the clients' logs",
    "pair": "fine parts were beside the base part of another writer: nothing is to be done",
}
"""Places that drop blocks although this machine's memory and disks are right."""
LAG_S_MAX = 10.0
FULL_FRACTION = 0.9
LIMBO_FRACTION = 0.1


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # worth knowing; nothing is wrong
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found, and what to do about it."""

    about: str
    level: Level
    found: str
    do: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    def lines(self) -> list[str]:
        head = f"{self.level:<5}  {self.about:<14}  {self.found}"
        return [head, f"{'':<23}-> {self.do}"] if self.do else [head]


def ok(about: str, found: str) -> Finding:
    return Finding(about, Level.OK, found)


def note(about: str, found: str, do: str = "") -> Finding:
    return Finding(about, Level.NOTE, found, do)


def wrong(about: str, found: str, do: str) -> Finding:
    return Finding(about, Level.WRONG, found, do)


def daemon_health(stats: dict[str, Any]) -> list[Finding]:
    """Judge what `client.admin.stats` returned."""
    return [
        _file_tier(stats),
        *_devices(stats),
        *_bucket(stats),
        *_pool(stats),
        *_fleet(stats),
        _durability(stats),
        _arena(stats),
        _limbo(stats),
        _checksums(stats),
        _puts(stats),
        _clients(stats),
    ]


def is_wrong(findings: list[Finding]) -> bool:
    return any(finding.level is Level.WRONG for finding in findings)


def _file_tier(stats: dict[str, Any]) -> Finding:
    file = stats["file"]
    if not file["capacity_bytes"]:
        return note(
            "file tier",
            "none: a restart loses all blocks, and blocks evicted from DRAM are lost",
            "set file.path to keep it",
        )
    if file["state"] != "ok":
        return wrong(
            "file tier",
            f"cannot be written ({file['failed_writes']} runs failed so far)",
            f"look at the daemon's log, `dmesg` and `df`; {size(stats['dirty_bytes'])} are at risk",
        )
    if file["failed_reads"]:
        return wrong(
            "file tier",
            f"{file['failed_reads']} reads failed since the start",
            "look at the daemon's log and at `dmesg`",
        )
    return ok("file tier", "reads and writes")


def _devices(stats: dict[str, Any]) -> list[Finding]:
    """Judge the directories that are not as they should be."""
    return [
        wrong(
            "disk",
            f"{each['path']} is {each['state']} for {duration(each['since_s'])}: {each['reason']}",
            _DEVICE_ADVICE.get(
                each["state"],
                "look at `dmesg`; the daemon retries it, and refuses deletes until it works",
            ),
        )
        for each in stats["file"].get("devices", ())
        if each["state"] != "ok"
    ]


def _bucket(stats: dict[str, Any]) -> list[Finding]:
    """Judge the object tier, if there is one."""
    if "object" not in stats:
        return []
    objects = stats["object"]
    if objects["state"] == "ok" and not objects.get("reason"):
        return [ok("object tier", "answers")]
    return [
        wrong(
            "object tier",
            f"{objects['state']}: {objects.get('reason') or 'it does not answer'}",
            objects.get("advice")
            or "look at the daemon's log; the daemon tries it again by itself",
        )
    ]


def _pool(stats: dict[str, Any]) -> list[Finding]:
    """Judge the pool, if there is one."""
    pool = stats.get("pool")
    if pool is None:
        return []
    about = "pool"
    if pool["state"] != "up":
        text = f"{pool['url']}: {pool['state']}: {pool['last_error'] or 'no answer yet'}"
        advice = "look at mooncake_master; the daemon tries it again by itself, deletes are refused"
        return [wrong(about, text, advice)]
    if pool["segment_state"] not in ("none", "up"):
        text = f"{pool['url']}: what this host gives to it is {pool['segment_state']}"
        return [wrong(about, f"{text}: {pool['segment_error']}", "look at free memory")]
    text = f"{pool['url']}: up"
    if pool["hung"]:
        return [note(about, f"{text}; its calls hung {pool['hung']} times", "see the log")]
    return [ok(about, text)]


def _fleet(stats: dict[str, Any]) -> list[Finding]:
    """Judge what other daemons there are, if this one is of a fleet."""
    fleet = stats.get("fleet")
    if fleet is None:
        return []
    up = sum(each["state"] == "up" for each in fleet["members"])
    text = f"{up} of {len(fleet['members'])} other daemons are up; links {fleet['secured']}"
    kept, found = fleet["membership"], []
    if fleet["secured"] == "insecure":
        advice = "set cluster.cert, cluster.key and cluster.ca"
        found = [note("fleet", f"{text}: whoever reaches {fleet['address']} may read all", advice)]
    elif up < len(fleet["members"]):
        found = [note("fleet", text, "`kvstore members` shows which and why")]
    return [*(found or [ok("fleet", text)]), *_membership(kept)]


def _membership(kept: dict[str, Any]) -> list[Finding]:
    """Judge how this daemon knows of others, and they of it."""
    found, name, error = [], kept["membership"], kept["error"]
    if kept["away_s"] is not None:
        text = f"{name} is out of reach" + (f": {error}" if error else "")
        found.append(note("members", text, "look at it: no daemon can join meanwhile"))
    elif not kept["registered"]:
        text = "this daemon is not registered, so nobody borrows from it"
        found.append(
            wrong("members", f"{text}: {error}", "mend that; the daemon tries again by itself")
            if error
            else note("members", text, f"see what {name} lists")
        )
    elif error:
        found.append(note("members", error, "see `kvstore members`"))
    if unknown := kept.get("unknown"):
        text = f"nobody has answered at {len(unknown)} of the addresses that {name} lists"
        found.append(note("members", text, "`kvstore members` says why"))
    return found


def _durability(stats: dict[str, Any]) -> Finding:
    lag_s, dirty, bound = stats["durable_lag_s"], stats["dirty_bytes"], stats["dirty_bytes_max"]
    if not stats["file"]["capacity_bytes"]:
        return note("durable lag", "nothing becomes durable without a file tier")
    text = f"{duration(lag_s)}, {size(dirty)} not durable yet"
    if dirty > FULL_FRACTION * bound:
        return wrong(
            "durable lag",
            f"{text} of at most {size(bound)}: puts are being refused",
            "use a faster disk, or raise limits.write_behind_max",
        )
    if lag_s > LAG_S_MAX:
        return wrong("durable lag", text, "the disk does not keep up: see `kvstore doctor`")
    return ok("durable lag", text)


def _arena(stats: dict[str, Any]) -> Finding:
    dram = stats["dram"]
    text = f"leases hold {percent(dram['leased_bytes'], dram['leased_bytes_max'])} of their bound"
    if dram.get("waits_for_memory"):
        return note(
            "arena",
            f"stopped growing at {size(dram['reserved_bytes'])} of {size(dram['capacity_bytes'])}, "
            f"because too little memory is free; {text}",
            "free some memory, or lower dram.capacity",
        )
    if dram["growing"]:
        return note("arena", f"still growing; {text}")
    if dram["leased_bytes"] > FULL_FRACTION * dram["leased_bytes_max"]:
        return note("arena", f"{text}: lookups wait", "raise dram.capacity if it stays so")
    return ok("arena", text)


def _limbo(stats: dict[str, Any]) -> Finding:
    dram = stats["dram"]
    limbo, capacity = dram["limbo_bytes"], dram["capacity_bytes"]
    if limbo > LIMBO_FRACTION * capacity:
        return wrong(
            "limbo",
            f"{size(limbo)} of the arena wait for clients that do not release their leases",
            "an engine hangs or is stopped: continue or end it",
        )
    return ok("limbo", size(limbo))


def _checksums(stats: dict[str, Any]) -> Finding:
    found = stats["totals"].get("corrupt_blocks", {})
    counts = {where: count for where, count in found.items() if count}
    if not counts:
        return ok("checksums", "every one matched")
    places = ", ".join(f"{count:.0f} by {where}" for where, count in counts.items())
    text = f"did not match: {places}; these blocks were dropped, not served"
    if counts.keys() - _NO_DAMAGE.keys():
        return wrong("checksums", text, "test the memory and the disk of this machine")
    return note("checksums", text, "; ".join(_NO_DAMAGE[where] for where in counts))


def _puts(stats: dict[str, Any]) -> Finding:
    refused = stats["totals"].get("refused_parts", {})
    if not any(refused.values()):
        return ok("puts", "none refused")
    reasons = ", ".join(f"{count:.0f} for {reason}" for reason, count in refused.items())
    return note("puts", f"records refused since the start: {reasons}", "see `kvstore top`")


def _clients(stats: dict[str, Any]) -> Finding:
    if not stats["sessions"]:
        return note("clients", "no engine is connected", "point one at this daemon's socket")
    return ok("clients", f"{stats['sessions']} sessions, {stats['leases']} leases")
