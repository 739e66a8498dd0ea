"""How true an index is: after many stores and evictions, and after daemon, indexer or link died."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.client import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.dynamo import Indexer
from kvstore.testing.prompts import store_prompt
from kvstore.testing.relay import relay_to
from kvstore_bench.events.stage import (
    ANYWHERE,
    Addresses,
    Difference,
    EventsPlan,
    addresses_of,
    announcing,
    compare,
    prompts_of,
    space,
    tell,
    traffic,
    wait_for_subscriber,
)

QUIET_S = 2.0  # for what was stored last to be written, and told
# Blocks leave both tiers: the prompts are 400 MB, of which 64 and 160 have room.
SMALL = ("dram.capacity=64MiB", "dram.extent=32MiB", "file.capacity=160MiB", "file.segment=16MiB")
Say = Callable[[str], None]


def index_equals(plan: EventsPlan, site: Path | None) -> dict[str, Any]:
    """Store prompts beyond the room of both tiers, then compare every one of them."""
    namespace = space(4096)
    prompts = prompts_of(plan.prompts, plan.prompt_blocks, seed=2)
    with announcing(site, *SMALL) as (daemon, indexer), Client(daemon.target) as client:
        client.register(namespace)
        for number, tokens in enumerate(prompts):
            store_prompt(client, namespace, tokens)
            if number % 20 == 0:
                client.admin.flush()  # else the arena evicts what no file has yet
        client.admin.flush()
        time.sleep(QUIET_S)
        found = compare(client, namespace, indexer, prompts)
    return {
        "index_equals_daemon": found.fields()["equal"],
        "index": {
            **found.fields(),
            "stored_blocks": plan.prompts * plan.prompt_blocks,
        },
    }


def faults(plan: EventsPlan, site: Path | None, say: Say) -> dict[str, Any]:
    """Kill, and cut, under traffic; compare when it has gone on for a while."""
    cases: dict[str, Callable[[_Scene], None]] = {
        "daemon_killed": lambda scene: scene.kill_daemon(),
        "indexer_killed": lambda scene: scene.kill_indexer(),
        "both_killed": lambda scene: scene.kill_both(),
        "publish_cut": lambda scene: scene.cut(plan.cut_s),
    }
    found = {}
    for name, harm in cases.items():
        with _Scene(plan, site) as scene:
            scene.go_on()
            harm(scene)
            scene.go_on()
            found[name] = scene.compare().fields()
        say(f"{name}: {found[name]}")
    return {
        "claimed_but_absent": max(each["claimed_but_absent"] for each in found.values()),
        "present_but_unknown": max(each["present_but_unknown"] for each in found.values()),
        "faults": found,
    }


class _Scene:
    """A daemon that is small, an indexer that hears it through a relay, and traffic."""

    def __init__(self, plan: EventsPlan, site: Path | None) -> None:
        self._plan = plan
        self._space = space(4096)
        self._prompts = prompts_of(plan.fault_prompts, plan.prompt_blocks, seed=3)
        self._daemon = Daemon(*ANYWHERE, *SMALL)
        self._indexer = Indexer(site)

    def __enter__(self) -> _Scene:
        self._daemon.start()
        self._indexer.start()
        self._where = addresses_of(self._daemon)
        port = int(self._where.publish.rpartition(":")[2])
        self._relaying = relay_to(port)
        self._relay = self._relaying.__enter__()
        self._register()
        return self

    def __exit__(self, *_: Any) -> None:
        self._relaying.__exit__(None, None, None)
        self._indexer.__exit__(None, None, None)
        self._daemon.__exit__(None, None, None)

    def _register(self) -> None:
        tell(self._indexer, Addresses(f"tcp://127.0.0.1:{self._relay.port}", self._where.replay))
        with Client(self._daemon.target, arena=False) as client:
            wait_for_subscriber(client)

    def go_on(self) -> None:
        with Client(self._daemon.target) as client:
            client.register(self._space)
            traffic(client, self._space, self._prompts, self._plan.traffic_s)

    def kill_daemon(self) -> None:
        self._daemon.kill()
        where = self._where
        self._daemon.add(f"events.publish={where.publish}", f"events.replay={where.replay}")
        self._daemon.start()

    def kill_indexer(self) -> None:
        self._indexer.kill()
        self._indexer.start()
        self._register()

    def kill_both(self) -> None:
        self.kill_daemon()
        self.kill_indexer()

    def cut(self, seconds: float) -> None:
        """Cut the link from publisher to indexer while traffic goes on."""
        self._relay.cut = True
        with Client(self._daemon.target) as client:
            client.register(self._space)
            traffic(client, self._space, self._prompts, seconds)
        self._relay.cut = False

    def compare(self) -> Difference:
        time.sleep(QUIET_S)
        with Client(self._daemon.target) as client:
            client.register(self._space)
            return compare(client, self._space, self._indexer, self._prompts)
