"""Requests that run alone, and sides that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstore_bench.demo.book import Book
from kvstore_bench.demo.engine import Engine, Reply
from kvstore_bench.demo.progress import Progress
from kvstore_bench.demo.workload import Turn, Workload

REPLAY_TOKENS = 4  # answers that are only compared, not recorded
PASSES = 3  # over prompts that are warm; each costs seconds, and one alone says little
SPIN_S = 1.1  # how long vLLM's processes poll after a request, and a little more
WARM_UP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Side:
    """An engine that is asked in a phase."""

    phase: str
    engine: Engine
    answer_tokens: int = REPLAY_TOKENS


class Alone:
    """Asks one engine at a time, when no other one spins any more."""

    def __init__(self, *, spins: bool = True) -> None:
        """spins: engines keep a core busy for a while after a request, as they do on a CPU."""
        self._spins = spins
        self._asked: Engine | None = None
        self._answered_s = 0.0

    def ask(
        self, engine: Engine, prompt: Sequence[int], answer_tokens: int, **options: Any
    ) -> Reply:
        """Return the answer. options: of `Engine.ask`. Raises Unavailable."""
        self.wait_for_others(engine)
        try:
            return engine.ask(prompt, answer_tokens, **options)
        finally:
            self.note(engine)

    def wait_for_others(self, engine: Engine) -> None:
        """Wait until no engine but this one spins."""
        if self._asked is not engine:
            self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait until no engine spins."""
        if self._spins:
            time.sleep(max(0.0, self._answered_s + SPIN_S - time.monotonic()))

    def note(self, engine: Engine) -> None:
        """Note that an engine has answered."""
        self._asked, self._answered_s = engine, time.monotonic()


class Asker:
    """Asks one engine at a time; what is answered goes to `book`."""

    def __init__(
        self, workload: Workload, progress: Progress, book: Book, *, spins: bool = True
    ) -> None:
        """spins: as of `Alone`."""
        self._workload = workload
        self._progress = progress
        self._book = book
        self._alone = Alone(spins=spins)

    def repeat(
        self,
        title: str,
        turns: Sequence[Turn],
        *sides: Side,
        passes: int = PASSES,
        after_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask every side the turns, in several passes; answers matter in the first."""
        for number in range(passes):
            asked = [replace(side, answer_tokens=1) for side in sides] if number else sides
            order = asked[::-1] if number % 2 else asked
            self.ask(f"{title}, {number + 1} of {passes}", turns, *order)
            after_pass()

    def ask(
        self,
        title: str,
        turns: Sequence[Turn],
        *sides: Side,
        record: str | None = None,
        round_turns: int | None = None,
    ) -> None:
        """Ask every side each turn; keep the answers of phase `record`.

        The sides take turns after `round_turns` of them (all conversations, by default), and who
        begins changes from round to round.
        """
        step = round_turns or self._workload.shape.conversations
        rounds = [turns[start : start + step] for start in range(0, len(turns), step)]
        todo = [
            (turn, side)
            for number, each in enumerate(rounds)
            for side in (sides[::-1] if number % 2 else sides)
            for turn in each
        ]
        for turn, side in self._progress.track(title, todo):
            prompt = self._workload.prompt(turn, self._book.answers)
            reply = self.alone(side.engine, prompt, side.answer_tokens)
            self._book.add(side.phase, turn, reply)
            if side.phase == record:
                self._book.answers[turn] = reply.tokens

    def alone(self, engine: Engine, prompt: Sequence[int], answer_tokens: int) -> Reply:
        """Ask when no other engine spins any more."""
        return self._alone.ask(engine, prompt, answer_tokens)

    def wait_for_all(self) -> None:
        """Wait until no engine spins any more."""
        self._alone.wait_for_all()

    def warm_up(self, *engines: Engine) -> None:
        """Let each engine make its buffers, on a prompt that is a prefix of no other."""
        prompt = self._workload.fresh[-1][-WARM_UP_TOKENS:][::-1]
        for engine in engines:
            self.alone(engine, prompt, 2)
