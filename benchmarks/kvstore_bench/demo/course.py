"""The phases of the demo, in order.

Every request runs alone, and what is compared alternates, so that whatever else happens on the
machine hits both: first turns one by one, resumed turns by rounds of all conversations. On a CPU,
an engine keeps a core busy for a second after a request, waiting for the next one: whoever is asked
after another engine waits that long first, and the process of an engine that only waits for its
model has the lowest priority. What is warm is asked in several passes: the TTFT of a turn is the
median of its passes. The engines:

    plain     no connector, KV space too small to keep a conversation between its turns
    roomy     no connector, KV space for everything: its own prefix hit is the floor
    cached    KV space as small as plain's, with our connector
    replica   another one like cached, asked nothing until it is its turn

    first turns   roomy, cached   nothing is stored yet: what does saving cost?     -> cold
    turns 2 to 4  plain, cached   conversations grow; plain's answers are recorded  -> none, cold
    again         roomy, cached   prefixes warm in DRAM                             -> device, dram
    again         roomy, replica  an engine that has computed none of it            -> replica
    SIGKILL to cached, replica and daemon after a flush; both started again
    again         roomy, cached   prefixes warm on disk only                        -> restart

If that did not run in float32, where a loaded prefix must give the very same answer, two more
engines repeat some of it in float32 (`exact`). At last three engines compare the forms of a record
(`forms.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvstore.model.block import PAGE_NBYTES
from kvstore_bench.demo import forms
from kvstore_bench.demo.asker import Asker, Side
from kvstore_bench.demo.book import RESUMED, Book
from kvstore_bench.demo.daemon import Daemon
from kvstore_bench.demo.disk import PlainReads
from kvstore_bench.demo.engine import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Engine,
    EngineSpec,
    with_kvstore,
)
from kvstore_bench.demo.machine import Machine
from kvstore_bench.demo.model import KVShape
from kvstore_bench.demo.progress import Progress
from kvstore_bench.demo.stage import Stage
from kvstore_bench.demo.workload import Workload

PHASES = ("device", "dram", "replica", "restart", "exact", "forms")
DEVICE_TOKENS = 1  # answers that are not even compared
FRESH_TOKENS = 4
EXACT_CONVERSATIONS = 4
EXACT_TOKENS = 16
DISK_READS = 8  # after each pass
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. phases: of PHASES; `none` and `cold` always run, the rest builds on them."""

    model: Path
    kv: KVShape
    machine: Machine
    dtype: str
    threads: int
    phases: frozenset[str]

    def spec(
        self, name: str, workload: Workload, *, small: bool, block_tokens: int = BLOCK_TOKENS
    ) -> EngineSpec:
        """Return an engine without connector."""
        tokens_max = workload.shape.prompt_tokens_max
        blocks = self.kv.blocks_for(
            tokens_max, block_tokens=block_tokens, chunk_tokens=CHUNK_TOKENS
        )
        return EngineSpec(
            name=name,
            model=self.model,
            machine=self.machine,
            dtype=self.dtype,
            threads=self.threads,
            tokens_max=tokens_max,
            blocks=blocks if small else None,
            block_tokens=block_tokens,
        )

    def dram_nbytes(self, workload: Workload) -> int:
        """Return an arena that holds the KV of the whole workload, all layers."""
        shape = workload.shape
        tokens = shape.prompt_tokens_max * (shape.conversations + shape.fresh)
        return _round_up(self.kv.nbytes(tokens, dtype=self.dtype))

    def restart_dram_nbytes(self, workload: Workload) -> int:
        """Return an arena for three conversations, so that every turn has to come from disk."""
        tokens = workload.shape.prompt_tokens_max
        return _round_up(3 * self.kv.load_nbytes(tokens, dtype=self.dtype))

    def arenas(self, workload: Workload) -> forms.Arenas:
        """Return the arenas of the forms of a record."""
        first_tokens = [len(questions[0]) for questions in workload.questions]
        first_nbytes = sum(self.kv.load_nbytes(each, dtype=self.dtype) for each in first_tokens)
        return forms.Arenas(
            all_nbytes=self.dram_nbytes(workload),
            restart_nbytes=self.restart_dram_nbytes(workload),
            small_nbytes=int(forms.DRAM_SHARE * first_nbytes) // PAGE_NBYTES * PAGE_NBYTES,
        )


