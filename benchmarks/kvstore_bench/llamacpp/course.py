"""The phases: every system answers the same prompts cold, again, in a new process, and after
everything was killed; then conversations take turns."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.testing.daemon import Daemon
from kvstore_bench.llamacpp.engine import Engine
from kvstore_bench.llamacpp.worker import Answer, Setup
from kvstore_bench.llamacpp.workload import Shape, Workload, build, text, turns

Say = Callable[[str], None]

SYSTEMS = ("none", "kvstore", "default", "disk")
OURS = ("kvstore", "default")
PHASES = ("first", "same", "new_process", "restart")


@dataclass(frozen=True, slots=True)
class Plan:
    """model: a GGUF. site: where llama-cpp-python is. disk_bytes: what its disk cache may hold."""

    model: Path
    site: Path
    shape: Shape
    threads: int
    systems: tuple[str, ...] = SYSTEMS
    context_tokens: int = 4096
    dram_bytes: int = 1 << 30
    file_bytes: int = 8 << 30
    disk_bytes: int = 8 << 30

    @property
    def asks(self) -> int:
        """How many prompts are asked in all."""
        shape, others = self.shape, len(self.systems) - 1
        chats = shape.conversations * shape.turns
        return shape.rounds * (1 + len(PHASES) * others) + chats * len(self.systems)


@dataclass(slots=True)
class Seen:
    """What one system did: answers by phase, those of the conversations in the order of turns;
    what it stored for the conversations alone, in bytes."""

    phases: dict[str, list[Answer]] = field(default_factory=dict)
    chats: list[Answer] = field(default_factory=list)
    chat_bytes: int = 0


class Course:
    """One run. scratch: a folder of its own, on the disk that is measured."""

    def __init__(self, plan: Plan, scratch: Path, say: Say) -> None:
        self._plan = plan
        self._scratch = scratch
        self._say = say
        self.log = scratch / "models.log"

    def run(self) -> dict[str, Seen]:
        """Return what each system did. Raises KVStoreError."""
        with self._engine("none", "") as engine:
            tokens = engine.tokens(text())
            workload = build(self._plan.shape, tokens[1:], tokens[:1])
            seen = {"none": Seen({"first": self._asked(engine, workload.prompts, "none, first")})}
            seen["none"].chats = self._chatted(engine, workload, "none")
        for system in OURS:
            if system in self._plan.systems:
                seen[system] = self._kvstore(workload, system)
        if "disk" in self._plan.systems:
            seen["disk"] = self._disk(workload)
        return seen

    def _kvstore(self, workload: Workload, system: str) -> Seen:
        plan = self._plan
        with Daemon(
            f"file.path={self._scratch / system}",
            f"file.capacity={plan.file_bytes}",
            "file.segment=256MiB",
            f"dram.capacity={plan.dram_bytes}",
            "dram.extent=256MiB",
        ) as daemon:
            daemon.start()

            def engine() -> Engine:
                return self._engine(system, daemon.target)

            def kill() -> None:
                daemon.kill()
                daemon.start()

            seen = self._phases(system, engine, workload, kill)
        shutil.rmtree(self._scratch / system)
        return seen

    def _disk(self, workload: Workload) -> Seen:
        folder = self._scratch / "disk"

        def engine() -> Engine:
            return self._engine("disk", str(folder))

        seen = self._phases("disk", engine, workload, lambda: None)
        shutil.rmtree(folder)
        return seen

    def _phases(
        self,
        system: str,
        start: Callable[[], Engine],
        workload: Workload,
        kill: Callable[[], None],
    ) -> Seen:
        seen = Seen()

        def ask(engine: Engine, phase: str) -> None:
            title = f"{system}, {phase.replace('_', ' ')}"
            seen.phases[phase] = self._asked(engine, workload.prompts, title)

        with start() as engine:
            ask(engine, "first")
            engine.flush()
            ask(engine, "same")
            engine.flush()
            with start() as other:
                ask(other, "new_process")
                other.flush()
                other.kill()
            engine.kill()
        kill()
        with start() as engine:
            ask(engine, "restart")
            before = self._stored(system, engine)
            seen.chats = self._chatted(engine, workload, system)
            seen.chat_bytes = self._stored(system, engine) - before
        return seen

    def _stored(self, system: str, engine: Engine) -> int:
        """Return the bytes that are stored: of an engine's records, or in a folder."""
        stored = engine.flush().stored_bytes
        return stored if system in OURS else _folder_nbytes(self._scratch / "disk")

    def _asked(self, engine: Engine, prompts: Sequence[list[int]], title: str) -> list[Answer]:
        answers = []
        for prompt in prompts:
            answers.append(engine.ask(prompt, self._plan.shape.answer_tokens))
            self._say(f"{title}: {answers[-1].ttft_s:.3f} s")
        return answers

    def _chatted(self, engine: Engine, workload: Workload, title: str) -> list[Answer]:
        """Let conversations take turns; each answer becomes part of its conversation."""
        so_far: dict[int, list[int]] = {}
        answers = []
        for index, said in turns(workload.conversations):
            prompt = so_far.get(index, []) + said
            answer = engine.ask(prompt, self._plan.shape.answer_tokens)
            so_far[index] = prompt + answer.answer
            answers.append(answer)
            self._say(f"{title}, conversations: {answer.ttft_s:.3f} s")
        return answers

    def _engine(self, system: str, place: str) -> Engine:
        plan = self._plan
        setup = Setup(
            model=str(plan.model),
            system=system,
            place=place,
            context_tokens=plan.context_tokens,
            threads=plan.threads,
            cache_bytes=plan.disk_bytes,
        )
        return Engine(setup, plan.site, self.log)


def _folder_nbytes(folder: Path) -> int:
    files: Iterator[Path] = folder.rglob("*")
    return sum(os.stat(each).st_blocks * 512 for each in files if each.is_file())


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder in `parent` that is removed again."""
    folder = parent / f"demo-llamacpp-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
