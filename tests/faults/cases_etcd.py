"""Faults of the engine that knows the members: it stops, dies, comes back empty, loses its leader.
Daemons go on with the members they know, and with what these lend."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstore import KVStoreError
from kvstore.testing.daemon import Daemon
from kvstore.testing.etcd import INSTALL, Etcd, has_etcd
from kvstore.testing.ports import free_ports
from tests.faults.fleet import BLOCKS, BORROWER, LENDER, THIRD, FleetScene, look_until
from tests.faults.scene import Skipped

AWAY_S, QUICK_AWAY_S = 60.0, 6.0
TTL_S, QUICK_TTL_S = 10, 2
PREFIXES = 4
WHOLE_AGAIN_S_MAX = 15.0
DOUBLE = 3
KEYS = "/kvstore/v1/default/nodes/"


class EtcdScene(FleetScene):
    """Three daemons and an etcd, all on loopback."""

    hosts = 3
    etcds = 1

    def open(self) -> None:
        if not has_etcd():
            raise Skipped(INSTALL)
        self.etcd = Etcd(self.etcds)
        self.stack.enter_context(self.etcd)
        self.etcd.start()
        leader = self.etcd.leader() if self.etcds > 1 else 0
        endpoints = list(self.etcd.endpoints)
        endpoints.insert(0, endpoints.pop(leader))
        self.leader = leader
        self.away_s = QUICK_AWAY_S if self.quick else AWAY_S
        ttl_s = QUICK_TTL_S if self.quick else TTL_S
        self.common = (
            "cluster.membership=etcd",
            f"cluster.etcd={json.dumps(endpoints)}",
            f"cluster.etcd_ttl_s={ttl_s}",
        )
        for port in free_ports(self.hosts):
            self.daemons.append(Daemon(*self.settings(port), *self.overrides))
        for daemon in self.daemons:
            daemon.start()
        self.meet(range(self.hosts))

    def settings(self, port: int) -> tuple[str, ...]:
        return (*self.common, f"cluster.listen=127.0.0.1:{port}")

    def membership(self, at: int) -> dict[str, Any]:
        found: dict[str, Any] = self.stats(at)["fleet"]["membership"]
        return found

    def seen_away(self) -> bool:
        return all(self.membership(at)["away_s"] is not None for at in range(self.hosts))

    def whole(self) -> bool:
        """Say whether etcd knows all daemons, and they know each other by its word."""
        for at in range(self.hosts):
            found = self.membership(at)
            if found["away_s"] is not None or found["held"] or not found["registered"]:
                return False
            if found["members"] != self.hosts - 1:
                return False
        nodes = {KEYS + self.node(at) for at in range(self.hosts)}
        return set(self.etcd.values(KEYS)) == nodes


class ThreeEtcds(EtcdScene):
    etcds = 3


def etcd_stopped(scene: EtcdScene) -> None:
    """SIGSTOP: connections stay open and nobody answers. No hit and no member is lost."""
    _away(scene, scene.etcd.pause, scene.etcd.resume)


def etcd_killed(scene: EtcdScene) -> None:
    """SIGKILL, and it comes back with its data. No hit and no member is lost."""
    _away(scene, scene.etcd.kill, scene.etcd.start)


def etcd_emptied(scene: EtcdScene) -> None:
    """SIGKILL, and it comes back without its data: an empty list is not a fleet that died."""

    def back() -> None:
        scene.etcd.empty()
        scene.etcd.start(wait=False)

    whole_s = _away(scene, scene.etcd.kill, back)
    scene.details["whole_again_s"] = whole_s
    scene.expect(whole_s <= WHOLE_AGAIN_S_MAX, f"whole again after {whole_s:.1f} s")


def etcd_leader_stopped(scene: ThreeEtcds) -> None:
    """Of three: the others elect, and daemons go on with one of them."""
    stopped = scene.etcd.endpoints[scene.leader]
    asked = {scene.membership(at)["endpoint"] for at in range(scene.hosts)}
    scene.expect(asked == {stopped}, "the leader was not asked first")

    def others_asked() -> bool:
        found = [scene.membership(at) for at in range(scene.hosts)]
        return all(each["endpoint"] != stopped and each["away_s"] is None for each in found)

    _away(
        scene,
        lambda: scene.etcd.pause(scene.leader),
        lambda: scene.etcd.resume(scene.leader),
        seen=others_asked,
    )


def two_daemons_with_one_id_by_etcd(scene: EtcdScene) -> None:
    """The second one is refused. One that starts while etcd is stopped is not registered when it
    comes back, says so, and harms nobody."""
    (port,) = free_ports(1)
    double = Daemon(*scene.settings(port), *scene.overrides)
    scene.daemons.append(double)
    (double.directory / "file").mkdir()
    (double.directory / "file" / "node_id").write_text(scene.node(LENDER))
    double.start(wait=False)
    scene.expect(double.wait() != 0, "a second daemon with the id has started")
    scene.expect("has the node id" in double.output(), "its log does not say why")
    lender, engine = scene.engine(at=LENDER), scene.engine()
    scene.lend(lender, "before", "after")
    scene.expect_borrowed(engine, "before", "nothing was lent before")
    scene.etcd.pause()
    double.start()
    scene.etcd.resume()
    seen_s = look_until(lambda: "has the node id" in scene.membership(DOUBLE)["error"], 40.0)
    scene.details["seen_after_s"] = round(seen_s, 1)
    scene.expect(not scene.membership(DOUBLE)["registered"], "it is registered")
    scene.lend(scene.engine(at=DOUBLE), "of the second")
    look_until(scene.whole, 40.0)
    time.sleep(3.0)  # longer than a ping
    scene.expect(scene.up() == scene.up(LENDER) == scene.hosts - 1, "links were lost")
    scene.expect_borrowed(engine, "after", "the first one is not asked any more")
    scene.expect(scene.borrow(engine, "of the second") == 0, "the second one was asked")
    scene.expect_freed()


def _away(
    scene: EtcdScene,
    away: Callable[[], object],
    back: Callable[[], object],
    *,
    seen: Callable[[], bool] | None = None,
) -> float:
    """Let two daemons borrow from the third one while etcd is away; return the seconds until all is
    whole after its return."""
    lender = scene.engine(at=LENDER)
    names = [f"lent {number}" for number in range(PREFIXES)]
    scene.lend(lender, *names)
    engines = [scene.engine(at=at) for at in (BORROWER, THIRD)]
    watch = _Watch(scene)
    for engine in engines:
        # A daemon lends nothing before it knows what was deleted while it was away.
        look_until(lambda: scene.borrow(engine, names[0]) == BLOCKS, 20.0)  # noqa: B023
    for engine in engines:
        engine.tell("borrow_on", prefixes=names, blocks=BLOCKS, source=scene.node(LENDER))
    watch.start()
    began = time.monotonic()
    away()
    scene.details["seen_after_s"] = round(look_until(seen or scene.seen_away, 40.0), 2)
    time.sleep(max(0.0, scene.away_s - (time.monotonic() - began)))
    back()
    whole_s = round(look_until(scene.whole, 60.0), 2)
    time.sleep(2.0)  # what the return of etcd could still harm
    totals = {"loads": 0, "hits_lost": 0}
    for engine in engines:
        engine.tell("stop_borrowing")
        answer = engine.answer()
        scene.wrong += answer["wrong"]
        for name in totals:
            totals[name] += answer[name]
    watch.end()
    scene.details |= {**totals, "members_lost": watch.lost, "looks": watch.looks}
    scene.details["away_s"] = round(time.monotonic() - began, 1)
    scene.expect(totals["loads"] > 10 and watch.looks > 10, "there was no load")
    scene.expect(not totals["hits_lost"] and not watch.lost, "hits or members were lost meanwhile")
    scene.expect_freed()
    return whole_s


class _Watch(threading.Thread):
    """Looks at every daemon's members again and again. lost: the most that one lacked, once."""

    def __init__(self, scene: EtcdScene) -> None:
        super().__init__(daemon=True)
        self.lost = self.looks = 0
        self._scene = scene
        self._over = threading.Event()

    def run(self) -> None:
        others = self._scene.hosts - 1
        while not self._over.wait(0.1):
            for at in range(self._scene.hosts):
                try:
                    known = len(self._scene.peers(at))
                except KVStoreError:  # a daemon that does not answer is another case's
                    continue
                self.looks += 1
                self.lost = max(self.lost, others - known)

    def end(self) -> None:
        self._over.set()
        self.join(20.0)