class Course:
    """One run. What it measures goes to `book`; `pairs` are (cached, roomy), nothing stored yet."""

    def __init__(self, plan: Plan, workload: Workload, stage: Stage, progress: Progress) -> None:
        self.plan = plan
        self.workload = workload
        self.stage = stage
        self.progress = progress
        self.book = Book()
        self.pairs: list[tuple[float, float]] = []
        self.asker = Asker(workload, progress, self.book, spins=not plan.machine.gpu)
        self._resumed = workload.turns(RESUMED, workload.shape.turns)

    def run(self) -> None:
        """Run the planned phases."""
        small = self.plan.spec("plain", self.workload, small=True)
        self.progress.say("starting the daemon and the engines")
        daemon = self.stage.daemon(dram_nbytes=self.plan.dram_nbytes(self.workload))
        cached_spec = with_kvstore(small, "cached", daemon.target)
        roomy_spec = self.plan.spec("roomy", self.workload, small=False)
        specs = [small, cached_spec, roomy_spec]
        if "replica" in self.plan.phases:  # now: side by side, they start in less time
            specs.append(replace(cached_spec, name="replica"))
        plain, cached, roomy, *replicas = self.stage.engines(specs)
        self.asker.warm_up(plain, cached, roomy, *replicas)
        self._cold(plain, cached, roomy, daemon)
        plain.child.stop()
        if "device" in self.plan.phases:
            self._fill(roomy)
        if "dram" in self.plan.phases:
            self._again("dram", cached, roomy, daemon)
        for replica in replicas:
            self._again("replica", replica, roomy, daemon)
        if "restart" in self.plan.phases:
            self.progress.say(
                "flush, then SIGKILL to the engines with the connector and the daemon"
            )
            daemon, cached = self._kill_and_restart(daemon, [cached, *replicas], cached_spec)
            self._again("restart", cached, roomy, daemon, after_pass=partial(self._disk, cached))
        if "exact" in self.plan.phases and self.plan.dtype != "float32":
            for engine in (cached, roomy, *replicas):
                engine.child.stop()
            self._exact(daemon)
        if "forms" in self.plan.phases:
            self._forms()

    def _cold(self, plain: Engine, cached: Engine, roomy: Engine, daemon: Daemon) -> None:
        """Let the conversations grow, from an empty store."""
        book, answer = self.book, self.workload.shape.answer_tokens
        with book.counting("cold", cached, daemon), book.counting("none", plain):
            self.asker.ask(
                "first turns, nothing stored",
                self.workload.turns(1, 1),
                Side("first", roomy),
                Side("cold", cached, answer),
                record="cold",
                round_turns=1,
            )
            self._fresh_pairs(cached, roomy)
            self.asker.ask(
                "resumed turns",
                self._resumed,
                Side("none", plain, answer),
                Side("cold", cached, answer),
                record="none",
            )
        without = book.phase("first", first=1)
        for turn, reply in book.phase("cold", first=1).items():
            if turn in without:
                self.pairs.append((reply.ttft_s, without[turn].ttft_s))

    def _fresh_pairs(self, cached: Engine, roomy: Engine) -> None:
        for number, prompt in enumerate(self.progress.track("fresh prompts", self.workload.fresh)):
            engines = [cached, roomy] if number % 2 else [roomy, cached]
            ttft_s = {
                e.spec.name: self.asker.alone(e, prompt, FRESH_TOKENS).ttft_s for e in engines
            }
            self.pairs.append((ttft_s["cached"], ttft_s["roomy"]))

    def _again(
        self,
        phase: str,
        engine: Engine,
        roomy: Engine,
        daemon: Daemon,
        after_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask the resumed turns again, beside hits in the engine that has room for everything."""
        sides = [Side(phase, engine)]
        if "device" in self.plan.phases:
            sides.insert(0, Side(f"device_{phase}", roomy, DEVICE_TOKENS))
        with (
            self.book.counting(phase, engine, daemon),
            self.book.counting(f"device_{phase}", roomy),
        ):
            title = f"resumed turns, {phase}"
            self.asker.repeat(title, self._resumed, *sides, after_pass=after_pass)

    def _disk(self, engine: Engine) -> None:
        """Time plain reads of what a resumed turn of the engine has loaded."""
        counters = engine.counters()
        loads, nbytes = (
            sum(value for (name, _), value in counters.items() if name == f"vllm:kvstore_{what}")
            for what in ("loads_total", "loaded_bytes_total")
        )
        if loads:
            self.asker.wait_for_all()
            reads = PlainReads(self.stage.store)
            self.book.disk_s += [reads.seconds(int(nbytes / loads)) for _ in range(DISK_READS)]

    def _fill(self, roomy: Engine) -> None:
        """Make the roomy engine compute every last turn, which holds the turns before it."""
        last = self.workload.turns(self.workload.shape.turns, self.workload.shape.turns)
        for turn in self.progress.track("filling the engine with room", last):
            self.asker.alone(roomy, self.workload.prompt(turn, self.book.answers), 1)

    def _kill_and_restart(
        self, daemon: Daemon, engines: Sequence[Engine], spec: EngineSpec
    ) -> tuple[Daemon, Engine]:
        daemon.flush()
        for child in (*(engine.child for engine in engines), daemon.child):
            child.kill()
        self.progress.say("starting the daemon and an engine again")
        dram_nbytes = self.plan.restart_dram_nbytes(self.workload)
        settings = {"dram.eviction_policy": "lru"}  # another might keep some of them
        daemon = self.stage.daemon(dram_nbytes=dram_nbytes, settings=settings)
        (engine,) = self.stage.engines([replace(spec, name="restarted")])
        self.asker.warm_up(engine)
        return daemon, engine

    def _forms(self) -> None:
        """Compare raw, L3 and EP records."""
        self.stage.end()
        small = self.plan.spec("small", self.workload, small=True, block_tokens=forms.BLOCK_TOKENS)
        course = forms.FormsCourse(small, self.workload, self.stage, self.progress, self.book)
        course.run(self.plan.arenas(self.workload))

    def _exact(self, daemon: Daemon) -> None:
        """Compare answers in float32: computed, computed while saving, and loaded."""
        self.progress.say("starting two float32 engines")
        plan = replace(self.plan, dtype="float32")
        plain_spec = plan.spec("plain32", self.workload, small=False)
        cached_spec = with_kvstore(plain_spec, "cached32", daemon.target)
        plain, cached = self.stage.engines([plain_spec, cached_spec])
        turns = [
            turn
            for turn in self.workload.turns(1, RESUMED)
            if turn.conversation < EXACT_CONVERSATIONS
        ]
        self.asker.ask(
            "float32: computed and saved",
            turns,
            Side("none32", plain, EXACT_TOKENS),
            Side("cold32", cached, EXACT_TOKENS),
        )
        cached.forget_prefixes()
        with self.book.counting("dram32", cached, daemon):
            self.asker.ask("float32: loaded", turns, Side("dram32", cached, EXACT_TOKENS))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // (16 * MIB)) * 16 * MIB
