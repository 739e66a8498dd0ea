"""Ports that servers of tests are started on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvstore.testing import ports
from kvstore.testing.ports import PORTS, free_port, free_ports

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_differ_although_nobody_has_bound_the_first_ones_yet() -> None:
    found = [*free_ports(20), *(free_port() for _ in range(60))]
    assert len(set(found)) == 80


def test_no_outgoing_connection_takes_one() -> None:
    first = int(OUTGOING.read_text().split()[0])
    if first < PORTS.stop:
        pytest.skip(f"this machine uses ports from {first} on for outgoing connections")
    assert set(free_ports(20)) <= set(PORTS)


def test_a_taken_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="only 0 free ports were found, of 1"):
            free_port()
