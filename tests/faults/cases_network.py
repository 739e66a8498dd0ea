"""Faults between hosts: links that are slow or flip bits, clocks that differ."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path
from statistics import median

from tests.cluster.namespaces import HostDaemon, Loopback
from tests.faults.fleet import BLOCKS, BORROWER, LENDER, FleetScene, look_until
from tests.faults.scene import EngineProcess, Skipped

LARGE_NBYTES = 256 << 10
SLOWER = 50
PROMPT_S = 0.8  # at least
DAY_S = 86_400
FAKETIME = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/local/lib/faketime/libfaketimeMT.so.1")


class Relayed(FleetScene):
    """A relay is between the two, which flips."""

    relayed = True
    network: Loopback


class ShiftedClock(FleetScene):
    """The lender's clocks are a day ahead: those that the machine lets us shift."""

    def make(self, host: int) -> HostDaemon:
        daemon = super().make(host)
        if host == LENDER:
            shift_monotonic, faketime = time_namespaces(), libfaketime()
            if not shift_monotonic and not faketime:
                raise Skipped("no clock can be shifted: as root, or apt-get install libfaketime")
            self.details["clocks"] = [
                *(["monotonic"] if shift_monotonic else []),
                *(["wall"] if faketime else []),
            ]
            if shift_monotonic:
                daemon.wrapped = ["unshare", "--time", f"--monotonic={DAY_S}", "--"]
            if faketime:
                daemon.environment |= {
                    "LD_PRELOAD": faketime,
                    "FAKETIME": "+1d",
                    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                }
        return daemon

    def __exit__(self, *_: object) -> None:
        pids = [daemon.pid for daemon in self.daemons[LENDER:] if daemon.alive]
        super().__exit__()
        for pid in pids:  # what libfaketime leaves of a process that is killed
            for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
                Path("/dev/shm", name).unlink(missing_ok=True)


@cache
def time_namespaces() -> bool:
    """Say whether a process may be started with a monotonic clock of its own."""
    if shutil.which("unshare") is None or os.geteuid():
        return False
    command = ["unshare", "--time", f"--monotonic={DAY_S}", "--", "cat"]
    done = subprocess.run(
        [*command, "/proc/self/timens_offsets"], capture_output=True, text=True, check=False
    )
    return f"{DAY_S}" in done.stdout


def libfaketime() -> str:
    """Return the library that shifts the wall clock of a process, "" if it is not installed."""
    for pattern in FAKETIME:
        for found in Path("/").glob(pattern.removeprefix("/")):
            return str(found)
    return ""


def clocks_a_day_apart(scene: ShiftedClock) -> None:
    """Hosts compare no clocks: both lend, borrow, delete and wait as ever."""
    shifted = scene.daemons[LENDER]
    if "monotonic" in scene.details["clocks"]:
        offsets = Path(f"/proc/{shifted.pid}/timens_offsets").read_text()
        scene.expect(f"{DAY_S}" in offsets, f"the clock is not another one: {offsets}")
    if "wall" in scene.details["clocks"]:
        tomorrow = time.strftime("%Y-%m-%d", time.gmtime(time.time() + DAY_S))
        scene.expect(tomorrow in shifted.output(), "its log is not of tomorrow")
    one, two = scene.engine(at=BORROWER), scene.engine(at=LENDER)
    for lender, borrower, prefix in ((two, one, "from tomorrow"), (one, two, "from today")):
        scene.lend(lender, prefix)
        scene.expect_borrowed(borrower, prefix, f"{prefix}: not borrowed")
        deleted = borrower.ask("delete", prefix=prefix, blocks=BLOCKS)
        scene.expect("error" not in deleted, f"{prefix}: not deleted: {deleted}")
        scene.resurrected += any(scene.borrow(each, prefix) for each in (lender, borrower))
    time.sleep(3.0)  # longer than a ping, and than a lease's margin
    scene.expect(scene.up(BORROWER) == scene.up(LENDER) == 1, "they do not know each other")
    scene.lend(two, "later")
    scene.expect_borrowed(one, "later", "not borrowed later")
    scene.expect_freed()


