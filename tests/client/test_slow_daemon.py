"""A call that times out opens the breaker; an answered ping closes it, and nothing is lost."""

from __future__ import annotations

import os
import signal

import pytest

from kvstore import Client, Unavailable
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until


def test_a_daemon_that_was_only_slow_keeps_the_session_and_its_leases() -> None:
    keys = sample_keys("slow", 4)
    with Daemon() as daemon, Client(daemon.start().target, timeout_s=0.2) as client:
        namespace_id = client.register(sample_namespace())
        client.put(namespace_id, keys, sample_records(keys))
        lease = client.acquire(namespace_id, keys)
        until(lambda: len(client.extents()) == 2)
        extents = client.extents().keys()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable):
                client.match(namespace_id, keys)
            assert not client.available
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        until(lambda: client.available)
        assert client.extents().keys() == extents
        assert client.release(lease.lease_id) == [True]


def test_a_caller_whose_own_deadline_is_shorter_opens_the_breaker_for_all() -> None:
    with Daemon() as daemon, Client(daemon.start().target, timeout_s=20.0) as client:
        namespace_id = client.register(sample_namespace())
        keys = sample_keys("doubted", 4)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            waiting = client.submit(lambda remote: remote.match(namespace_id, keys))
            client.submit(lambda remote: remote.doubt()).result()
            with pytest.raises(Unavailable):
                client.match(namespace_id, keys)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        until(lambda: client.available)
        assert waiting.result(10).hit_blocks == 0  # it was only slow: what was asked is answered
