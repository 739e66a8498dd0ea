"""What an engine of a fault case stores: records of one size, of sizes that vary, or lossy ones.

A record is a function of its block; a lossy one also of who wrote it, which it says: so a reader
sees whose it is, and that a base and its fine part are one writer's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore import BlockKey, Grant, Span, checksum
from kvstore.model.block import Group, Namespace, Part
from kvstore.testing.samples import sample_namespace, sample_record
from tests.lossy import EP_BASE, L3, base_header, fine_header

KINDS = ("fixed", "varies", "lossy")
_TAG = slice(40, 48)  # in the header of a coded record, where zeros are


class Records:
    """The records of one kind. record_nbytes: the most one has. writer: who makes them here."""

    def __init__(self, kind: str, record_nbytes: int, writer: str) -> None:
        self.namespace = _namespace(kind, record_nbytes)
        self.sized = self.namespace.varies
        self._most = record_nbytes
        self._tag = checksum(writer.encode()).to_bytes(8, "little")
        groups = self.namespace.groups
        self.parts = [Part(group, 0) for group in range(len(groups))]
        self._base_nbytes = next((g.base_nbytes for g in groups if g.refines != -1), 0)
        self._fine_nbytes = next((g.record_nbytes for g in groups if g.refines != -1), 0)

    def spans(self, blocks: int) -> tuple[Span, ...]:
        return tuple(Span(part, 0, blocks) for part in self.parts)

    def make(self, keys: Sequence[BlockKey], spans: Sequence[Span]) -> list[bytes]:
        """Return the records of spans."""
        return [self._record(key, at, part, self._tag) for key, at, part in _items(keys, spans)]

    def wrong(self, keys: Sequence[BlockKey], grant: Grant, copies: Sequence[bytes | None]) -> int:
        """Return how many copies of what a lease covers are no record of any writer, or belong to
        another base than the one that came with them."""
        writers: dict[BlockKey, bytes] = {}
        wrong = 0
        for (key, at, part), copy in zip(_items(keys, grant.spans), copies, strict=True):
            if copy is None:
                continue
            tag = copy[_TAG] if self._base_nbytes else b""
            alone = writers.setdefault(key, tag) != tag
            wrong += alone or copy != self._record(key, at, part, tag)
        return wrong

    def _record(self, key: BlockKey, at: int, part: Part, tag: bytes) -> bytes:
        if not self._base_nbytes:
            short = 64 * (key[0] % 60) if self.sized else 0
            return sample_record(key, max(self._most - short, self._most // 2))
        if part.group == 0:
            exact = at == 0
            nbytes = self._most if exact else self._base_nbytes
            header = base_header(nbytes, L3 if exact else EP_BASE)
        else:
            nbytes = self._fine_nbytes
            base = self._record(key, at, self.parts[0], tag)
            header = fine_header(nbytes, checksum(base))
        head = header[: _TAG.start] + tag + header[_TAG.stop :]
        seed = [*key[:8], *tag, part.group]
        return head + np.random.default_rng(seed).bytes(nbytes - len(head))


def _namespace(kind: str, most: int) -> Namespace:
    if kind == "fixed":
        return sample_namespace("faults", most)
    base = Group("full", most, varies=True)
    if kind == "varies":
        return Namespace(16, (base,), (("model", "faults"),))
    fine = Group("full.fine", most // 4, refines=0, base_nbytes=most // 3)
    return Namespace(16, (base, fine), (("model", "faults"),), fidelity="ep")


def _items(keys: Sequence[BlockKey], spans: Sequence[Span]) -> list[tuple[BlockKey, int, Part]]:
    return [(keys[at], at, part) for part, begin, end in spans for at in range(begin, end)]
