"""Real daemons on one machine that share what they hold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_ports
from kvstore.testing.wait import until


def member_settings(port: int, others: Sequence[int]) -> list[str]:
    """Return what makes a daemon a member of a static fleet on loopback."""
    addresses = [f"127.0.0.1:{each}" for each in others]
    return [
        "cluster.membership=static",
        f"cluster.listen=127.0.0.1:{port}",
        f"cluster.static={json.dumps(addresses)}",
    ]


def wait_for(true: Callable[[], object]) -> None:
    """Wait until `true()` is, looking ten times a second."""

    def is_true() -> object:
        time.sleep(0.1)
        return true()

    until(is_true, timeout_s=20)


def peers_of(daemon: Daemon) -> list[dict[str, object]]:
    """Return what a daemon says of the other members."""
    with Client(daemon.target, arena=False) as client:
        members: list[dict[str, object]] = client.admin.stats()["fleet"]["members"]
        return members


def met(daemon: Daemon, others: int = 1) -> bool:
    """Say whether a daemon has links to so many others."""
    return sum(each["state"] == "up" for each in peers_of(daemon)) >= others


@contextmanager
def fleet(count: int = 2, *overrides: str, file: bool = True) -> Iterator[list[Daemon]]:
    """Yield daemons that have met each other."""
    ports = free_ports(count)
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(Daemon(*member_settings(port, ports), *overrides, file=file))
            for port in ports
        ]
        for each in daemons:
            each.start()
        for each in daemons:
            wait_for(lambda each=each: met(each, count - 1))
        yield daemons
