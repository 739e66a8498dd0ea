"""The eviction policies of both tiers: what they are told, and what they save."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from kvstore.decide.policy import Choice, Guarded, PolicyFactory
from kvstore.decide.rows import Rows
from kvstore.model.block import BlockKey

_SAVED = struct.Struct("<I")  # bytes of the first policy's


class Policies:
    """One policy for the arena (`dram`), one for the file tier (`file`). Should one raise, or name
    blocks that are not there, `lru` takes its place, and `failed`, which may be set, is told the
    tier and the error. rows: shared with the index.
    """

    def __init__(
        self,
        dram: PolicyFactory,
        file: PolicyFactory,
        now: Callable[[], float],
        *,
        has_file: bool,
    ) -> None:
        self.failed: Callable[[str, Exception], None] = lambda tier, error: None
        self.rows = Rows()
        self.dram = Guarded(
            dram, now, failed=lambda error: self.failed("dram", error), rows=self.rows
        )
        self.file = Guarded(
            file,
            now,
            failed=lambda error: self.failed("file", error),
            rows=self.rows if has_file else None,
        )
        self._has_file = has_file

    def touch(self, prefix: Sequence[BlockKey], level: int = 0) -> None:
        """Note that a request asked for a prefix. level: what a byte of it is worth."""
        self.dram.touch(prefix, level)
        if self._has_file:
            self.file.touch(prefix, level)

    @property
    def choices(self) -> dict[str, Choice | None]:
        """Which order each tier follows, and why; None: its policy has one alone."""
        return {"dram": self.dram.choice, "file": self.file.choice}

    @property
    def failures(self) -> dict[str, int]:
        """How many policies of each tier have raised, ever: at most one."""
        return {"dram": int(self.dram.error is not None), "file": int(self.file.error is not None)}

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
