"""Hosts on one machine: a network namespace each, on a bridge; or addresses of loopback.

As root, each host gets a namespace of its own. The bridge lies in one more, which the calling
thread enters for the time of the context, so nothing of the machine's own network changes. The
namespaces have no names: they are gone when the last process in them has ended, however that was.
A host has processors of its own, if there are enough: what one computes does not slow the other.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kvstore.model.errors import Unavailable

CLONE_NEWNET = 0x40000000
SUBNET = "10.66.1"
BRIDGE_ADDRESS = f"{SUBNET}.254"
TOOLS = ("ip", "nsenter", "taskset", "tc")
TIMEOUT_S = 10.0
# Of what may leave at once, and how long what is too much waits: a switch's buffer.
BURST, QUEUE = "256kb", "50ms"


@dataclass(frozen=True, slots=True)
class Host:
    """cpus: its processors. enter: what runs a command on it. isolated: in a namespace."""

    address: str
    cpus: tuple[int, ...]
    enter: tuple[str, ...]
    isolated: bool

    def limit(self, bits_per_s: int) -> None:
        """Let no more leave this host; 0: as much as there is. Raises Unavailable."""
        _run(*self.enter, "tc", "qdisc", "del", "dev", "eth0", "root", checked=False)
        if bits_per_s:
            rate = ("rate", f"{bits_per_s}bit", "burst", BURST, "latency", QUEUE)
            _run(*self.enter, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)


@dataclass(frozen=True, slots=True)
class Network:
    """here: the caller's own address. why_not: why hosts are addresses of loopback, "": they are
    not."""

    hosts: Sequence[Host]
    here: str
    why_not: str = ""


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Yield so many hosts. The calling thread is inside their network for the time of it."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(_namespaces(count))
        except (OSError, Unavailable) as error:
            why = getattr(error, "strerror", None) or str(error)
            hosts = [
                Host(f"127.0.0.{number}", cpus, _on(cpus), isolated=False)
                for number, cpus in enumerate(_shares(count), 2)
            ]
            yield Network(hosts, "127.0.0.1", f"no network namespaces here: {why}")
            return
        yield Network(hosts, BRIDGE_ADDRESS)


@contextmanager
def _namespaces(count: int) -> Iterator[list[Host]]:
    """Raises OSError without the right to, Unavailable without the tools."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed (Debian: iproute2, util-linux)")
    with ExitStack() as stack:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        stack.callback(os.close, before)
        spaces = []
        for _ in range(1 + count):
            stack.callback(_enter, before)
            _call("unshare", CLONE_NEWNET)
            spaces.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
            stack.callback(os.close, spaces[-1])
        bridge, *others = spaces
        _enter(bridge)
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "kv0", "type", "bridge")
        _run("ip", "addr", "add", f"{BRIDGE_ADDRESS}/24", "dev", "kv0")
        _run("ip", "link", "set", "kv0", "up")
        hosts = []
        shares = _shares(count)
        for number, (space, cpus) in enumerate(zip(others, shares, strict=True), 1):
            path = f"/proc/{os.getpid()}/fd/{space}"
            enter = ("nsenter", f"--net={path}", "--", *_on(cpus))
            host = Host(f"{SUBNET}.{number}", cpus, enter, isolated=True)
            veth = ("type", "veth", "peer", "name", "eth0", "netns", path)
            _run("ip", "link", "add", f"p{number}", *veth)
            _run("ip", "link", "set", f"p{number}", "master", "kv0", "up")
            _run(*host.enter, "ip", "link", "set", "lo", "up")
            _run(*host.enter, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run(*host.enter, "ip", "link", "set", "eth0", "up")
            hosts.append(host)
        yield hosts


def _shares(count: int) -> list[tuple[int, ...]]:
    """Return the processors of each host: as many as the others have, or all if they are few."""
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // count
    if not each:
        return [tuple(cpus)] * count
    return [tuple(cpus[first * each : (first + 1) * each]) for first in range(count)]


def _on(cpus: Sequence[int]) -> tuple[str, ...]:
    return ("taskset", "--cpu-list", ",".join(map(str, cpus)))


def _enter(space: int) -> None:
    _call("setns", space, CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library that Python has from 3.12 on. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*command: str, checked: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if checked and done.returncode:
        raise Unavailable(f"{' '.join(command[-12:])}: {done.stderr.strip()[-200:]}")
