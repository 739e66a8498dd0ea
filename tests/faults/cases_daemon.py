"""Faults of the daemon: killed, stopped, restarted otherwise, or on a disk of another release."""

from __future__ import annotations

import hashlib
import random
import struct
import threading
import time
from pathlib import Path
from statistics import median

from kvstore import AsyncClient, Client, KVStoreError, Unavailable
from kvstore.format.frame.page import guard
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.faults.scene import EngineProcess, Scene

NAMESPACE = sample_namespace()
DEADLINE_S = 1.0  # of an engine's call, see engine.py
SLACK_S = 1.5


def daemon_killed_under_load(scene: Scene) -> None:
    """Engines compute on, reconnect, map the new arena and hit again; nothing wrong is served."""
    rounds = 1 if scene.quick else 4
    engines = [scene.engine() for _ in range(3)]
    seconds = 2.5 + 1.5 * rounds
    for number, engine in enumerate(engines):
        engine.tell("work", seconds=seconds, seed=number)
    for _ in range(rounds):
        time.sleep(1.0)
        scene.daemon.kill()
        time.sleep(0.3)
        scene.daemon.start()
    _collect(scene, engines, seconds)
    scene.expect(scene.details["recomputed"], "no engine noticed")
    scene.expect_freed()


def daemon_stopped(scene: Scene) -> None:
    """One call costs one deadline, then none costs anything; after SIGCONT all is as before."""
    stopped_s = 3.0 if scene.quick else 10.0
    engine = scene.engine()
    engine.ask("save", prefix="kept", blocks=8)
    scene.expect(engine.ask("call")["answered"], "a call before")
    with scene.frozen_daemon():
        began = time.monotonic()
        first = engine.ask("call")["seconds"]
        later = [engine.ask("call") for _ in range(50)]
        while time.monotonic() - began < stopped_s:
            later.append(engine.ask("call"))
            time.sleep(0.05)
    scene.details |= {
        "first_call_s": round(first, 3),
        "later_calls_s_max": max(call["seconds"] for call in later),
        "later_calls_s_median": median(call["seconds"] for call in later),
    }
    scene.expect(first < DEADLINE_S + SLACK_S, f"the first call took {first} s")
    scene.expect(not any(call["answered"] for call in later), "a stopped daemon answered")
    slow = [call for call in later if call["seconds"] > DEADLINE_S / 2]
    scene.expect(not slow, f"{len(slow)} more calls waited")
    began = time.monotonic()
    until(lambda: engine.ask("call")["answered"], 10.0)
    scene.details["recovered_after_s"] = round(time.monotonic() - began, 2)
    scene.expect(engine.ask("load", prefix="kept", blocks=8)["hit"] == 8, "a load afterwards")
    scene.expect_freed()


def calls_are_refused_in_microseconds(scene: Scene) -> None:
    """What a call costs while the breaker is open, in the client's own loop."""
    with Client(scene.daemon.target, timeout_s=0.3) as client:
        client.register(NAMESPACE)
        with scene.frozen_daemon():
            try:
                client.match(NAMESPACE.id, sample_keys("x", 1))
            except Unavailable:
                pass  # it cost the deadline

            async def refusals(remote: AsyncClient) -> list[float]:
                took_s = []
                for _ in range(300):
                    began = time.perf_counter()
                    try:
                        await remote.match(NAMESPACE.id, sample_keys("x", 1))
                    except Unavailable:
                        took_s.append(time.perf_counter() - began)
                return took_s

            took_s = client.submit(refusals).result(20)
        scene.details["median_us"] = round(median(took_s) * 1e6, 1)
        scene.expect(len(took_s) == 300, "a call was answered")
        scene.expect(median(took_s) < 1e-3, "refusals are slow")


def restarted_with_another_arena(scene: Scene) -> None:
    """Smaller or larger: what is on disk is served, what no longer fits is refused with words."""
    engine = scene.engine()
    engine.ask("save", prefix="kept", blocks=16, durable=True)
    wide = scene.engine(record_nbytes=8 << 20)
    wide.ask("save", prefix="wide", blocks=2, durable=True)
    for capacity, extent, fits in (("4MiB", "2MiB", False), ("128MiB", "64MiB", True)):
        scene.daemon.stop()
        scene.daemon.start(f"dram.capacity={capacity}", f"dram.extent={extent}")
        fresh = scene.engine()
        scene.expect(fresh.ask("load", prefix="kept", blocks=16)["hit"] == 16, "a load")
        scene.wrong += fresh.ask("load", prefix="kept", blocks=16)["wrong"]
        late = scene.engine(record_nbytes=8 << 20, join=False).ask("load", prefix="wide", blocks=2)
        if fits:
            scene.expect(late.get("hit") == 2, "a large record is back")
        else:
            scene.expect(late.get("error") == "InvalidRequest", "a record that does not fit")
            scene.expect("dram.extent" in late.get("message", ""), "the error says what to do")


