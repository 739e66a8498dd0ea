"""Faults of a lender: killed, stopped, full, draining, of another fleet, or there twice."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstore.testing.wait import until
from tests.cluster.namespaces import HostDaemon
from tests.faults.fleet import (
    BLOCKS,
    BORROWER,
    LENDER,
    THIRD,
    FleetScene,
    look_until,
)

PROMPT_S = 0.8  # to compute what a load asks for
LARGE_NBYTES = 256 << 10  # of a record, where a load has to take a while
LARGEST_NBYTES = 1 << 20
UNDER_WAY_BYTES_PER_S = 2 << 20  # so that it takes two seconds
STRIKE_S = 0.4


class ThreeHosts(FleetScene):
    """The third one is not started: a case may."""

    hosts = 3
    strangers = (THIRD,)


class OtherFleet(ThreeHosts):
    """The third one is of another fleet."""

    def make(self, host: int) -> HostDaemon:
        daemon = super().make(host)
        if host == THIRD:
            daemon.add("cluster.fleet=another")
        return daemon


def peers_killed_under_load(scene: FleetScene) -> None:
    """Lender and borrower in turn, while engines of both read and write: misses, nothing else."""
    rounds = 2 if scene.quick else 6
    engines = [scene.engine(at=BORROWER), scene.engine(at=LENDER)]
    seconds = 4.0 * rounds
    for number, engine in enumerate(engines):
        engine.tell("work", seconds=seconds, seed=number)
    borrowed = down = 0
    for number in range(rounds):
        victim, other = (LENDER, BORROWER) if number % 2 == 0 else (BORROWER, LENDER)
        time.sleep(0.5)
        borrowed += scene.stats(victim)["totals"]["hit_blocks"].get("peer", 0)
        scene.daemons[victim].kill()
        with contextlib.suppress(TimeoutError):
            look_until(lambda o=other, v=victim: scene.peer(v, o)["state"] == "down", 10.0)
            down += 1
        scene.daemons[victim].start()
    total = dict.fromkeys(("steps", "hits", "wrong", "recomputed"), 0)
    for engine in engines:
        answer = engine.answer(seconds + 60.0)
        for name in total:
            total[name] += answer[name]
    borrowed += sum(scene.stats(at)["totals"]["hit_blocks"].get("peer", 0) for at in range(2))
    scene.wrong += total["wrong"]
    scene.details |= {**total, "borrowed_blocks": int(borrowed), "seen_down": down}
    scene.expect(total["hits"] and borrowed, "nothing was ever borrowed")
    scene.expect(down == rounds, f"{rounds - down} deaths were not seen")
    scene.meet([BORROWER, LENDER])
    scene.expect_freed()


def lender_stopped(scene: FleetScene) -> None:
    """One prompt waits a little, later ones do not; after SIGCONT all is lent as before."""
    _away(scene, lambda: scene.frozen_daemon(LENDER))


def partitioned_both_ways(scene: FleetScene) -> None:
    """Each side serves what it has, and each calls the other down; whole again when it heals."""
    _away(scene, lambda: _parted(scene, lambda: scene.network.cut(LENDER)), both_see=True)


def partitioned_from_the_lender(scene: FleetScene) -> None:
    """What the lender sends does not arrive."""
    _away(
        scene, lambda: _parted(scene, lambda: scene.network.drop(LENDER, BORROWER)), both_see=True
    )


def partitioned_towards_the_lender(scene: FleetScene) -> None:
    """What the borrower sends does not arrive."""
    _away(
        scene, lambda: _parted(scene, lambda: scene.network.drop(BORROWER, LENDER)), both_see=True
    )


def lender_killed_while_it_lends(scene: FleetScene) -> None:
    """In the middle of a read: what has come counts, the rest is computed."""
    _struck(scene, scene.daemons[LENDER].kill)
    scene.expect_freed()
    scene.daemons[LENDER].start()
    scene.meet([BORROWER, LENDER])


def lender_stopped_while_it_lends(scene: FleetScene) -> None:
    """The same, and it goes on after a while: what it sends then goes nowhere."""
    with contextlib.ExitStack() as stack:
        _struck(scene, lambda: stack.enter_context(scene.frozen_daemon(LENDER)))
    scene.meet([BORROWER, LENDER])
    scene.expect_freed()


def borrower_stopped_while_it_reads(scene: FleetScene) -> None:
    """It holds nothing of the lender for longer than two seconds of silence, and is counted."""
    large: dict[str, Any] = {"record_nbytes": LARGEST_NBYTES, "kind": "fixed"}
    lender, engine = scene.engine(at=LENDER, **large), scene.engine(**large)
    scene.lend(lender, "under way")
    scene.network.slow(LENDER, BLOCKS * LARGEST_NBYTES // 4)
    source = scene.node(LENDER)
    engine.tell("load", prefix="under way", blocks=BLOCKS, wait_s=8.0, source=source)
    time.sleep(STRIKE_S)
    scene.expect(scene.held(LENDER)["leases"], "no read was under way")
    with scene.frozen_daemon(BORROWER):
        seen_s = look_until(lambda: not scene.held(LENDER)["leases"], 20.0)
        scene.details["freed_by_the_lender_after_s"] = round(seen_s, 2)
        look_until(lambda: scene.count("peer_refused", "peer_slow", at=LENDER), 10.0)
        own = lender.ask("load", prefix="under way", blocks=BLOCKS)
        scene.expect(own.get("hit") == BLOCKS, "the lender's own engine is not served")
    scene.wrong += engine.answer().get("wrong", 0)
    scene.network.heal()
    scene.meet([BORROWER, LENDER])
    scene.expect_borrowed(engine, "under way", "not borrowed afterwards")
    scene.expect_freed()


def lender_drains(scene: FleetScene) -> None:
    """SIGTERM in the middle of a read: that one ends well, no other one begins."""
    lender = scene.engine(at=LENDER, record_nbytes=LARGE_NBYTES)
    scene.lend(lender, "under way", "later")
    engine = scene.engine(record_nbytes=LARGE_NBYTES)
    scene.network.slow(LENDER, UNDER_WAY_BYTES_PER_S)
    source = scene.node(LENDER)
    engine.tell("load", prefix="under way", blocks=BLOCKS, wait_s=15.0, source=source)
    time.sleep(STRIKE_S)
    codes: list[int] = []
    stopping = threading.Thread(target=lambda: codes.append(scene.daemons[LENDER].stop()))
    stopping.start()
    loaded = engine.answer()
    scene.wrong += loaded.get("wrong", 0)
    scene.expect(loaded.get("hit") == BLOCKS, f"a read under way was cut: {loaded}")
    scene.expect(scene.borrow(engine, "later") == 0, "it lent while it drained")
    stopping.join(30.0)
    scene.expect(codes == [0], f"it ended with {codes}")
    scene.expect(scene.peer()["state"] != "up", "nobody noticed")
    scene.expect_freed()
    scene.network.heal()
    scene.daemons[LENDER].start()
    scene.meet([BORROWER, LENDER])


def full_arena_at_the_borrower(scene: FleetScene) -> None:
    """Every slot is held by engines: nothing is borrowed, soon; all of it when there is room."""
    lender = scene.engine(at=LENDER, record_nbytes=LARGE_NBYTES)
    scene.lend(lender, "wanted")
    engine, holder = (scene.engine(record_nbytes=LARGE_NBYTES) for _ in range(2))
    held = []
    for number in range(200):
        reserved = holder.ask("reserve", prefix=f"held {number}", blocks=1)
        held.append(reserved["lease"])
        if not reserved["slots"]:
            break
    scene.details["held_records"] = len(held)
    began = time.monotonic()
    loaded = engine.ask("load", prefix="wanted", blocks=BLOCKS, source=scene.node(LENDER))
    took_s = time.monotonic() - began
    scene.expect(loaded.get("hit", 0) < BLOCKS, f"there was room: {loaded}")
    scene.expect(took_s < 5.0, f"it took {took_s:.1f} s")
    scene.wrong += loaded.get("wrong", 0)
    refused = scene.stats()["totals"].get("refused_parts", {})
    scene.details["refused"] = refused
    scene.expect(refused, "no refusal was counted")
    for lease in held:
        holder.ask("release", lease=lease)
    scene.expect_freed()
    scene.expect_borrowed(engine, "wanted", "not borrowed when there was room")


def another_fleet(scene: OtherFleet) -> None:
    """A daemon of another fleet, listed by mistake, is neither asked nor answered."""
    scene.daemons[THIRD].start()
    stranger = scene.engine(at=THIRD)
    scene.lend(stranger, "of the others")
    look_until(lambda: scene.count("peer_refused", "fleet", at=BORROWER), 20.0)
    look_until(lambda: scene.count("peer_refused", "fleet", at=THIRD), 20.0)
    engine, lender = scene.engine(), scene.engine(at=LENDER)
    source = scene.node(THIRD)
    scene.expect(scene.borrow(engine, "of the others", source=source) == 0, "it was borrowed from")
    scene.lend(lender, "of ours")
    scene.expect(
        scene.borrow(stranger, "of ours", source=scene.node(LENDER)) == 0, "it was lent to"
    )
    scene.expect_borrowed(engine, "of ours", "our own fleet does not work")
    scene.expect(not scene.peer(THIRD), "it is called a member")
    scene.expect_freed()


def two_daemons_with_one_id(scene: ThreeHosts) -> None:
    """A copied directory is refused while its owner answers. When both run, since the owner was
    stopped meanwhile, one of them is asked, and status says so."""
    copied = scene.daemons[THIRD]
    (copied.directory / "file").mkdir(exist_ok=True)
    (copied.directory / "file" / "node_id").write_text(scene.node(LENDER))
    copied.start(wait=False)
    scene.expect(copied.wait() != 0, "a second daemon with the id has started")
    scene.expect("has the node id" in copied.output(), "its log does not say why")
    lender, engine = scene.engine(at=LENDER), scene.engine()
    scene.lend(lender, *(f"one {number}" for number in range(4)))
    with scene.frozen_daemon(LENDER):
        copied.start()
        scene.lend(scene.engine(at=THIRD), *(f"other {number}" for number in range(4)))
    seen = look_until(lambda: scene.stats()["fleet"]["membership"]["error"], 40.0)
    scene.details["seen_after_s"] = round(seen, 1)
    hits = [scene.borrow(engine, f"{who} {n}") for who in ("one", "other") for n in range(4)]
    scene.details["hits"] = hits
    scene.expect(set(hits) <= {0, BLOCKS}, f"hits of {hits}")
    copied.kill()
    look_until(lambda: not scene.stats()["fleet"]["membership"]["error"], 40.0)
    look_until(lambda: scene.borrow(engine, "one 3") == BLOCKS, 40.0)
    scene.expect_freed()


# ---- the parts of these --------------------------------------------------------------------------


@contextlib.contextmanager
def _parted(scene: FleetScene, part: Callable[[], None]):  # type: ignore[no-untyped-def]
    part()
    try:
        yield
    finally:
        scene.network.heal()


def _away(
    scene: FleetScene,
    away: Callable[[], contextlib.AbstractContextManager[None]],
    *,
    both_see: bool = False,
) -> None:
    """Ask while the lender is out of reach. both_see: it runs, and calls the borrower down too."""
    engine, lender = scene.engine(), scene.engine(at=LENDER)
    scene.lend(lender, *(f"lent {number}" for number in range(8)))
    scene.lend(engine, "own")
    scene.expect_borrowed(engine, "lent 0", "nothing was lent before")
    with away():
        first = scene.race(engine, "lent 1", PROMPT_S)
        scene.expect(first == 0, "it was lent by who is away")
        took = look_until(lambda: scene.peer()["state"] == "down", 20.0)
        scene.details["seen_after_s"] = round(took, 2)
        scene.expect(scene.peer()["breaker"] != "closed", "the breaker did not open")
        for number in range(2, 6):
            scene.race(engine, f"lent {number}", PROMPT_S)
        later = engine.ask("load", prefix="lent 6", blocks=BLOCKS, wait_s=5.0)
        scene.details["later_s"] = round(later["took_s"], 4)
        scene.expect(later["took_s"] < 1.5, f"a later request took {later['took_s']:.1f} s")
        scene.expect_borrowed(engine, "own", "its own blocks are not served")
        if both_see:
            look_until(lambda: scene.peer(BORROWER, LENDER)["state"] == "down", 20.0)
            scene.expect_borrowed(lender, "lent 0", "the other side is not served")
    scene.details["whole_after_s"] = round(look_until(lambda: scene.up() == 1, 30.0), 2)
    scene.expect_borrowed(engine, "lent 7", "nothing was lent afterwards")
    scene.expect_freed()


def _struck(scene: FleetScene, strike: Callable[[], object]) -> None:
    """Harm the lender in the middle of a read that takes four seconds."""
    large: dict[str, Any] = {
        "record_nbytes": LARGEST_NBYTES,
        "kind": "fixed",
    }  # more than the kernel buffers
    lender, engine = scene.engine(at=LENDER, **large), scene.engine(**large)
    scene.lend(lender, "under way")
    scene.network.slow(LENDER, BLOCKS * LARGEST_NBYTES // 4)
    began = time.monotonic()
    source = scene.node(LENDER)
    engine.tell("load", prefix="under way", blocks=BLOCKS, wait_s=8.0, source=source)
    time.sleep(STRIKE_S)
    strike()
    loaded = engine.answer()
    took_s = time.monotonic() - began
    scene.network.heal()
    scene.wrong += loaded.get("wrong", 0)
    scene.details |= {"hit": loaded.get("hit"), "took_s": round(took_s, 2)}
    scene.expect(took_s < 8.0, f"the read took {took_s:.1f} s")
    scene.expect(loaded.get("hit", BLOCKS) < BLOCKS, f"it was over before: {loaded}")
    until(lambda: scene.count("peer_reads", "peer_gone", "peer_slow"), 5.0)
