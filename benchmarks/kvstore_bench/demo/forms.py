"""The forms of a record beside each other: raw, L3 and EP, on three engines that differ in nothing
else.

    computed    each engine computes and saves some prompts
    dram        the same prompts again, out of DRAM
    restart     again, after SIGKILL to the daemon: off the disk
    capacity    a daemon without a disk, whose DRAM has room for half of the first turns raw
                (`DRAM_SHARE`): one form after the other asks first turns, then second and third
                ones, those asked last first. What is a hit?

Raw and L3 load the same bits, so they have to answer the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore_bench.demo.asker import Asker, Side
from kvstore_bench.demo.book import Book
from kvstore_bench.demo.daemon import Daemon
from kvstore_bench.demo.engine import Engine, EngineSpec, with_kvstore
from kvstore_bench.demo.progress import Progress
from kvstore_bench.demo.stage import Stage
from kvstore_bench.demo.workload import Turn, Workload

FORMS: Mapping[str, Mapping[str, str]] = {
    "raw": {"record": "raw"},
    "l3": {"record": "l3"},
    "ep": {"fidelity": "ep"},
}
CONVERSATIONS = 3  # asked out of DRAM and off the disk
PASSES = {"dram": 9, "restart": 3}
"""Out of DRAM, forms differ by milliseconds: three passes put their ratio up to 0.07 off."""
CONNECT_TIMEOUT_S = 30.0
DRAM_SHARE = 0.48
"""Of what the first turns take raw. L3 takes some 0.7 of that and EP a third: so there is room for
nearly half of the prefixes raw, for half and more in L3, and for all in EP. Of eight turns that are
asked again, three are hits raw, four in L3, and all in EP: the median of raw is a miss, that of L3
lies between misses and hits, and that of EP is a hit. With less room, that of L3 is a miss as well,
and the forms differ by which misses are the longer ones."""
CAPACITY_TURNS = 2, 3  # one round alone is eight times to the first token, and some are noise
FINE_SHARE = 0.1  # of the small DRAM: where room is short, it goes to base parts
SMALL_DRAM = {
    "file.path": "",
    "dram.fine_share": str(FINE_SHARE),
    # Forms are compared, not guesses: another policy may keep what was a hit in one form alone.
    "dram.eviction_policy": "lru",
}
BLOCK_TOKENS = 64  # records of a small model are small, and slots are whole pages


@dataclass(frozen=True, slots=True)
class Arenas:
    """Sizes of the arena, in bytes: for everything, for what restarts, and for too little."""

    all_nbytes: int
    restart_nbytes: int
    small_nbytes: int


class FormsCourse:
    """Runs the phases above, with engines like `small`, after everything else has stopped."""

    def __init__(
        self, small: EngineSpec, workload: Workload, stage: Stage, progress: Progress, book: Book
    ) -> None:
        self._small = small
        self._workload = workload
        self._stage = stage
        self._progress = progress
        self._book = book
        self._asker = Asker(workload, progress, book, spins=not small.machine.gpu)

    def run(self, arenas: Arenas) -> None:
        """Run all phases."""
        self._progress.say("starting a daemon, and three engines: raw, L3 and EP")
        daemon = self._stage.daemon(dram_nbytes=arenas.all_nbytes)
        _clear(daemon)
        engines = self._engines(daemon)
        self._asker.warm_up(*engines.values())
        last = self._workload.shape.turns
        turns = self._workload.turns(last, last)[:CONVERSATIONS]
        self._asker.ask("computed and saved", turns, *_sides(engines, "computed"))
        self._again("dram", engines, daemon)
        daemon.flush()
        self._progress.say("SIGKILL to the daemon")
        daemon.child.kill()
        settings = {"dram.eviction_policy": "lru"}
        daemon = self._stage.daemon(dram_nbytes=arenas.restart_nbytes, settings=settings)
        self._connect(*engines.values())
        self._again("restart", engines, daemon)
        daemon.child.stop()
        daemon = self._stage.daemon(dram_nbytes=arenas.small_nbytes, settings=SMALL_DRAM)
        self._connect(*engines.values())
        for form, engine in engines.items():
            self._capacity(form, engine, daemon)
        for child in (daemon.child, *(engine.child for engine in engines.values())):
            child.stop()

    def _engines(self, daemon: Daemon) -> dict[str, Engine]:
        specs = [
            with_kvstore(self._small, f"records-{form}", daemon.target, **options)
            for form, options in FORMS.items()
        ]
        return dict(zip(FORMS, self._stage.engines(specs), strict=True))

    def _again(self, phase: str, engines: Mapping[str, Engine], daemon: Daemon) -> None:
        """Ask what is stored: a small engine has room for one conversation at a time."""
        last = self._workload.shape.turns
        turns = self._workload.turns(last, last)[:CONVERSATIONS]
        for engine in engines.values():
            engine.forget_prefixes()
        sides = _sides(engines, phase)
        title = f"raw, L3 and EP, {phase}"
        self._asker.repeat(title, turns, *sides, passes=PASSES[phase])

    def _capacity(self, form: str, engine: Engine, daemon: Daemon) -> None:
        """Let conversations take turns in an arena that is too small for them."""
        phase = f"capacity_{form}"
        _clear(daemon)
        engine.forget_prefixes()
        self._asker.ask(f"small DRAM, {form}", self._workload.turns(1, 1), Side(phase, engine))
        with self._book.counting(phase, engine, daemon):
            for number in CAPACITY_TURNS:
                engine.forget_prefixes()
                turns = last_first(self._workload, number)
                self._asker.ask(f"small DRAM, {form}, turn {number}", turns, Side(phase, engine))
        for prompt in self._workload.fresh:  # whatever the form, the arena is full now
            self._asker.alone(engine, prompt, 1)
        self._asker.warm_up(engine)
        self._book.counts[phase]["stored"] = _stored(daemon)

    def _connect(self, *engines: Engine) -> None:
        """Wait until every engine asks the daemon again. Raises Unavailable."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        for engine in engines:
            while not self._is_answered(engine):
                if time.monotonic() > deadline:
                    raise Unavailable(f"{engine.spec.name} has lost its daemon")

    def _is_answered(self, engine: Engine) -> bool:
        engine.forget_prefixes()
        before = _lookups(engine)
        self._asker.warm_up(engine)
        asked, failed = (now - was for now, was in zip(_lookups(engine), before, strict=True))
        return asked > failed


def last_first(workload: Workload, number: int) -> list[Turn]:
    """Return the turns of this number, those of conversations that were asked last first: every
    second round goes backwards."""
    turns = workload.turns(number, number)
    return turns if number % 2 else turns[::-1]


def _sides(engines: Mapping[str, Engine], phase: str) -> Sequence[Side]:
    return [Side(f"{form}_{phase}", engine) for form, engine in engines.items()]


def _lookups(engine: Engine) -> tuple[float, float]:
    """Return how many lookups an engine has sent, and how many have failed."""
    counters = engine.counters()
    sent, failed = (
        sum(value for (name, _), value in counters.items() if name == f"vllm:kvstore_{what}_total")
        for what in ("lookups", "lookups_failed")
    )
    return sent, failed


def _clear(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.admin.clear()


def _stored(daemon: Daemon) -> dict[str, Any]:
    """Return blocks and bytes in DRAM."""
    with Client(daemon.target) as client:
        stats = client.admin.stats()
    (kept,) = [each for each in stats["fidelities"] if each["tier"] == "dram"]
    names = ("blocks", "refined_blocks", "stored_bytes", "raw_bytes")
    return {name: kept[name] for name in names}
