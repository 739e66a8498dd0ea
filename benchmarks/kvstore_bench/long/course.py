"""The phases of a run with long prompts, in order.

What is resumed is compared with what was computed: where nothing is stored, each prompt is asked
twice, and the second answer, a hit in the engine's own prefix cache, is kept. It must be that of
each later answer to the prompt, and of the hit in the engine's own cache right after it.

    cold         nothing is stored: each length once
    dram         the engine's own cache emptied before each
    file         the daemon stopped and started again before each pass
    restart      engine and daemon killed (SIGKILL), both started again
    small        an arena of a quarter of the longest prompt
    killed_cold  without a daemon: another prompt, which is not stored
    killed_save  the engine killed while it saves that prompt
    killed_load  the engine killed while it loads
    starved      a second engine stopped while it loads, for longer than its lease; `beside` is
                 what the first one answers meanwhile
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore.testing.wait import until
from kvstore_bench.chat.metrics import server_counts
from kvstore_bench.demo.asker import Alone
from kvstore_bench.demo.daemon import Daemon
from kvstore_bench.demo.engine import Engine, EngineSpec, with_kvstore
from kvstore_bench.demo.machine import Machine
from kvstore_bench.demo.processes import session_members
from kvstore_bench.demo.progress import Progress
from kvstore_bench.demo.stage import Stage
from kvstore_bench.long.model import FIRST_TOKEN, KV_NBYTES_A_TOKEN, TOKENS_MAX, VOCAB
from kvstore_bench.long.snapshots import Snapshots, Stats

ANSWER_TOKENS = 16
SPARE_TOKENS = 64  # of the model's length, for the answer
BLOCK_TOKENS = 32
SMALL_SHARE = 4
CAP_ROOM = 4  # the daemon's arena, of the longest prompt: with room for all
SETTLE_S = 3.0  # until connectors have seen that a daemon is there again
STOPPED_S = 12.0
ATTEMPTS = 10
MOMENT_S = 240.0  # until half of a prompt is stored
WARM_UP_TOKENS = 2048
SEEN_WITHIN_S = 10.0
TITLES = {
    "cold": "cold: nothing is stored",
    "dram": "resumed from DRAM",
    "file": "resumed from files, after restarts of the daemon",
    "restart": "resumed after SIGKILL of engine and daemon",
    "small": "an arena that holds a part of the prompt",
    "killed_save": "SIGKILL of the engine while it saves",
    "killed_load": "SIGKILL of the engine while it loads",
    "starved": "a second engine, stopped while it loads",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. lengths: tokens of prompts, ascending. passes: over what is warm.
    restarts: of engine and daemon."""

    model: Path
    machine: Machine
    lengths: tuple[int, ...]
    passes: int
    restarts: int

    def spec(self) -> EngineSpec:
        """Return an engine without connector, with room for a few prompts."""
        return EngineSpec(
            "plain",
            self.model,
            self.machine,
            "bfloat16",
            self.machine.cores,
            TOKENS_MAX,
            block_tokens=BLOCK_TOKENS,
        )

    @property
    def longest_nbytes(self) -> int:
        """KV of the longest prompt."""
        return self.lengths[-1] * KV_NBYTES_A_TOKEN


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. loaded_tokens: those that the connector loaded. own_ttft_s: of the same prompt,
    as a hit in the engine's own cache. wrong: that, or what was kept when the prompt was computed,
    says something else."""

    phase: str
    length: int
    ttft_s: float
    loaded_tokens: float
    own_ttft_s: float
    wrong: bool

    @property
    def loaded_share(self) -> float:
        """Of what can be loaded: the whole blocks before the prompt's last token."""
        last = self.length - SPARE_TOKENS - 1
        return self.loaded_tokens / (last - last % BLOCK_TOKENS)


