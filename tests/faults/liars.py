"""Peers that lie, or say nothing: one class for each lie, honest in everything else."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence

from kvstore.model.checksum import checksum
from kvstore.peer.base import PeerMatch
from kvstore.peer.messages import decode_parts, encode, encode_read_head
from kvstore.peer.wire import HELD, NOT_HELD, Frame, Kind
from tests.faults.scripted import Peer

NOISE = random.Random(1).randbytes(4096)


# ---- records -------------------------------------------------------------------------------------


class Lie(Peer):
    """One whose records are not to be had."""

    full = False


class WrongChecksums(Lie):
    seen = "peer_corrupt"

    def head(self, frame: Frame, records: Sequence[bytes]) -> bytes:
        sums = [checksum(each) ^ 1 for each in records]
        head = encode_read_head(self.instance, [len(each) for each in records], sums)
        return self.reply(frame, head)


class RecordsOutOfOrder(Lie):
    seen = "peer_corrupt"

    def body(self, records: Sequence[bytes]) -> bytes:
        return b"".join([*records[1:], records[0]])


class RecordsOfOthers(Lie):
    """Whole records with right checksums, of which one is larger than any of the namespace."""

    seen = "peer_corrupt"

    def head(self, frame: Frame, records: Sequence[bytes]) -> bytes:
        return super().head(frame, [records[0] + bytes(1 << 20), *records[1:]])


class MoreRecords(Lie):
    seen = "peer_corrupt"

    def head(self, frame: Frame, records: Sequence[bytes]) -> bytes:
        return super().head(frame, [*records, records[0]])


class MoreBytes(Peer):
    """After the last byte, more: nobody takes them for the next answer."""

    held = HELD + NOISE


class FewerRecords(Lie):
    seen = "missing"

    def head(self, frame: Frame, records: Sequence[bytes]) -> bytes:
        return super().head(frame, [*records[:-1], b""])


class FewerBytes(Lie):
    """The connection ends within the last record."""

    seen = "peer_gone"

    async def lend(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        keys, body = decode_parts(frame.body)
        records = self.records.make(keys.keys, body.spans)
        writer.write(self.head(frame, records) + self.body(records)[:-9])
        await writer.drain()
        writer.close()


class BytesThatNeverCome(Lie):
    seen = "peer_slow"
    held = b""

    def body(self, records: Sequence[bytes]) -> bytes:
        return b"".join(records)[:-9]


class Drip(Lie):
    """A byte now and then, for ever: never silent, never done."""

    seen = "peer_slow|deadline"

    async def lend(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        keys, body = decode_parts(frame.body)
        records = self.records.make(keys.keys, body.spans)
        writer.write(self.head(frame, records))
        for byte in self.body(records):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.5)


class NotHeld(Lie):
    seen = "peer_gone"
    held = NOT_HELD


class AnotherStart(Lie):
    """The answer to a READ is of another start of the daemon."""

    seen = "peer_gone"

    def head(self, frame: Frame, records: Sequence[bytes]) -> bytes:
        own, self.instance = self.instance, secrets.token_hex(8)
        try:
            return super().head(frame, records)
        finally:
            self.instance = own


class ReadsNeverAnswered(Lie):
    seen = "peer_slow"

    async def lend(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        pass


class ReadsTooEarly(Lie):
    """The answer to the first READ, with other bytes, comes before the READ."""

    seen = "peer_corrupt"

    def opened(self) -> bytes:
        return self.head(Frame(Kind.READ, 1), [NOISE]) + NOISE + HELD


class ReadsGarbage(Lie):
    seen = "peer_corrupt"

    async def lend(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" * 8 + NOISE)


class ReadsBusy(Lie):
    seen = "peer_busy"

    async def lend(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        writer.write(self.refusal(frame, "busy"))


# ---- control -------------------------------------------------------------------------------------


class MatchOfMore(Lie):
    seen = "peer_corrupt"

    def matched(self, keys: int) -> PeerMatch:
        return PeerMatch(keys + 1, keys)


class MatchNeverAnswered(Lie):
    seen = "peer_slow"

    def match(self, frame: Frame) -> bytes:
        return b""


class MatchGarbage(Lie):
    seen = "peer_corrupt"

    def match(self, frame: Frame) -> bytes:
        return b"\xff" * 8 + NOISE


class MatchOfAnUnknownKind(Lie):
    seen = "peer_corrupt"

    def match(self, frame: Frame) -> bytes:
        return Frame(200, frame.id, NOISE).encode()


class AnswersToOthers(Lie):
    """It answers what was asked before, and what nobody has asked yet."""

    seen = "peer_corrupt"

    def match(self, frame: Frame) -> bytes:
        earlier, later = frame._replace(id=1), frame._replace(id=frame.id + 1)
        return super().match(earlier) + super().match(later) + super().match(frame)


class AnswersTooEarly(Lie):
    """Answers to the next fifty requests come right after HELLO."""

    seen = "down"

    def hello(self, frame: Frame) -> bytes:
        first = super().hello(frame)
        body = encode(PeerMatch(16, 16))
        early = (Frame(Kind.REPLY, frame.id + n, body).encode() for n in range(1, 50))
        return first + b"".join(early)

    def ping(self, frame: Frame) -> bytes:
        return super().hello(frame)


class PingNeverAnswered(Lie):
    seen = "down"

    def ping(self, frame: Frame) -> bytes:
        return b""


class TicketNeverGiven(Lie):
    seen = "peer_slow"

    def ticket(self, frame: Frame) -> bytes:
        return b""


class TicketGarbage(Lie):
    seen = "peer_corrupt"

    def ticket(self, frame: Frame) -> bytes:
        return self.reply(frame, NOISE[:100])


class NamespaceNeverKnown(Lie):
    """It asks to be told the namespace, whatever it is told."""

    seen = "peer_gone"

    def control(self, frame: Frame) -> bytes:
        if frame.kind in (Kind.NAMESPACE, Kind.MATCH, Kind.HEADS):
            return self.refusal(frame, "namespace")
        return super().control(frame)


class HeadsGarbage(Peer):
    """What is lent is right, but the link ends whenever heads are asked for: so it may be a miss,
    and is not tried without end."""

    seen = "read|down|peer_gone|peer_corrupt|quarantined"

    def heads(self, frame: Frame) -> bytes:
        return self.reply(frame, NOISE)


class OtherProtocol(Lie):
    """It speaks versions that we do not."""

    seen = "unknown"
    protocol = (7, 9)


class OtherFleet(Lie):
    seen = "unknown"
    fleet = "another"


LIES: tuple[type[Peer], ...] = (
    Peer,
    WrongChecksums,
    RecordsOutOfOrder,
    RecordsOfOthers,
    MoreRecords,
    MoreBytes,
    FewerRecords,
    FewerBytes,
    BytesThatNeverCome,
    Drip,
    NotHeld,
    AnotherStart,
    ReadsNeverAnswered,
    ReadsTooEarly,
    ReadsGarbage,
    ReadsBusy,
    MatchOfMore,
    MatchNeverAnswered,
    MatchGarbage,
    MatchOfAnUnknownKind,
    AnswersToOthers,
    AnswersTooEarly,
    PingNeverAnswered,
    TicketNeverGiven,
    TicketGarbage,
    NamespaceNeverKnown,
    HeadsGarbage,
    OtherProtocol,
    OtherFleet,
)
