"""One question of a client: how much of this prefix is stored, and what is it worth to wait for?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.decide.pace import PATIENCE, Stakes
from kvstore.decide.planner import SessionId
from kvstore.decide.slow_log import Waits
from kvstore.model.block import BlockKey, Match, NamespaceId
from kvstore.model.member import Origin


@dataclass(frozen=True, slots=True)
class Ask:
    """One acquire: of a prefix, or of parts of its blocks."""

    session: SessionId
    client: str
    request_id: str
    namespace_id: NamespaceId
    keys: Sequence[BlockKey]
    skip_blocks: int
    began: float
    recompute_s_per_block: float = 0.0  # as it told, or others before it; 0: nobody has
    session_id: str = ""  # of the conversation; "": not told
    in_files: bool = False  # it can read the files of the file tier itself
    refined: bool = False  # a block without its fine part is a miss
    origin: Origin | None = None  # who has it, as the request says
    early: bool = False  # it takes slots that are still read into
    waits: Waits = field(default_factory=lambda: Waits(float), compare=False)  # what it waited for
    tells_pace: bool = False  # the client itself did
    is_guest: bool = False  # of another tenant: what it found is all that is noted
    raced_from: float = 0.0  # when it began to compete with computing; 0: when it began

    @property
    def look_until(self) -> float:
        """When to stop looking for more in slow places, on the clock of `began`."""
        if not self.recompute_s_per_block:
            return math.inf
        blocks = len(self.keys) - self.skip_blocks
        return (self.raced_from or self.began) + PATIENCE * blocks * self.recompute_s_per_block

    def stakes(self, match: Match) -> Stakes | None:
        """Return what bringing up all of `match` competes with; None if that was not told."""
        if not self.recompute_s_per_block:
            return None
        saved = match.hit_blocks - max(self.skip_blocks, match.resident_blocks)
        prompt = len(self.keys) - self.skip_blocks
        pace = self.recompute_s_per_block
        return Stakes(saved * pace, prompt * pace, self.raced_from or self.began)
