"""What a node holds and owes, as plain numbers: for Stats, the gauges and the operator."""

from __future__ import annotations

from typing import Any

from kvstore.decide.planner import Leases, Planner
from kvstore.move.write_behind import WriteBehind
from kvstore.settings import LimitSettings
from kvstore.tier.dram import Arena

CLIENTS_SHOWN_MAX = 64  # sessions that are listed one by one


def snapshot(
    *,
    planner: Planner,
    leases: Leases,
    arena: Arena,
    write_behind: WriteBehind,
    limits: LimitSettings,
) -> dict[str, Any]:
    """Return bytes, seconds and counts of now."""
    return {
        "blocks": len(planner.index),
        "namespaces": len(planner.index.namespaces),
        "models": _models(planner),
        "sessions": len(leases.sessions()),
        "leases": leases.count,
        "clients": _clients(leases),
        "dram": {
            "blocks": planner.resident_blocks,
            "capacity_bytes": arena.capacity_bytes,
            "used_bytes": arena.physical_nbytes,
            "reserved_bytes": arena.reserved_nbytes,
            "leased_bytes": leases.leased_bytes - leases.limbo_bytes,
            "leased_bytes_max": int(arena.capacity_bytes * limits.leased_fraction),
            "limbo_bytes": leases.limbo_bytes,
            "pinned_bytes": planner.pins.nbytes,
            "pinned_bytes_max": int(arena.capacity_bytes * limits.pinned_fraction),
            "growing": arena.growth.growing,
            "waits_for_memory": arena.growth.waits_for_memory,
            "growth_pauses": arena.growth.pauses,
            "evicted_blocks": planner.counts.evicted_dram,
            "lost_records": planner.counts.lost,
        },
        "file": {
            "blocks": planner.framed_blocks,
            "evicted_blocks": planner.counts.evicted_file,
            "unwritten_records": planner.counts.unwritten,
            "leased_bytes": leases.framed_bytes,
            "leased_bytes_max": int(write_behind.caps.capacity_bytes * limits.leased_fraction),
            **write_behind.stats(),
        },
        "dirty_bytes": planner.dirty.nbytes,
        "dirty_bytes_max": limits.write_behind_bytes_max,
        "durable_lag_s": planner.dirty.oldest_s,
    }


def _models(planner: Planner) -> list[dict[str, Any]]:
    return [
        {
            "model": model.name,
            "namespaces": model.spaces,
            "blocks": model.blocks,
            "dram_bytes": model.dram_nbytes,
            "file_bytes": model.file_nbytes,
            "asked_blocks": model.asked_blocks,
            "hit_blocks": model.hit_blocks,
        }
        for model in planner.index.namespaces.models
    ]


def _clients(leases: Leases) -> list[dict[str, Any]]:
    return [
        {
            "name": session.client,
            "processes": len(session.members),
            "leases": len(session.leases),
            "limbo_bytes": session.limbo_bytes,
        }
        for session in leases.sessions()[:CLIENTS_SHOWN_MAX]
    ]
