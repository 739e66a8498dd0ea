"""Races between daemons: deletes against fetches, fetches against evictions."""

from __future__ import annotations

import random
import time

from tests.cluster.namespaces import HostDaemon
from tests.faults.fleet import BLOCKS, BORROWER, LENDER, FleetScene
from tests.faults.scene import EngineProcess

SLOW_BYTES_PER_S = 1 << 20  # so that a fetch takes a third of a second
FORBIDDEN_S = 16.0  # for which a daemon takes nothing of a deleted block from others
LARGE_NBYTES = 256 << 10
SMALL_ARENA = ("dram.capacity=16MiB", "dram.extent=8MiB")


class DramOnly(FleetScene):
    """Daemons without files: what is evicted is gone."""

    def make(self, host: int) -> HostDaemon:
        daemon = super().make(host)
        daemon.add("file.path=", f"cluster.state={daemon.directory / 'file'}")
        return daemon


def delete_races_fetch(scene: FleetScene) -> None:
    """A delete that was answered holds at both ends, whatever was under way: at once, when nobody
    remembers the delete any more, and after a kill."""
    draw, rounds = random.Random(1), 8 if scene.quick else 60
    lender, reader = scene.engine(at=LENDER), scene.engine(at=BORROWER)
    deleters = [scene.engine(at=LENDER), scene.engine(at=BORROWER)]
    names = [f"race {number}" for number in range(rounds)]
    served = []
    for number, name in enumerate(names):
        slow = number % 4 >= 2
        if slow:
            scene.network.slow(LENDER, SLOW_BYTES_PER_S)
        scene.lend(lender, name)
        reader.tell("load", prefix=name, blocks=BLOCKS, wait_s=3.0)
        time.sleep(draw.uniform(0.0, 0.4 if slow else 0.02))
        deleted = deleters[number % 2].ask("delete", prefix=name, blocks=BLOCKS // 2)
        scene.expect("error" not in deleted, f"a delete was refused: {deleted}")
        loaded = reader.answer()
        scene.wrong += loaded.get("wrong", 0)
        served.append(loaded.get("hit", 0))
        _stays_deleted(scene, [reader, lender], [name])
        if slow:
            scene.network.heal()
    scene.details |= {"rounds": rounds, "served_first": sum(hit > 0 for hit in served)}
    scene.expect(any(served), "every delete came before its fetch")
    scene.expect(not all(served), "every delete came after its fetch")
    if not scene.quick:
        time.sleep(FORBIDDEN_S)
        scene.daemons[LENDER].kill()
        scene.daemons[LENDER].start()
        scene.meet([BORROWER, LENDER])
    _stays_deleted(scene, [reader, scene.engine(at=LENDER)], names)
    scene.expect_freed()


def delete_while_a_daemon_is_dead(scene: FleetScene) -> None:
    """It is refused, and names who did not confirm; once it has, the blocks stay away."""
    lender, reader = scene.engine(at=LENDER), scene.engine()
    saved = lender.ask("save", prefix="deleted", blocks=BLOCKS, durable=True)
    scene.expect(saved.get("durable"), f"not durable: {saved}")
    scene.expect_borrowed(reader, "deleted", "not borrowed")
    node = scene.node(LENDER)
    scene.daemons[LENDER].kill()
    refused = reader.ask("delete", prefix="deleted", blocks=BLOCKS)
    scene.expect(refused.get("error") == "Unavailable", f"a delete was answered: {refused}")
    scene.expect(node[:8] in refused.get("message", ""), f"it does not say where: {refused}")
    scene.resurrected += scene.borrow(reader, "deleted") > 0  # at this daemon it holds
    scene.daemons[LENDER].start()
    scene.meet([BORROWER, LENDER])
    again = reader.ask("delete", prefix="deleted", blocks=BLOCKS)
    scene.expect("error" not in again, f"a delete was refused: {again}")
    for _ in range(2):
        _stays_deleted(scene, [reader, scene.engine(at=LENDER)], ["deleted"])
        scene.daemons[LENDER].kill()
        scene.daemons[LENDER].start()
        scene.meet([BORROWER, LENDER])
    scene.expect_freed()


def fetch_races_eviction(scene: DramOnly) -> None:
    """Both arenas are full and without files: what is lent is evicted while it is read."""
    seconds = 4.0 if scene.quick else 20.0
    engines = [
        scene.engine(at=LENDER, record_nbytes=LARGE_NBYTES),
        scene.engine(at=LENDER, record_nbytes=LARGE_NBYTES),
        scene.engine(at=BORROWER, record_nbytes=LARGE_NBYTES),
        scene.engine(at=BORROWER, record_nbytes=LARGE_NBYTES),
    ]
    for number, engine in enumerate(engines):
        engine.tell("work", seconds=seconds, seed=number, saves=0.7 if number < 2 else 0.1)
    total = dict.fromkeys(("steps", "hits", "wrong", "recomputed"), 0)
    for engine in engines:
        answer = engine.answer(seconds + 30.0)
        for name in total:
            total[name] += answer[name]
    scene.wrong += total["wrong"]
    evicted = [scene.stats(at)["dram"]["evicted_blocks"] for at in (BORROWER, LENDER)]
    reads = scene.stats()["totals"].get("peer_reads", {})
    scene.details |= {**total, "evicted": evicted, "reads": reads}
    scene.expect(all(evicted), "nothing was evicted")
    scene.expect(reads.get("read"), "nothing was borrowed")
    scene.expect_freed()


def _stays_deleted(scene: FleetScene, engines: list[EngineProcess], prefixes: list[str]) -> None:
    """Count what of deleted prefixes comes back at any of some engines' daemons."""
    for engine in engines:
        for prefix in prefixes:
            hit = scene.borrow(engine, prefix)
            if hit:
                scene.resurrected += 1
                scene.details.setdefault("resurrected", []).append(f"{prefix}: {hit}")