def another_format_version(scene: Scene) -> None:
    """Refused with what to do, and not one byte of the directory changes."""
    scene.engine().ask("save", prefix="kept", blocks=16, durable=True)
    scene.daemon.stop()
    directory = scene.daemon.directory / "file"
    segment = next(directory.glob("*.segment"))
    whole = segment.read_bytes()
    page = bytearray(whole[:4088])
    struct.pack_into("<H", page, 8, 99)
    segment.write_bytes(guard(bytes(page), 0) + whole[4096:])
    before = _contents(directory)
    scene.daemon.start(wait=False)
    scene.expect(scene.daemon.wait() != 0, "the daemon started")
    scene.expect("format 99" in scene.daemon.output(), "the error names the version")
    scene.expect("Run the release that wrote it" in scene.daemon.output(), "and what to do")
    scene.expect(_contents(directory) == before, "the directory was changed")
    segment.write_bytes(whole)
    scene.daemon.start()
    hit = scene.engine().ask("load", prefix="kept", blocks=16)["hit"]
    scene.expect(hit == 16, "the old release serves it again")


def clients_reconnect_and_map_again(scene: Scene) -> None:
    """After a restart: the same client, its namespace registered, and extents of the new life."""
    engine = scene.engine()
    engine.ask("save", prefix="kept", blocks=8, durable=True)
    before, first = engine.ask("extents")["extents"], engine.ask("join")["instance"]
    lease = engine.ask("acquire", prefix="kept", blocks=8)["lease"]
    scene.daemon.kill()
    scene.daemon.start()
    until(lambda: engine.ask("call")["answered"], 10.0)
    until(lambda: len(engine.ask("extents")["extents"]) == len(before), 10.0)
    scene.expect(not set(engine.ask("extents")["extents"]) & set(before), "extents of a dead life")
    scene.expect(engine.ask("join")["instance"] not in ("", first), "another life")
    scene.expect(not engine.ask("release", lease=lease)["held"], "a lease of a dead life")
    scene.expect(engine.ask("load", prefix="kept", blocks=8)["hit"] == 8, "a load")
    scene.expect_freed()


def deleted_stays_deleted(scene: Scene) -> None:
    """Kill -9 between deletes that race write-behind and promotion: none that was answered is
    undone, by a restart or by a frame that was on its way."""
    draw, rounds = random.Random(1), 3 if scene.quick else 12
    gone: set[bytes] = set()
    for number in range(rounds):
        with Client(scene.daemon.target, timeout_s=5.0) as client:
            client.register(NAMESPACE)
            deleter = _Deleter(scene, client, number)
            deleter.start()
            deleter.began.wait(10.0)
            time.sleep(draw.uniform(0.05, 0.4))
            scene.daemon.kill()
            deleter.join(30.0)
            scene.hung += deleter.is_alive()
        gone |= deleter.gone
        scene.daemon.start(f"dram.capacity={draw.choice([2, 8, 64])}MiB", "dram.extent=2MiB")
        with Client(scene.daemon.target) as client:
            back = {bytes(item.key) for item in client.admin.scan()} & gone
        scene.expect(not back, f"{len(back)} deleted blocks came back")
    scene.details["deleted"] = len(gone)
    scene.expect(gone, "nothing was deleted")


class _Deleter(threading.Thread):
    """Puts, reads and deletes until the daemon is gone. `gone`: keys whose delete was answered."""

    def __init__(self, scene: Scene, client: Client, number: int) -> None:
        super().__init__(daemon=True)
        self.gone: set[bytes] = set()
        self.began = threading.Event()
        self._client = client
        self._number = number

    def run(self) -> None:
        step = 0
        try:
            while True:
                step += 1
                self._step(f"{self._number} {step}", step)
                self.began.set()
        except KVStoreError:
            return

    def _step(self, name: str, step: int) -> None:
        keys = sample_keys(name, 12)
        self._client.put(NAMESPACE.id, keys, sample_records(keys), durable=step % 3 == 0)
        if step > 2:  # of what may have left the arena: it is being promoted while it is deleted
            old = sample_keys(f"{self._number} {step - 2}", 12)
            read = self._client.submit(lambda remote: remote.get(NAMESPACE.id, old, wait_s=1.0))
            self._client.admin.delete(NAMESPACE.id, old[6:])
            self.gone.update(old[6:])
            read.result(10)
        self._client.admin.delete(NAMESPACE.id, keys[:2])  # of what is being written behind
        self.gone.update(keys[:2])
        if step % 9 == 0:
            self._client.admin.clear(NAMESPACE.id)
            for earlier in range(1, step + 1):
                self.gone.update(sample_keys(f"{self._number} {earlier}", 12))


def _collect(scene: Scene, engines: list[EngineProcess], seconds: float) -> None:
    """Add up what engines that worked report."""
    total = dict.fromkeys(("steps", "hits", "wrong", "recomputed"), 0)
    for engine in engines:
        answer = engine.answer(seconds + 20.0)
        for name in total:
            total[name] += answer[name]
    scene.wrong += total["wrong"]
    scene.expect(total["hits"], "nothing was ever hit")
    scene.details |= total


def _contents(directory: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.iterdir())
    }