@dataclass(slots=True)
class Course:
    """One run; `answered` is what it found. dead: engines that ended by themselves. hung: answers
    that did not come. leases_left: in the daemon, at the end."""

    plan: Plan
    stage: Stage
    progress: Progress
    snapshots: Snapshots
    answered: list[Answered] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    leases_left: int = 0
    _alone: Alone = field(default_factory=Alone)
    _engine: Engine | None = None
    _daemon: Daemon | None = None
    _dram_nbytes: int = 0
    _computed: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    # ---- the phases ------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all phases."""
        plan = self.plan
        self.progress.say("starting the daemon and the engine")
        self._start_daemon(CAP_ROOM * plan.longest_nbytes)
        self._start_engine()
        self._say("cold")
        for length in plan.lengths:
            self._ask("cold", length)
        self._daemon_now.flush()
        self._say("dram")
        for _ in range(plan.passes):
            for length in plan.lengths:
                self._resume("dram", length)
        self._say("file")
        for _ in range(plan.passes):
            self._restart_daemon()
            for length in plan.lengths:
                self._resume("file", length)
        self._say("restart")
        for _ in range(plan.restarts):
            self._kill_both()
            for length in plan.lengths:
                self._resume("restart", length)
        self._small_arena()
        self._killed()
        self._starved()
        self._see_phase()

    def _small_arena(self) -> None:
        """Store the longest prompt through an arena that holds a part of it, and load it."""
        self._say("small")
        self._daemon_now.child.stop()
        self._start_daemon(self.plan.longest_nbytes // SMALL_SHARE)
        longest = self.plan.lengths[-1]
        self._ask("small_cold", longest, seed=1)
        self._daemon_now.flush()
        self._resume("small", longest, seed=1)

    def _killed(self) -> None:
        """Kill the engine half way through a save, and half way through a load."""
        longest = self.plan.lengths[-1]
        self._see_phase()
        self.snapshots.watch("")
        self._daemon_now.child.stop()
        self._engine_now.forget_prefixes()
        self._ask("killed_cold", longest, seed=2)
        self._start_daemon(CAP_ROOM * self.plan.longest_nbytes)
        self._say("killed_save")
        half = self._resident_blocks() + longest // BLOCK_TOKENS // 2
        self._kill_when(lambda stats: stats["dram"]["blocks"] >= half, longest)
        self._resume("killed_save", longest, seed=2)
        self._restart_daemon()
        self._say("killed_load")
        self._kill_when(_loads, longest)
        self._resume("killed_load", longest, seed=2)

    def _kill_when(self, is_it: Callable[[Stats], bool], length: int) -> None:
        """Kill the engine at a moment while it answers; start another one."""
        asking = self._at_moment(self._engine_now, is_it, length)
        self._engine_now.child.kill()
        asking.join()
        self._start_engine()

    def _at_moment(
        self, engine: Engine, is_it: Callable[[Stats], bool], length: int
    ) -> threading.Thread:
        """Have an engine answer; return at a moment of that. Some moments are over in milliseconds:
        it is asked again then. Raises Unavailable if no moment was seen."""
        for _ in range(ATTEMPTS):
            engine.forget_prefixes()
            asking = self._in_background(engine, length)
            if self.snapshots.await_moment(is_it, asking, MOMENT_S):
                return asking
        raise Unavailable(
            f"{self.snapshots.phase}: {ATTEMPTS} answers, and the moment was not seen"
        )

    def _starved(self) -> None:
        """Stop a second engine in the middle of its load; the first one must not notice, and the
        second one goes on when its lease is over."""
        length = self.plan.lengths[-1]
        first = self._engine_now
        (second,) = self.stage.engines([replace(first.spec, name="second")])
        self._restart_daemon(**{"limits.lease_s": str(STOPPED_S / 2)})
        self._say("starved")
        asking = self._at_moment(second, _loads, length)
        began = time.monotonic()
        _signal(second, signal.SIGSTOP)
        self._resume("beside", length, seed=2, engine=first)
        self._resume("beside", self.plan.lengths[0], engine=first)
        time.sleep(max(0.0, STOPPED_S - (time.monotonic() - began)))
        _signal(second, signal.SIGCONT)
        asking.join()
        self._resume("starved", length, seed=2, engine=second)
        self.leases_left = self._leases()

    # ---- asking ----------------------------------------------------------------------------------

    def _resume(
        self, phase: str, length: int, *, seed: int = 0, engine: Engine | None = None
    ) -> None:
        """Ask for a prompt that the engine itself has forgotten, and compare with its own hit."""
        engine = engine or self._engine_now
        engine.forget_prefixes()
        self._ask(phase, length, seed=seed, engine=engine)

    def _ask(self, phase: str, length: int, *, seed: int = 0, engine: Engine | None = None) -> None:
        engine = engine or self._engine_now
        prompt = prompt_of(length, seed)
        try:
            before = engine.counters()
            reply = self._alone.ask(engine, prompt, ANSWER_TOKENS)
            sources = server_counts(before, engine.counters()).prompt_tokens_by_source or {}
            own = self._alone.ask(engine, prompt, ANSWER_TOKENS)
        except Unavailable as error:
            self._failed(engine, f"{phase}, {length} tokens: {error}")
            return
        loaded = sources.get("external_kv_transfer", 0.0)
        if not loaded:
            self._computed.setdefault((length, seed), own.tokens)
        wrong = is_wrong(loaded, reply.tokens, own.tokens, self._computed.get((length, seed)))
        self.answered.append(Answered(phase, length, reply.ttft_s, loaded, own.ttft_s, wrong))

    def _failed(self, engine: Engine, reason: str) -> None:
        self.hung.append(reason)
        try:
            engine.child.check()
        except Unavailable as error:
            self.dead.append(str(error))
            raise

    def _in_background(self, engine: Engine, length: int) -> threading.Thread:
        """Ask without caring for the answer."""

        def ask() -> None:
            with suppress(Unavailable):  # it is killed
                engine.ask(prompt_of(length, 2), 1)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        return thread

    def _say(self, phase: str) -> None:
        self._see_phase()
        self.snapshots.phase = phase
        self.progress.say(TITLES[phase])

    def _see_phase(self) -> None:
        """Wait until there is a snapshot of the phase; without one the run fails in the end."""
        if self.snapshots.phase:
            with suppress(TimeoutError):
                until(lambda: self.snapshots.phase in self.snapshots.phases, SEEN_WITHIN_S)

    # ---- processes -------------------------------------------------------------------------------

    @property
    def _engine_now(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def _daemon_now(self) -> Daemon:
        assert self._daemon is not None
        return self._daemon

    def _start_daemon(self, dram_nbytes: int, **settings: str) -> None:
        self._dram_nbytes = dram_nbytes
        self._daemon = self.stage.daemon(dram_nbytes=dram_nbytes, settings=settings)
        self.snapshots.watch(self._daemon.target)
        if self._engine is not None:
            time.sleep(SETTLE_S)

    def _restart_daemon(self, **settings: str) -> None:
        """Have a daemon with an empty arena, and everything in files."""
        self._daemon_now.flush()
        self.snapshots.watch("")
        self._daemon_now.child.stop()
        self._start_daemon(self._dram_nbytes, **settings)

    def _start_engine(self) -> None:
        spec = with_kvstore(self.plan.spec(), "engine", self._daemon_now.target)
        (self._engine,) = self.stage.engines([spec])
        self._alone.ask(self._engine, prompt_of(WARM_UP_TOKENS, 3), 2)

    def _kill_both(self) -> None:
        self._daemon_now.flush()
        self.snapshots.watch("")
        self._engine_now.child.kill()
        self._daemon_now.child.kill()
        self._engine = None
        self._start_daemon(self._dram_nbytes)
        self._start_engine()

    def _resident_blocks(self) -> int:
        with Client(self._daemon_now.target, arena=False) as client:
            return int(client.admin.stats()["dram"]["blocks"])

    def _leases(self) -> int:
        """Return how many leases are left when all that was asked is answered."""
        with Client(self._daemon_now.target, arena=False) as client:
            deadline = time.monotonic() + STOPPED_S
            while (left := int(client.admin.stats()["leases"])) and time.monotonic() < deadline:
                time.sleep(0.1)
        return left


def is_wrong(
    loaded_tokens: float,
    answer: Sequence[int],
    own: Sequence[int],
    computed: Sequence[int] | None,
) -> bool:
    """Say whether an answer is wrong. own: of the engine's own hit right after it, which is one on
    the blocks that were just loaded. computed: of the engine's own hit on blocks that it had
    computed; None: not known, which is wrong where anything was loaded.

    A prompt that is computed as a whole rounds differently from one that is resumed, so of that the
    hit alone is compared.
    """
    if not loaded_tokens:
        return own != computed
    return not answer == own == computed


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Return a prompt, and room for its answer in so many tokens."""
    drawn = random.Random(f"{tokens} {seed}")
    return drawn.choices(range(FIRST_TOKEN, VOCAB), k=tokens - SPARE_TOKENS)


def _loads(stats: Stats) -> bool:
    return int(stats["leases"]) > 0


def _signal(engine: Engine, number: int) -> None:
    for pid in session_members(engine.child.session):
        os.kill(pid, number)
