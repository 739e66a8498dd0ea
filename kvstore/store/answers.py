"""Who is told of requests as they are answered. Nobody listening costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstore.decide.planner import Reservation
from kvstore.model.block import Committed
from kvstore.model.outcome import Outcome


class Answer(NamedTuple):
    """One answer. outcome: of an acquire; of a save, who put what. block_tokens: of a block.
    saved: of a save. nbytes: of the slots that were put."""

    outcome: Outcome
    block_tokens: int
    saved: Committed | None = None
    first_block: int = 0
    nbytes: int = 0


class Answers:
    """Those who listen; each is called at once, so it must not take long."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Answer], None]] = []

    def acquired(self, outcome: Outcome, block_tokens: int) -> None:
        """Tell of an acquire."""
        if self.listeners:
            self._tell(Answer(outcome, block_tokens))

    def saved(
        self,
        write: Reservation,
        saved: Committed,
        *,
        block_tokens: int,
        client: str,
        took_s: float,
        nbytes: int,
    ) -> None:
        """Tell of a commit."""
        if not self.listeners:
            return
        outcome = Outcome(
            request_id="",
            client=client,
            namespace_id=write.namespace_id,
            asked_blocks=len(write.keys),
            skip_blocks=0,
            hit_blocks=0,
            file_blocks=0,
            object_blocks=0,
            took_s=took_s,
            ending=None,
            last_key=write.keys[-1] if write.keys else b"",
            session_id=write.conversation,
        )
        self._tell(Answer(outcome, block_tokens, saved, write.first_block, nbytes))

    def _tell(self, answer: Answer) -> None:
        for listener in self.listeners:
            listener(answer)
