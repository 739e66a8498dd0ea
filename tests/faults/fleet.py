"""A fault case's world of several daemons that share what they hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from kvstore.testing.wait import until
from tests.cluster.namespaces import HostDaemon, Network, network, static_settings
from tests.faults.scene import EngineProcess, Scene

BORROWER, LENDER, THIRD = 0, 1, 2
BLOCKS = 16
MEET_S = 30.0
WORST = 2.0  # of what computing takes; these machines stand still now and then
SLACK_S = 1.5


def look_until(true: Any, timeout_s: float) -> float:
    """Wait for what takes a call to see. Raises TimeoutError."""

    def is_true() -> object:
        time.sleep(0.05)
        return true()

    return until(is_true, timeout_s)


class FleetScene(Scene):
    """Daemons on hosts of their own: engines ask the first one, and the second one lends.

    hosts: how many. relayed: a relay is between any two. All meet before the case begins, but for
    those of `strangers`.
    """

    hosts: ClassVar[int] = 2
    relayed: ClassVar[bool] = False
    strangers: ClassVar[tuple[int, ...]] = ()
    network: Network

    def __init__(self, *overrides: str, **options: Any) -> None:
        super().__init__(*overrides, **options)
        self.stack = ExitStack()

    def open(self) -> None:
        self.network = self.stack.enter_context(network(self.hosts, relayed=self.relayed))
        self.details["hosts"] = self.network.kind
        for host in range(self.hosts):
            self.daemons.append(self.make(host))
        friends = [host for host in range(self.hosts) if host not in self.strangers]
        for host in friends:
            self.daemons[host].start()
        self.meet(friends)

    def make(self, host: int) -> HostDaemon:
        settings = static_settings(self.network, host)
        return HostDaemon(self.network, host, *settings, *self.overrides)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.stack.close()

    def meet(self, hosts: Sequence[int]) -> None:
        for host in hosts:
            look_until(lambda host=host: self.up(host) >= len(hosts) - 1, MEET_S)

    # ---- what a daemon says ----------------------------------------------------------------------

    def peers(self, at: int = BORROWER) -> list[dict[str, Any]]:
        members: list[dict[str, Any]] = self.stats(at)["fleet"]["members"]
        return members

    def peer(self, of: int = LENDER, at: int = BORROWER) -> dict[str, Any]:
        """Return what one daemon says of another one; {} if it does not know it."""
        node = self.node(of)
        return next((each for each in self.peers(at) if each["node"] == node), {})

    def node(self, of: int) -> str:
        return (self.daemons[of].directory / "file" / "node_id").read_text().strip()

    def up(self, at: int = BORROWER) -> int:
        return sum(each["state"] == "up" for each in self.peers(at))

    def count(self, metric: str, *labels: str, at: int = BORROWER) -> int:
        """Return how often something was counted, under one of some labels."""
        counts = self.stats(at)["totals"].get(metric, {})
        return int(sum(counts.get(label, 0) for label in labels))

    # ---- what engines do -------------------------------------------------------------------------

    def lend(self, lender: EngineProcess, *prefixes: str) -> None:
        """Save prefixes at the lender."""
        for prefix in prefixes:
            saved = lender.ask("save", prefix=prefix, blocks=BLOCKS)
            self.expect(saved.get("committed"), f"{prefix} was not saved: {saved}")

    def borrow(self, engine: EngineProcess, prefix: str, **options: Any) -> int:
        """Load a prefix and return the hit; count what is wrong."""
        loaded = engine.ask("load", prefix=prefix, blocks=BLOCKS, **options)
        self.expect("error" not in loaded, f"a load of {prefix} failed: {loaded}")
        self.wrong += loaded.get("wrong", 0)
        return int(loaded.get("hit", 0))

    def expect_borrowed(
        self, engine: EngineProcess, prefix: str, what: str, within_s: float = MEET_S
    ) -> None:
        """Count as wrong what is not lent as a whole. A lender that is busy for the 50 ms in which
        it has to answer costs a miss, so it is asked again."""
        try:
            look_until(lambda: self.borrow(engine, prefix) == BLOCKS, within_s)
        except TimeoutError:
            self.expect(False, what)

    def race(self, engine: EngineProcess, prefix: str, prompt_s: float) -> int:
        """Load as an engine that could compute the prompt in this time; return the hit. Waiting and
        computing the rest take not much longer than computing all."""
        options = {"pace_s": prompt_s / BLOCKS, "wait_s": 5.0}
        loaded = engine.ask("load", prefix=prefix, blocks=BLOCKS, **options)
        self.expect("error" not in loaded, f"a load of {prefix} failed: {loaded}")
        hit = int(loaded.get("hit", 0))
        self.wrong += loaded.get("wrong", 0)
        ratio = (loaded.get("took_s", 0.0) + (1 - hit / BLOCKS) * prompt_s) / prompt_s
        self.details["worst_over_recompute"] = max(
            self.details.get("worst_over_recompute", 0.0), round(ratio, 3)
        )
        self.expect(ratio <= WORST, f"{prefix} took {ratio:.2f} of what computing takes")
        return hit
