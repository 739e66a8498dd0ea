"""Faults of what peers say: everything that the protocol forbids, and all that it does not."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from kvstore import Client
from kvstore.peer.wire import Kind
from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_ports
from kvstore.testing.samples import RECORD_NBYTES
from tests.cluster.fleet import member_settings
from tests.faults.fleet import BLOCKS, SLACK_S, FleetScene, look_until
from tests.faults.liars import LIES, Drip, OtherFleet, OtherProtocol
from tests.faults.records import Records
from tests.faults.scene import EngineProcess
from tests.faults.scripted import Peer, serving

WAIT_S = 3.0  # of a load
READ_S = 10.0  # after which a read that never ends is ended
HELLOS_MAX = 60  # from a daemon to a peer that ends each link, in as long as this takes
QUICK = (
    "Peer",
    "WrongChecksums",
    "FewerBytes",
    "NotHeld",
    "MatchOfMore",
    "TicketGarbage",
    "NamespaceNeverKnown",
)


class LiarsScene(FleetScene):
    """One real daemon, and scripted peers in its list."""

    def open(self) -> None:
        names = QUICK if self.quick else tuple(each.__name__ for each in LIES)
        self.liars = [
            each(Records(self.kind, RECORD_NBYTES, secrets.token_hex(4)))
            for each in LIES
            if each.__name__ in names
        ]
        self.stack.enter_context(serving(self.liars))
        (port,) = free_ports(1)
        settings = member_settings(port, [each.port for each in self.liars])
        self.daemons.append(Daemon(*settings, *self.overrides))
        self.daemon.start()


def lying_peers(scene: LiarsScene) -> None:
    """Wrong, too much, too little, out of order, too early, never: misses, soon, and all of it is
    seen. Neither the engine nor the daemon takes harm."""
    engine = scene.engine()
    strangers = sum(isinstance(each, OtherProtocol | OtherFleet) for each in scene.liars)
    members = len(scene.liars) - strangers
    look_until(lambda: len(scene.peers()) == members, 30.0)
    look_until(lambda: scene.up() >= members - 4, 30.0)
    for each in scene.liars:
        _ask(scene, engine, each)
    scene.expect_freed(READ_S + 5.0)
    hellos = {each.name: each.asked[Kind.HELLO] for each in scene.liars}
    scene.details["hellos"] = max(hellos.values())
    scene.expect(max(hellos.values()) <= HELLOS_MAX, f"links were made without end: {hellos}")
    heads = {each.name: each.asked[Kind.HEADS] for each in scene.liars}
    scene.expect(max(heads.values()) <= HELLOS_MAX, f"heads were asked for without end: {heads}")
    log = scene.daemon.output()
    for kind, words in ((OtherProtocol, "speaks versions 7 to 9"), (OtherFleet, "another fleet")):
        if any(isinstance(each, kind) for each in scene.liars):
            scene.expect(words in log, f"the log does not say {words!r}")
    for word in ("Traceback", "never retrieved"):
        scene.expect(word not in log, f"{word} in the log: {log[log.find(word) - 500 :][:1500]}")


def _ask(scene: LiarsScene, engine: EngineProcess, liar: Peer) -> None:
    """Ask for a prefix that a liar says it has."""
    before = _evidence(scene, liar)
    request = f"asked-{liar.name}"
    loaded = engine.ask(
        "load",
        prefix=liar.name,
        blocks=BLOCKS,
        wait_s=WAIT_S,
        source=liar.node,
        request_id=request,
    )
    scene.expect("error" not in loaded, f"{liar.name}: {loaded}")
    scene.wrong += loaded.get("wrong", 0)
    hit, took_s = loaded.get("hit", 0), loaded.get("took_s", 0.0)
    scene.expect(took_s < WAIT_S + SLACK_S, f"{liar.name} cost {took_s:.1f} s")
    scene.expect(hit in ((BLOCKS, 0) if liar.full else (0,)), f"{liar.name}: a hit of {hit}")
    if type(liar) is Peer:
        scene.expect_borrowed(engine, liar.name, "an honest peer was not borrowed from")

    def seen() -> str:
        after = _evidence(scene, liar)
        changed = {word for word, number in after.items() if number != before.get(word)}
        with Client(scene.daemon.target, arena=False) as client:
            for outcome in client.admin.outcomes(request):
                if outcome.ending is not None:
                    changed.add(str(outcome.ending.reason))
        return " ".join(sorted(changed))

    try:
        wait_s = READ_S + 2.0 if isinstance(liar, Drip) else 5.0
        look_until(lambda: re.search(rf"\b({liar.seen})\b", seen()), wait_s)
    except TimeoutError:
        scene.expect(False, f"{liar.name} was not seen: {seen()!r}")
    scene.details.setdefault("lies", {})[liar.name] = f"{took_s:.2f} s, hit {hit}: {seen()}"


def _evidence(scene: LiarsScene, liar: Peer) -> dict[str, Any]:
    """Return what the daemon has counted, by word, and how it calls the liar."""
    stats = scene.stats()
    totals = stats["totals"]
    words: dict[str, Any] = dict(totals.get("peer_reads", {}))
    for outcome, each in totals.get("peer_match_seconds", {}).items():
        words[outcome] = json.dumps([words.get(outcome), each])
    for word, number in totals.get("peer_refused", {}).items():
        words[word] = json.dumps([words.get(word), number])
    for member in stats["fleet"]["members"]:
        if member["node"] == liar.node and member["state"] != "up":
            words[member["state"]] = object()  # now, whenever it became so
    return words
