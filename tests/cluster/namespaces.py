"""Hosts on one machine: each has a network of its own, and all are on one bridge.

That takes root, and network namespaces in the kernel; `why_not` says in one line what is missing.
Then hosts are 127.0.0.2 and up, and a relay for each pair of them does what a network would.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_ports
from kvstore.testing.relay import Relay, relay_to

PORT = 7702
BURST_NBYTES = 64 << 10  # of a slow link: less than a socket's buffer
CHAIN = "add chain ip faults input { type filter hook input priority 0; }"
TOOLS = ("ip", "nft", "tc", "nsenter")
_numbers = itertools.count()


class Network(Protocol):
    """Hosts and what is between them. kind: "namespaces" or "loopback"."""

    kind: str

    @property
    def addresses(self) -> Sequence[str]:
        """Where the daemon of each host listens to peers, HOST:PORT."""

    def seen_from(self, host: int) -> list[str]:
        """Return the addresses by which a host reaches the others."""

    def enter(self, host: int) -> list[str]:
        """Return what to put before a command, so that it runs on a host."""

    def cut(self, host: int) -> None:
        """Part a host from all others, both ways."""

    def drop(self, sender: int, receiver: int) -> None:
        """Let nothing pass from one host to another one, one way."""

    def slow(self, host: int, bytes_per_s: int) -> None:
        """Let a host send no more than this."""

    def heal(self) -> None:
        """Undo all of that."""


class HostDaemon(Daemon):
    """A daemon on one host of a network. wrapped: put before its command, after what enters the
    host."""

    def __init__(
        self, network: Network, host: int, *overrides: str, wrapped: Sequence[str] = ()
    ) -> None:
        super().__init__(*overrides)
        self.wrapped = list(wrapped)
        self._enter = network.enter(host)

    def command(self, *arguments: str) -> list[str]:
        return [*self._enter, *self.wrapped, *super().command(*arguments)]


def static_settings(network: Network, host: int) -> list[str]:
    """Return what makes a daemon a member of a static fleet of all hosts."""
    return [
        "cluster.membership=static",
        "cluster.insecure=true",
        f"cluster.listen={network.addresses[host]}",
        f"cluster.static={json.dumps(network.seen_from(host))}",
    ]


# ---- namespaces ----------------------------------------------------------------------------------


class Bridge:
    """Network namespaces on a bridge, which has one of its own. They end with `close`."""

    kind = "namespaces"

    def __init__(self, count: int) -> None:
        stem = f"kvstore-{os.getpid()}-{next(_numbers)}"
        self._bridge = f"{stem}-bridge"
        self._hosts = [f"{stem}-{number}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}:{PORT}" for number in range(count)]

    def open(self) -> None:
        """Raises OSError if the machine does not let us."""
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
        for number, host in enumerate(self._hosts):
            port, ip = f"port{number}", self.addresses[number].partition(":")[0]
            _run("ip", "netns", "add", host)
            here = ("ip", "-n", self._bridge, "link")
            _run(*here, "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            _run(*here, "set", port, "master", "bridge", "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", host, "address", "add", f"{ip}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
            _run(*self.enter(number), "nft", f"add table ip faults; {CHAIN}")

    def close(self) -> None:
        for name in (*self._hosts, self._bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def seen_from(self, host: int) -> list[str]:
        return [each for number, each in enumerate(self.addresses) if number != host]

    def enter(self, host: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._hosts[host]}", "--"]

    def cut(self, host: int) -> None:
        _run("ip", "-n", self._bridge, "link", "set", f"port{host}", "down")

    def drop(self, sender: int, receiver: int) -> None:
        ip = self.addresses[sender].partition(":")[0]
        rule = f"add rule ip faults input ip saddr {ip} drop"
        _run(*self.enter(receiver), "nft", rule)

    def slow(self, host: int, bytes_per_s: int) -> None:
        rate = ("rate", f"{8 * bytes_per_s}", "burst", f"{BURST_NBYTES}", "latency", "200ms")
        _run("tc", "-n", self._hosts[host], "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)

    def heal(self) -> None:
        for number, host in enumerate(self._hosts):
            _run("ip", "-n", self._bridge, "link", "set", f"port{number}", "up")
            _run(*self.enter(number), "nft", "flush chain ip faults input")
            slow = ["tc", "-n", host, "qdisc", "delete", "dev", "eth0", "root"]
            subprocess.run(slow, capture_output=True, check=False)  # it may not be slow


def _run(*command: str) -> None:
    """Run a command. Raises OSError that says what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command[:4])}: {done.stderr.strip() or done.returncode}")


@functools.cache
def why_not() -> str:
    """Return in one line why hosts are no network namespaces here; "": they are."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, nftables, util-linux)"
    if os.geteuid():
        return "network namespaces need root"
    trial = Bridge(1)
    try:
        trial.open()
        trial.slow(0, 1 << 20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"this machine has no network namespaces for us ({error})"
    finally:
        trial.close()
    return ""


# ---- loopback ------------------------------------------------------------------------------------


class Loopback:
    """Addresses of loopback. relays: from each host to each other one."""

    kind = "loopback"

    def __init__(self, count: int, stack: ExitStack) -> None:
        ports = free_ports(count)
        self.addresses = [f"127.0.0.{number + 2}:{port}" for number, port in enumerate(ports)]
        self.relays: dict[tuple[int, int], Relay] = {
            (one, other): stack.enter_context(relay_to(ports[other], f"127.0.0.{other + 2}"))
            for one, other in itertools.permutations(range(count), 2)
        }

    def seen_from(self, host: int) -> list[str]:
        return [f"127.0.0.1:{r.port}" for (one, _), r in self.relays.items() if one == host]

    def enter(self, host: int) -> list[str]:
        return []

    def cut(self, host: int) -> None:
        for (one, other), relay in self.relays.items():
            if host in (one, other):
                relay.hold_asks = relay.hold_answers = True

    def drop(self, sender: int, receiver: int) -> None:
        self.relays[sender, receiver].hold_asks = True
        self.relays[receiver, sender].hold_answers = True

    def slow(self, host: int, bytes_per_s: int) -> None:
        for (_, other), relay in self.relays.items():
            if other == host:
                relay.bytes_per_s = bytes_per_s

    def heal(self) -> None:
        for relay in self.relays.values():
            relay.hold_asks = relay.hold_answers = False
            relay.bytes_per_s = 0


@contextmanager
def network(count: int, *, relayed: bool = False) -> Iterator[Network]:
    """Yield so many hosts: namespaces where that is possible, else addresses of loopback. relayed:
    the latter in any case."""
    with ExitStack() as stack:
        if relayed or why_not():
            yield Loopback(count, stack)
            return
        bridge = Bridge(count)
        stack.callback(bridge.close)
        bridge.open()
        yield bridge
