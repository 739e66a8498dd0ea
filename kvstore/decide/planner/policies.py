"""The eviction policies of both tiers: what they are told, and what they save."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from kvstore.decide.policy import PolicyFactory
from kvstore.model.block import BlockKey

_SAVED = struct.Struct("<I")  # bytes of the first policy's


class Policies:
    """One policy for the arena (`dram`), one for the file tier (`file`)."""

    def __init__(
        self, dram: PolicyFactory, file: PolicyFactory, now: Callable[[], float], *, has_file: bool
    ) -> None:
        self.dram = dram(now)
        self.file = file(now)
        self._has_file = has_file

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        """Note that a request asked for a prefix."""
        self.dram.touch(prefix)
        if self._has_file:
            self.file.touch(prefix)

    def expect(self, prefix: Sequence[BlockKey], at: float) -> None:
        """Note that somebody will ask for a prefix at `at`."""
        self.dram.expect(prefix, at)
        self.file.expect(prefix, at)

    def save(self) -> bytes:
        """Return what both should know after a restart."""
        dram, file = self.dram.save(), self.file.save()
        return _SAVED.pack(len(dram)) + dram + file if dram or file else b""

    def load(self, saved: bytes) -> None:
        """Give each what it saved."""
        if len(saved) >= _SAVED.size:
            end = _SAVED.size + _SAVED.unpack_from(saved)[0]
            self.dram.load(saved[_SAVED.size : end])
            self.file.load(saved[end:])
