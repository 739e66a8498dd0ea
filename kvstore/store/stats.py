"""What a node holds and owes, as plain numbers: for Stats, the gauges and the operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvstore.decide.namespaces import OTHER_NAMESPACES
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
        "namespace_use": _namespaces(planner),
        "fidelities": _fidelities(planner),
        "sessions": len(leases.sessions()),
        "leases": leases.count,
        "clients": _clients(leases),
        "dram": {
            "blocks": planner.stored.resident,
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
            "fine_bytes": planner.eviction.fine_parts.nbytes,
            "thinned_records": planner.counts.thinned,
        },
        "file": {
            "blocks": planner.stored.framed,
            "evicted_blocks": planner.counts.evicted_file,
            "unwritten_records": planner.counts.unwritten,
            "leased_bytes": leases.framed_bytes,
            "leased_bytes_max": int(write_behind.caps.capacity_bytes * limits.leased_fraction),
            **write_behind.stats(),
        },
        "policies": _policies(planner),
        "dirty_bytes": planner.dirty.nbytes,
        "dirty_bytes_max": limits.write_behind_bytes_max,
        "durable_lag_s": planner.dirty.oldest_s,
    }


def ageless(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's stats without what changes by itself: how long things have been so."""
    devices = [{**each, "since_s": 0.0} for each in stats["file"].get("devices", ())]
    return {**stats, "uptime_s": 0.0, "file": {**stats["file"], "devices": devices}}


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


def _namespaces(planner: Planner) -> list[dict[str, Any]]:
    """Return what there is of the namespaces that metrics tell apart, and of the others together:
    that is what models have beside them."""
    known = planner.index.namespaces
    shown: list[dict[str, Any]] = [
        {
            "namespace": each.label,
            "model": each.model.name if each.model is not None else "",
            "blocks": each.blocks,
            "dram_bytes": each.dram_nbytes,
            "file_bytes": each.file_nbytes,
        }
        for each in known.labelled
    ]
    if len(shown) < len(known):
        rest: dict[str, Any] = {"namespace": OTHER_NAMESPACES, "model": ""}
        rest["blocks"] = len(planner.index) - sum(each["blocks"] for each in shown)
        for tier in ("dram", "file"):
            of_all = sum(getattr(model, f"{tier}_nbytes") for model in known.models)
            rest[f"{tier}_bytes"] = of_all - sum(each[f"{tier}_bytes"] for each in shown)
        shown.append(rest)
    return shown


def _fidelities(planner: Planner) -> list[dict[str, Any]]:
    """Return, by fidelity and tier, the blocks, those of them with their fine part, the bytes
    stored, and the bytes that an engine would hold for them."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for namespace in planner.index.namespaces:
        if namespace.spec is None:
            continue
        for tier, records, nbytes in (
            ("dram", namespace.dram_records, namespace.dram_nbytes),
            ("file", namespace.file_records, namespace.file_nbytes),
        ):
            found.setdefault((namespace.spec.fidelity, tier), Counter()).update(
                blocks=namespace.blocks_of(records, fine=False),
                refined_blocks=namespace.blocks_of(records, fine=True),
                stored_bytes=nbytes,
                raw_bytes=namespace.raw_nbytes(records),
            )
    return [
        {"fidelity": fidelity, "tier": tier, **counts}
        for (fidelity, tier), counts in sorted(found.items())
        if counts["stored_bytes"]
    ]


def _policies(planner: Planner) -> dict[str, Any]:
    """Return, by tier, whether its policy has failed, and what it follows if it has a choice."""
    return {
        tier: {
            "failures": planner.policies.failures[tier],
            **(choice.to_dict() if choice is not None else {}),
        }
        for tier, choice in planner.policies.choices.items()
    }


def _clients(leases: Leases) -> list[dict[str, Any]]:
    return [
        {
            "name": session.client,
            "processes": len(session.processes),
            "leases": len(session.leases),
            "limbo_bytes": session.limbo_bytes,
        }
        for session in leases.sessions()[:CLIENTS_SHOWN_MAX]
    ]
