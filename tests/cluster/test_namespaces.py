"""The network of hosts that faults use: what it says it does, it does. Both kinds of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.namespaces import Network, network, why_not

ECHO = """
import socket, sys, threading
host, port = sys.argv[1].split(":")
server = socket.create_server((host, int(port)))
print("ready", flush=True)
def echo(connection):
    try:
        while data := connection.recv(1 << 16):
            connection.sendall(data * int(sys.argv[2]))
    except OSError:
        pass
while True:
    threading.Thread(target=echo, args=server.accept()[:1], daemon=True).start()
"""
ASK = """
import socket, sys, time
host, port = sys.argv[1].split(":")
timeout_s, began = float(sys.argv[3]), time.monotonic()
with socket.create_connection((host, int(port)), timeout_s) as connection:
    connection.sendall(b"x" * 1024)
    left = 1024 * int(sys.argv[2])
    while left:
        left -= len(connection.recv(1 << 16))
print(time.monotonic() - began)
"""
TIMES = 500  # what is asked for comes back so many times: half a megabyte
SLOW_BYTES_PER_S = 500_000
SOON_S = 20.0


@contextmanager
def echoing(hosts: Network, host: int) -> Iterator[None]:
    """Answer on a host."""
    command = [*hosts.enter(host), sys.executable, "-c", ECHO, hosts.addresses[host], str(TIMES)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.communicate()


def asked(hosts: Network, asker: int, timeout_s: float = SOON_S) -> float | None:
    """Return the seconds in which the other host answers, None if it does not."""
    (address,) = hosts.seen_from(asker)
    command = [sys.executable, "-c", ASK, address, str(TIMES), str(timeout_s)]
    done = subprocess.run(
        [*hosts.enter(asker), *command], capture_output=True, text=True, timeout=60, check=False
    )
    return None if done.returncode else float(done.stdout)


@pytest.mark.parametrize("relayed", [False, True], ids=["namespaces", "loopback"])
def test_hosts_are_parted_one_way_or_both_slow_and_well_again(relayed: bool) -> None:
    if not relayed and why_not():
        pytest.skip(why_not())
    with network(2, relayed=relayed) as hosts, echoing(hosts, 0), echoing(hosts, 1):
        assert hosts.kind == ("loopback" if relayed else "namespaces")
        assert asked(hosts, 0)
        assert asked(hosts, 1)
        hosts.cut(0)
        assert asked(hosts, 0, 0.5) is None
        hosts.heal()
        assert asked(hosts, 0)
        for sender, receiver in ((0, 1), (1, 0)):
            hosts.drop(sender, receiver)
            assert asked(hosts, 0, 0.5) is None
            hosts.heal()
        hosts.slow(0, SLOW_BYTES_PER_S)
        slow_s = asked(hosts, 1)
        assert slow_s is not None
        assert slow_s > 1024 * TIMES / SLOW_BYTES_PER_S / 2
        hosts.heal()
        assert asked(hosts, 1)
