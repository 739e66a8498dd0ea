"""A daemon that is killed again and again: its lives, its clients and its disk."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from kvstore import Client
from kvstore.model.block import BlockKey, NamespaceId, Part
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.torture.cap import CapWatch, physical_nbytes
from tests.torture.check import check
from tests.torture.control import Control
from tests.torture.findings import Findings
from tests.torture.journal import Journal
from tests.torture.party import Party, parties
from tests.torture.plan import TROUBLES, Life
from tests.torture.spaces import NAMESPACES, Item
from tests.torture.traffic import Reader, Worker, Writer
from tests.torture.volume import Volume
from tests.torture.wounds import Wounds

ROOT = Path(__file__).parents[2]
SEGMENT_NBYTES = 1 << 20
AMPLE_BYTES = 4 << 30  # nothing may be evicted below it
CHURN_BYTES = 12 << 20
SETTINGS = (
    *("dram.capacity=8MiB", "dram.extent=4MiB", f"file.segment={SEGMENT_NBYTES}"),
    *("limits.group_commit=1MiB", "file.scrub=64MiB"),
)
BASE_LIFE = 4  # in one life of so many, the file tier keeps no fine parts
WARM_STEPS = 20
WARM_S = 5.0
TROUBLE_S = (0.2, 1.0)
KILL_AFTER_S = (0.05, 0.6)
DEATH_S = 3.0  # a call that does not come by then: killed all the same
SCRUB_S = 0.3
END_S = 60.0
CUT_S = 20.0  # to get under a cap that is smaller than the last one


class SteeredDaemon(Daemon):
    """Runs `kvstore` as `process.py` does."""

    def __init__(self, *overrides: str) -> None:
        super().__init__(*overrides)
        self.control = Control(self.directory)

    def command(self, *arguments: str) -> list[str]:
        (python, _, _, *rest) = super().command(*arguments)
        return [python, "-m", "tests.torture.process", str(self.directory), *rest]


class World:
    """See the module. A context manager; at its end nothing is left.

    volume: where its files are then, instead of beside the daemon's socket; it may be full.
    directories: of the file tier, by name. root_key: they are encrypted. tenants: who share the
    daemon; without any there is one user, whose `journal` and `traffic` are the world's.
    """

    writers = 3  # of each party
    readers = 2

    def __init__(
        self,
        volume: Volume | None = None,
        settings: Sequence[str] = (),
        directories: Sequence[str] = ("file",),
        root_key: Path | None = None,
        tenants: Sequence[str] = (),
    ) -> None:
        self.findings = Findings()
        self._root_key = root_key
        key = [f"security.root_key_file={root_key}"] if root_key is not None else []
        self.daemon = SteeredDaemon(*SETTINGS, *settings, *key)
        self._control = self.daemon.control
        self._volume = volume
        root = volume.path if volume else self.daemon.directory
        self._roots = [root / name for name in directories]
        self.parties = parties(tenants, self._roots)
        self.journal, self.traffic = self.parties[0].journal, self.parties[0].traffic
        self._directories = [path for party in self.parties for path in party.directories]
        self._wounds = {path: Wounds(path, root_key) for path in self._directories}
        self._churn = False

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: Any) -> None:
        self.daemon.__exit__(None, None, None)

    def run(self, lives: Sequence[Life], told: Callable[[Life], None] = lambda life: None) -> None:
        """Live all lives, and one more to look at what is left."""
        for life in lives:
            self._guarded(life, self._live)
            told(life)
        self._guarded(lives[-1], self._last)

    def _guarded(self, life: Life, part: Callable[[Life], None]) -> None:
        """Count what goes wrong; the next life begins all the same."""
        try:
            part(life)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            self._found(life, [f"hung: {error!r}"])
        except Exception as error:
            self._found(life, [f"bug: {error!r}"])
        finally:
            self._control.set()
            if self.daemon.alive:
                self.daemon.kill()
            self._over()

    # ---- one life --------------------------------------------------------------------------------

    def _live(self, life: Life) -> None:
        draw = Random(life.seed)
        cut = life.churn and not self._churn
        self._churn = life.churn
        if life.death == "start":
            self._die_at_start(life)
        self._start(life)
        if cut:
            until(self._is_under_cap, CUT_S)
        with self._watched(life):
            self._check(life)
            self._work(life, draw)
        if self._volume and life.death == "power":
            self._volume.restore_power()
        if life.death == "gc":
            self._die_in_gc(life)
        self._wound(life)

    def _last(self, life: Life) -> None:
        self._start(life)
        self._check(life)
        if self.daemon.stop() != 0:
            self._found(life, ["hung: the daemon did not drain"])

    def _start(self, life: Life) -> None:
        began = time.monotonic()
        capacity_bytes = CHURN_BYTES if life.churn else AMPLE_BYTES
        self.daemon.start(
            f"file.path={json.dumps(list(map(str, self._roots)))}",
            f"file.capacity={capacity_bytes}",
            *self._shares(capacity_bytes),
            f"file.codec={life.codec}",
            f"file.fidelity={'base' if life.number % BASE_LIFE == BASE_LIFE - 1 else 'fine'}",
            f"file.scrub_every_s={SCRUB_S if life.death == 'scrub' else 60.0}",
        )
        self.findings.start_s_max = max(self.findings.start_s_max, time.monotonic() - began)

    def _shares(self, capacity_bytes: int) -> Sequence[str]:
        """Return the settings of who shares that capacity."""
        return ()

    @contextmanager
    def _watched(self, life: Life) -> Iterator[None]:
        """Keep an eye on the cap, if it is one that can be reached."""
        if not life.churn:
            yield
            return
        with ExitStack() as stack:
            watches = [stack.enter_context(CapWatch(p, CHURN_BYTES)) for p in self._capped()]
            yield
        found = self.findings
        for watch in watches:
            found.cap_looks += watch.looks
            found.cap_overshoot_bytes = max(found.cap_overshoot_bytes, watch.overshoot_bytes)

    def _present(self) -> list[Path]:
        """The directories that are there."""
        return [path for path in self._directories if path.exists()]

    def _capped(self) -> list[list[Path]]:
        """The directories that have a cap together."""
        return [[path] for path in self._present()]

    def _is_under_cap(self) -> bool:
        return all(physical_nbytes(paths) <= CHURN_BYTES for paths in self._capped())

    def _check(self, life: Life) -> None:
        for party in self.parties:
            with Client(party.target(self.daemon), timeout_s=10.0) as client:
                broken = check(client, party.journal, self._hear)
                self._found(life, [f"{text}{party.suffix}" for text in broken])
                self.findings.checked += client.admin.stats()["blocks"]

    def _work(self, life: Life, draw: Random) -> None:
        """Let the clients work, trouble the disk for a while, and kill the daemon."""
        for party in self.parties:
            party.traffic.over.clear()
            party.traffic.quiet.clear()
            party.traffic.flushes = not (life.churn or life.trouble or self._volume)
        with ExitStack() as stack:
            workers = self._workers(stack, life, draw)
            for worker in workers:
                worker.start()
            try:
                self._warm_up(life, workers)
                if life.trouble:
                    self._trouble(life, draw)
                self._kill(life, draw)
            finally:
                self._end(life, workers)

    def _workers(self, stack: ExitStack, life: Life, draw: Random) -> list[Worker]:
        return [
            worker
            for party in self.parties
            for worker in self._workers_of(party, stack, life, draw)
        ]

    def _workers_of(self, party: Party, stack: ExitStack, life: Life, draw: Random) -> list[Worker]:
        def client(*, arena: bool = True) -> Client:
            target = party.target(self.daemon)
            client = stack.enter_context(Client(target, arena=arena))
            for namespace in NAMESPACES:
                client.register(namespace)
            return client

        seeds = [Random(draw.getrandbits(32)) for _ in range(self.writers + self.readers)]
        writers = [
            Writer(
                party.traffic,
                client(),
                seeds.pop(),
                NAMESPACES[(life.number + number) % len(NAMESPACES)],
                f"life {life.number} {life.seed} writer {number}",
            )
            for number in range(self.writers)
        ]
        readers = [
            Reader(party.traffic, client(arena=not number), seeds.pop(), writers)
            for number in range(self.readers)
        ]
        return [*writers, *readers]

    def _warm_up(self, life: Life, workers: Sequence[Worker]) -> None:
        """Let everybody work for a while; at a small cap, until it was filled once more."""
        enough = self._accepted_nbytes() + (CHURN_BYTES if life.churn else 0)
        wait_for(
            lambda: (
                self._accepted_nbytes() >= enough
                and all(worker.steps >= WARM_STEPS for worker in workers)
            ),
            WARM_S,
        )

    def _accepted_nbytes(self) -> int:
        return sum(party.journal.accepted_nbytes for party in self.parties)

    def _trouble(self, life: Life, draw: Random) -> None:
        self._control.set(TROUBLES[life.trouble])
        time.sleep(draw.uniform(*TROUBLE_S))
        self._control.set()
        self._flush_after(life)

    def _flush_after(self, life: Life) -> None:
        """See that all is written once trouble is over, where there is room for it."""
        if life.churn or self._volume:
            return
        for party in self.parties:
            with Client(party.target(self.daemon), arena=False) as client:
                # Answers may tell of what was evicted while it could not be written, for TOLD_S.
                end = time.monotonic() + END_S / 2
                while not (durable := client.admin.flush(END_S / 4)) and time.monotonic() < end:
                    time.sleep(0.1)
                if not durable:
                    self._found(life, [f"hung: not durable after {life.trouble!r} was over"])

    def _kill(self, life: Life, draw: Random) -> None:
        """Let it die as the life says, or, if that call does not come, by a signal."""
        if life.death == "scrub":  # with nobody else on the disk
            for party in self.parties:
                party.traffic.quiet.set()
            for party in self.parties:
                with Client(party.target(self.daemon), arena=False) as client:
                    client.admin.flush(5.0)
        if self._volume and life.death == "power":
            self._volume.cut_power()
        if life.rule is None or life.death in ("start", "gc"):
            time.sleep(draw.uniform(*KILL_AFTER_S))
        else:
            self._control.set(life.rule)
            wait_for(lambda: not self.daemon.alive, DEATH_S)
        self._killed(life.death)

    def _end(self, life: Life, workers: Sequence[Worker]) -> None:
        for party in self.parties:
            party.traffic.over.set()
        for worker in workers:
            worker.join(END_S)
            if worker.is_alive():
                self._found(life, [f"hung: {type(worker).__name__} outlives its daemon"])
        for party in self.parties:
            self._found(life, [f"{text}{party.suffix}" for text in party.traffic.violations])
            party.traffic.violations.clear()

    def _killed(self, death: str) -> None:
        """See to it that the daemon is dead, and note what of."""
        planned = not self.daemon.alive
        if not planned:
            self.daemon.kill()
        if self.daemon.wait() != -signal.SIGKILL:
            raise RuntimeError(f"the daemon ended by itself:\n{self.daemon.output()}")
        self._control.set()
        self.findings.kills += 1
        self.findings.deaths[death if planned or death == "power" else "timer"] += 1
        self._over()

    def _die_at_start(self, life: Life) -> None:
        assert life.rule is not None
        self._control.set(life.rule)
        try:
            self._start(life)
        except RuntimeError:
            if self.daemon.wait() != -signal.SIGKILL:
                raise
            self._killed(life.death)
        else:  # there was less to recover
            self._killed(life.death)

    def _die_in_gc(self, life: Life) -> None:
        assert life.rule is not None
        self._control.set(life.rule)
        key = ["--root-key-file", str(self._root_key)] if self._root_key is not None else []
        command = self.daemon.command("gc", *map(str, self._present()), *key)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=END_S, check=False)
        self._control.set()
        if done.returncode == -signal.SIGKILL:
            self.findings.kills += 1
            self.findings.deaths["gc"] += 1
        elif done.returncode:
            raise RuntimeError(f"gc failed:\n{done.stderr.decode()}")

    # ---- between lives ---------------------------------------------------------------------------

    def _wound(self, life: Life) -> None:
        if life.wound:
            self.findings.wounds[life.wound] += 1
            draw = Random(life.seed)
            path = draw.choice(self._present())
            wounds = self._wounds[path]
            wound = wounds.tear if life.wound == "tear" else wounds.rot
            for item in wound(draw):
                self._journal_of(path).damaged(item)

    def _hear(self) -> None:
        """Take in what the daemon wrote down. Below an ample cap no eviction is excused."""
        for event in self._control.news():
            match event.what:
                case ["fault", do, call]:
                    self.findings.faults[f"{do} {call}"] += 1
                case ["evicted", path, *name]:
                    self.findings.evicted += 1
                    if self._churn:
                        self._journal_of(Path(path)).evicted(_item(*name), event.at)
                case ["unread", path, *name]:
                    self._journal_of(Path(path)).evicted(_item(*name), event.at)

    def _journal_of(self, path: Path) -> Journal:
        """Return the journal of whose directory this is."""
        return next(party.journal for party in self.parties if path in party.directories)

    def _over(self) -> None:
        self._hear()
        for party in self.parties:
            party.journal.life_over()

    def _found(self, life: Life, violations: Sequence[str]) -> None:
        self.findings.violations += [f"life {life.number}: {text}" for text in violations]


def _item(namespace: str, key: str, group: str, shard: str) -> Item:
    of = NamespaceId(bytes.fromhex(namespace))
    return Item(of, BlockKey(bytes.fromhex(key)), Part(int(group), int(shard)))


def wait_for(true: Callable[[], object], timeout_s: float) -> None:
    """Wait for what need not come."""
    try:
        until(true, timeout_s)
    except TimeoutError:
        pass  # then it goes on without
