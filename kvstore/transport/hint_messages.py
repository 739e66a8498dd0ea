"""Translate hints and what they are answered with."""

from __future__ import annotations

from kvstore.model.hint import HintKind, HintReport, Short
from kvstore.rpc.v1 import kvstore_pb2 as pb


def report_to_message(report: HintReport) -> pb.HintReply:
    return pb.HintReply(
        blocks=report.blocks,
        done_blocks=report.done_blocks,
        done_bytes=report.done_bytes,
        short=report.short,
        took_s=report.took_s,
        lasts_s=report.lasts_s,
    )


def report_of(kind: HintKind, reply: pb.HintReply) -> HintReport:
    known = reply.short in Short._value2member_map_
    return HintReport(
        kind,
        blocks=reply.blocks,
        done_blocks=reply.done_blocks,
        done_bytes=reply.done_bytes,
        short=Short(reply.short) if known else Short.UNKNOWN,
        took_s=reply.took_s,
        lasts_s=reply.lasts_s,
    )
