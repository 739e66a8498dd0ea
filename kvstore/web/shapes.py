"""Replies of the daemon as what the page gets: plain JSON. docs/page.md says what each field is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.decide.planner.explain import differences
from kvstore.model.block import Namespace
from kvstore.model.errors import InvalidRequest
from kvstore.model.outcome import Reason
from kvstore.model.words import advice_text, reason_words
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.store.findings import daemon_health, is_wrong

_SLOWER = ("file", "object", "peer", "pool")
Shape = dict[str, Any]


def status(stats: Mapping[str, Any]) -> Shape:
    """Return what `kvstore status` says, without the counters."""
    findings = daemon_health(dict(stats)) if "dram" in stats else []
    told = {name: value for name, value in stats.items() if name not in ("totals", "tenants")}
    tenants = {
        name: {
            "share": each.get("share", {}),
            "blocks": each.get("blocks", 0),
            "sessions": each.get("sessions", 0),
        }
        for name, each in stats.get("tenants", {}).items()
    }
    return {
        "healthy": not is_wrong(findings),
        "findings": [finding.to_json() for finding in findings],
        "tenants": tenants,
        **told,
    }


def history(reply: pb.HistoryReply) -> Shape:
    return {
        "columns": list(reply.columns),
        "samples": [
            [round(each.at, 3), round(each.seconds, 3), *each.values] for each in reply.samples
        ],
    }


def outcome(message: pb.Outcome, *, at: float) -> Shape:
    """Return how a request was answered. at: when, seconds since the epoch."""
    found: Shape = {
        "at": round(at, 3),
        "kind": "acquire",
        "id": message.request_id,
        "client": message.client,
        "conversation": message.session_id,
        "namespace": message.namespace_id.hex(),
        "asked": message.asked_blocks,
        "hit": message.hit_blocks,
        "own": message.skip_blocks,
        "took_s": message.took_s,
        "asks": message.asks,
        "lease": message.lease,
        "base": message.base_blocks,
        "peer": message.peer,
        "last_key": message.last_key.hex(),
        "ranges": [list(each) for each in counted_ranges(message)],
    }
    if message.HasField("ending"):
        found["ended"] = _ending(message.ending)
    return found


def _ending(message: pb.Ending) -> Shape:
    return {
        "reason": message.reason,
        "block": message.block,
        "group": message.group,
        "left_s": message.left_s,
        "differs": list(message.differs),
    }


def counted_ranges(message: pb.Outcome) -> Iterator[tuple[int, int, str]]:
    """Yield how many blocks came from where, as ranges in the order of the tiers: where each one
    was is told by Monitor alone."""
    below = {tier: getattr(message, f"{tier}_blocks") for tier in _SLOWER}
    counts = {
        "engine": message.skip_blocks,
        "dram": message.hit_blocks - message.skip_blocks - sum(below.values()),
        **below,
        "": message.asked_blocks - message.hit_blocks,
    }
    at = 0
    for tier, blocks in counts.items():
        if blocks > 0:
            yield at, at + blocks, tier
            at += blocks


def answered(message: pb.Answered) -> Shape:
    """Return a request, or a save, as it was answered."""
    found = outcome(message.outcome, at=message.at) | {"block_tokens": message.block_tokens}
    if message.ranges:
        found["ranges"] = [[each.begin, each.end, each.tier] for each in message.ranges]
    if message.kind == "save":
        found |= {
            "kind": "save",
            "first_block": message.first_block,
            "stored": message.stored_records,
            "existing": message.existing_records,
            "refused": message.refused_records,
            "nbytes": message.nbytes,
            "ranges": [],
        }
    return found


def outcomes(reply: pb.OutcomesReply) -> list[Shape]:
    now = time.time()
    return [outcome(each, at=now - each.age_s) for each in reply.outcomes]


def tree(reply: pb.TreeReply) -> Shape:
    return {
        "age_s": reply.age_s,
        "blocks": reply.blocks,
        "left_out_blocks": reply.left_out_blocks,
        "next": reply.next.hex(),
        "namespaces": [each.hex() for each in reply.namespaces],
        "runs": [
            {
                "parent": each.parent,
                "first_key": each.first_key.hex(),
                "last_key": each.last_key.hex(),
                "namespace": each.namespace,
                "begin": each.begin,
                "end": each.end,
                "children": each.children,
                "dram_bytes": each.dram_bytes,
                "file_bytes": each.file_bytes,
                "blocks": each.blocks,
                "all_dram_bytes": each.all_dram_bytes,
                "all_file_bytes": each.all_file_bytes,
                "hits": each.hits,
                "used_age_s": each.used_age_s if each.HasField("used_age_s") else None,
            }
            for each in reply.runs
        ],
    }


def conversations(reply: pb.ConversationsReply) -> Shape:
    return {
        "known": reply.known,
        "items": [
            {
                "id": each.session_id,
                "namespace": each.namespace_id.hex(),
                "blocks": each.blocks,
                "last_key": each.last_key.hex(),
                "age_s": each.age_s,
                "ended": each.ended,
                "expected_in_s": each.expected_in_s,
                "pinned_s": each.pinned_s,
                "pin_bytes_max": each.pin_bytes_max,
            }
            for each in reply.items
        ],
    }


def namespaces(items: Sequence[pb.NamespaceItem]) -> list[Shape]:
    """Return what there is of each namespace; `differs`: how it differs from the one of the same
    model that has most blocks."""
    specs = {each.namespace_id: _spec(each.spec_json) for each in items}
    largest: dict[str, pb.NamespaceItem] = {}
    for each in items:
        known = largest.get(each.model)
        if specs[each.namespace_id] and (known is None or each.blocks > known.blocks):
            largest[each.model] = each
    shown = []
    for each in items:
        own, other = specs[each.namespace_id], largest.get(each.model)
        theirs = specs[other.namespace_id] if other is not None and other is not each else None
        shown.append(
            {
                "namespace": each.namespace_id.hex(),
                "model": each.model,
                "blocks": each.blocks,
                "block_tokens": own.block_tokens if own else 0,
                "dram_bytes": each.dram_bytes,
                "file_bytes": each.file_bytes,
                "asked_blocks": each.asked_blocks,
                "hit_blocks": each.hit_blocks,
                "tier_hit_blocks": dict(each.tier_hit_blocks),
                "differs": list(differences(own, theirs)) if own and theirs else [],
            }
        )
    return shown


def _spec(text: str) -> Namespace | None:
    try:
        return Namespace.from_json(text) if text else None
    except InvalidRequest:
        return None


def slow(reply: pb.SlowReply) -> Shape:
    return {
        "kept_s": reply.kept_s,
        "items": [
            {
                "kind": each.kind,
                "took_s": each.took_s,
                "age_s": each.age_s,
                "waits": dict(each.waits),
                "id": each.request_id,
                "client": each.client,
                "conversation": each.session_id,
                "namespace": each.namespace_id.hex(),
                "blocks": each.blocks,
                "nbytes": each.nbytes,
                "result": each.result,
            }
            for each in reply.items
        ],
    }


def reasons() -> dict[str, dict[str, str]]:
    """Return, by reason, what ended a hit, and what to do; {left} stands for how long ago."""
    return {
        reason.value: {"text": reason_words(reason), "do": advice_text(reason)} for reason in Reason
    }