def link_fifty_times_slower(scene: FleetScene) -> None:
    """A load that would lose against computing is given up, and the next ones do not begin."""
    lender = scene.engine(at=LENDER, record_nbytes=LARGE_NBYTES)
    engine = scene.engine(record_nbytes=LARGE_NBYTES)
    names = [f"slow {number}" for number in range(4)]
    scene.lend(lender, *names)
    took_s: list[float] = []
    look_until(lambda: _timed(scene, engine, names[0], took_s) == 3, 60.0)
    fast_s = median(took_s)
    nbytes = scene.count("peer_bytes", "borrowed") // len(took_s)
    engine.ask("clear_here")
    bytes_per_s = int(nbytes / fast_s / SLOWER)
    prompt_s = max(PROMPT_S, 10 * fast_s)
    scene.details |= {"fast_s": round(fast_s, 4), "bytes_per_s": bytes_per_s}
    scene.details["fast_hit"] = scene.race(engine, names[1], prompt_s)
    scene.network.slow(LENDER, bytes_per_s)
    hits = [scene.race(engine, name, prompt_s) for name in names[2:]]
    slow: list[float] = []
    look_until(lambda: _timed(scene, engine, names[0], slow) == 1, 60.0)
    (slow_s,) = slow
    decisions = scene.stats()["totals"].get("load_decisions", {})
    scene.details |= {"hits": hits, "slow_s": round(slow_s, 3), "decisions": decisions}
    scene.expect(slow_s > SLOWER / 4 * fast_s, "the link was not slow")
    if SLOWER / 2 * fast_s > prompt_s:
        given_up = sum(decisions.get(word, 0) for word in ("cut", "refuse"))
        scene.expect(given_up, f"no load was given up: {decisions}")
    scene.network.heal()
    scene.expect_freed(15.0)


def _timed(scene: FleetScene, engine: EngineProcess, prefix: str, took_s: list[float]) -> int:
    """Load a prefix as an engine that can wait, and note how long that took if all of it came.
    Return how many are noted."""
    engine.ask("clear_here")
    loaded = engine.ask(
        "load", prefix=prefix, blocks=BLOCKS, wait_s=15.0, source=scene.node(LENDER)
    )
    scene.wrong += loaded.get("wrong", 0)
    if loaded.get("hit") == BLOCKS:
        took_s.append(loaded["took_s"])
    return len(took_s)


def link_that_flips_bits(scene: Relayed) -> None:
    """Anywhere in what the lender sends, greetings included: a miss each time, never a wrong
    record. A lender that goes on like this is not asked any more."""
    draw, rounds = random.Random(1), 9 if scene.quick else 40
    relay = scene.network.relays[BORROWER, LENDER]
    lender, engine = scene.engine(at=LENDER), scene.engine()
    names = [f"flipped {number}" for number in range(rounds)]
    scene.lend(lender, "whole", *names)
    scene.expect_borrowed(engine, "whole", "nothing was lent before")
    relay.flip = True
    hits: list[int] = []
    errors: set[str] = set()
    for number, name in enumerate(names):
        # First greetings, answers and heads of reads; then the records.
        relay.after = draw.randrange(1000) if number < rounds // 3 else draw.randrange(300_000)
        relay.end_soon()  # each of the new connections is harmed once
        with contextlib.suppress(TimeoutError):
            look_until(lambda: not scene.up(), 1.0)
        with contextlib.suppress(TimeoutError):
            look_until(lambda: scene.up() or scene.peer()["state"] == "quarantined", 3.0)
        hits.append(scene.borrow(engine, name))
        errors.add(scene.peer()["last_error"])
        if scene.peer()["state"] == "quarantined":
            break
    relay.flip = False
    peer, reads = scene.peer(), scene.stats()["totals"].get("peer_reads", {})
    scene.details |= {"hits": hits, "reads": reads, "state": peer["state"]}
    scene.details |= {"demerits": peer["demerits"], "errors": sorted(errors)[:8]}
    scene.expect(reads.get("peer_corrupt") and peer["demerits"], "no flip was seen")
    scene.expect_borrowed(lender, names[0], "the lender lost what it has")
    if not scene.quick:
        scene.expect(peer["state"] == "quarantined", f"it is still asked: {peer['state']}")
    scene.expect_freed()


def link_that_stalls(scene: Relayed) -> None:
    """Bytes stop in the middle of an answer: given up after two seconds of silence."""
    relay = scene.network.relays[BORROWER, LENDER]
    lender, engine = scene.engine(at=LENDER), scene.engine()
    scene.lend(lender, "stalled", "later")
    relay.after, relay.stall = 100_000, True
    source = scene.node(LENDER)
    loaded = engine.ask("load", prefix="stalled", blocks=BLOCKS, wait_s=8.0, source=source)
    scene.wrong += loaded.get("wrong", 0)
    scene.details["took_s"] = round(loaded["took_s"], 2)
    scene.expect(loaded["hit"] < BLOCKS, "nothing was stalled")
    scene.expect(loaded["took_s"] < 5.0, f"it waited for {loaded['took_s']:.1f} s")
    scene.expect(scene.count("peer_reads", "peer_slow"), "the silence was not counted")
    relay.stall = False
    scene.expect_borrowed(engine, "later", "not borrowed afterwards")
    scene.expect_freed()
