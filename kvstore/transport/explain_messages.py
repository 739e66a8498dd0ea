"""Translate what explains a miss to and from its protobuf messages."""

from __future__ import annotations

from kvstore.model.block import NamespaceId
from kvstore.model.outcome import BlockRange, Ending, Explanation, Outcome, Reason
from kvstore.rpc.v1 import kvstore_pb2 as pb


def outcome_to_message(outcome: Outcome) -> pb.Outcome:
    return pb.Outcome(
        request_id=outcome.request_id,
        client=outcome.client,
        namespace_id=outcome.namespace_id,
        asked_blocks=outcome.asked_blocks,
        skip_blocks=outcome.skip_blocks,
        hit_blocks=outcome.hit_blocks,
        file_blocks=outcome.file_blocks,
        object_blocks=outcome.object_blocks,
        base_blocks=outcome.base_blocks,
        peer_blocks=outcome.peer_blocks,
        peer=outcome.peer,
        pool_blocks=outcome.pool_blocks,
        took_s=outcome.took_s,
        ending=_ending_to_message(outcome.ending),
        asks=outcome.asks,
        age_s=outcome.age_s,
        lease=outcome.lease,
        last_key=outcome.last_key,
        session_id=outcome.session_id,
    )


def outcome_of(message: pb.Outcome) -> Outcome:
    return Outcome(
        request_id=message.request_id,
        client=message.client,
        namespace_id=NamespaceId(message.namespace_id),
        asked_blocks=message.asked_blocks,
        skip_blocks=message.skip_blocks,
        hit_blocks=message.hit_blocks,
        file_blocks=message.file_blocks,
        object_blocks=message.object_blocks,
        base_blocks=message.base_blocks,
        peer_blocks=message.peer_blocks,
        peer=message.peer,
        pool_blocks=message.pool_blocks,
        took_s=message.took_s,
        ending=_ending_of(message.ending) if message.HasField("ending") else None,
        asks=message.asks,
        age_s=message.age_s,
        lease=message.lease,
        last_key=message.last_key,
        session_id=message.session_id,
    )


def explanation_to_message(explanation: Explanation) -> pb.ExplainReply:
    return pb.ExplainReply(
        ranges=[
            pb.BlockRange(
                begin=each.begin,
                end=each.end,
                dram=each.dram,
                file=each.file,
                reason=each.reason or "",
                left_s=each.left_s,
            )
            for each in explanation.ranges
        ],
        hit_blocks=explanation.hit_blocks,
        resident_blocks=explanation.resident_blocks,
        ending=_ending_to_message(explanation.ending),
    )


def explanation_of(message: pb.ExplainReply) -> Explanation:
    return Explanation(
        ranges=tuple(
            BlockRange(
                begin=each.begin,
                end=each.end,
                dram=each.dram,
                file=each.file,
                reason=_reason_of(each.reason) if each.reason else None,
                left_s=each.left_s,
            )
            for each in message.ranges
        ),
        hit_blocks=message.hit_blocks,
        resident_blocks=message.resident_blocks,
        ending=_ending_of(message.ending) if message.HasField("ending") else None,
    )


def _ending_to_message(ending: Ending | None) -> pb.Ending | None:
    if ending is None:
        return None
    return pb.Ending(
        reason=ending.reason,
        block=ending.block,
        group=ending.group,
        left_s=ending.left_s,
        differs=ending.differs,
    )


def _ending_of(message: pb.Ending) -> Ending:
    return Ending(
        reason=_reason_of(message.reason),
        block=message.block,
        group=message.group,
        left_s=message.left_s,
        differs=tuple(message.differs),
    )


def _reason_of(value: str) -> Reason:
    """Read a reason; one that this side does not know yet reads as unknown."""
    try:
        return Reason(value)
    except ValueError:
        return Reason.UNKNOWN
