"""The link of a session that has ended stays open while somebody may touch what it leased."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvstore import Client, Part, Span
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

SPACE = sample_namespace("retired")
KEYS = sample_keys("retired", 4)
TOKEN = "of two processes of one engine"
PAUSE_S = 0.2  # a link that nothing holds is closed long before it is over


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("limits.lease_s=20", file=False) as daemon:
        yield daemon.start()


@pytest.fixture
def client(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr("kvstore.client.retired_links.RETIRED_LINK_MIN_S", 0.0)
    monkeypatch.setattr("kvstore.client.retired_links.RETIRED_POLL_S", 0.01)
    with Client(daemon.target, token=TOKEN) as client:
        client.register(SPACE)
        yield client


def limbo_nbytes(client: Client) -> int:
    return int(client.admin.stats()["dram"]["limbo_bytes"])


def end_session(daemon: Daemon, client: Client) -> None:
    """Let another process of the session go, and its link have the time to be closed."""
    with Client(daemon.target, token=TOKEN) as other:
        other.connect()
    until(lambda: client._client._caller.retired._links)
    time.sleep(PAUSE_S)


def test_a_link_stays_until_nobody_writes_into_a_reservation(
    daemon: Daemon, client: Client
) -> None:
    keys = sample_keys("reserved", 4)
    spans = [Span(Part(0, 0), 0, len(keys))]
    grant = client.reserve(SPACE.id, keys, first_block=0, parent=None, spans=spans)
    end_session(daemon, client)
    assert limbo_nbytes(client)
    assert client.release(grant.lease_id) == [False]
    until(lambda: limbo_nbytes(client) == 0)


def test_a_link_stays_until_nobody_has_a_view(daemon: Daemon, client: Client) -> None:
    records = sample_records(KEYS)
    client.put(SPACE.id, KEYS, records)
    slot = client.acquire(SPACE.id, KEYS).slots[0]
    assert slot is not None
    with client.view(slot) as view:
        end_session(daemon, client)
        assert limbo_nbytes(client)
        assert view == records[0]
    until(lambda: limbo_nbytes(client) == 0)
