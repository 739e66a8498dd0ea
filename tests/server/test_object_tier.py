"""Two daemons with nothing in common but a bucket on a real S3 server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.seaweed import Seaweed
from kvstore.testing.wait import until
from tests.cli.run import kvstore

BLOCKS = 40


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    with Seaweed() as server:
        server.start()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def daemon_of(server: Seaweed) -> Daemon:
    settings = {**server.settings(), "timeout_s": 2, "believed_s": 1}
    return Daemon(*(f"object.{key}={str(value).lower()}" for key, value in settings.items()))


def test_another_host_gets_what_was_stored_and_a_dead_bucket_costs_no_hang(s3: Seaweed) -> None:
    keys = sample_keys("shared", BLOCKS)
    records = sample_records(keys)
    with daemon_of(s3) as one:
        with Client(one.start().target) as client:
            client.put(client.register(sample_namespace()), keys, records, durable=True)
        assert one.stop() == 0  # uploads before it ends
    with daemon_of(s3) as two, Client(two.start().target) as client:
        namespace_id = client.register(sample_namespace())
        until(lambda: client.acquire(namespace_id, keys, wait_s=5.0).hit_blocks == BLOCKS)
        assert client.get(namespace_id, keys) == records
        assert client.admin.stats()["totals"]["hit_blocks"]["object"] == BLOCKS
        assert client.admin.delete(namespace_id, keys[5:]) == BLOCKS - 5
        s3.stop()
        assert client.get(namespace_id, keys[:5]) == records[:5]
        assert client.acquire(namespace_id, keys, wait_s=1.0).hit_blocks == 5


def test_who_asked_too_early_hits_soon_after_the_upload(tmp_path: Path) -> None:
    """Two daemons on a shared folder, by default settings but for where it is: a prefix rests for
    5 s before it is uploaded, and that it is not there is believed for 5 s."""
    keys = sample_keys("early", BLOCKS)
    shared = f"object.url=file://{tmp_path}"
    with (
        Daemon(shared) as one,
        Daemon(shared) as two,
        Client(one.start().target) as writer,
        Client(two.start().target) as reader,
    ):
        namespace_id = reader.register(sample_namespace())

        def hit() -> int:
            grant = reader.acquire(namespace_id, keys, wait_s=5.0)
            reader.release(grant.lease_id)
            time.sleep(0.2)
            return grant.hit_blocks

        for client in (reader, writer):
            until(lambda client=client: client.admin.stats()["object"]["state"] == "ok")
        assert hit() == 0
        writer.register(sample_namespace())
        assert writer.put(namespace_id, keys, sample_records(keys), durable=True).durable
        assert until(lambda: hit() == BLOCKS, 40.0) < 20.0
        asked = reader.admin.stats()["totals"]["object_requests"]["list"]
        assert asked < 12, "not at every question"


@pytest.mark.parametrize("puts", [False, True])
def test_a_bucket_without_rights_is_explained_and_holds_up_no_stop(
    s3: Seaweed, monkeypatch: pytest.MonkeyPatch, puts: bool
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    keys = sample_keys("refused", 4)
    with daemon_of(s3) as daemon:
        with Client(daemon.start().target) as client:
            until(lambda: client.admin.stats()["object"]["state"] == "refused")
            if puts:
                namespace_id = client.register(sample_namespace())
                assert client.put(namespace_id, keys, sample_records(keys), durable=True).durable
        status = kvstore("status", "--target", daemon.target)
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 5.0
        log = daemon.output()
    assert status.exit_code == 1
    for text in (log, status.output):
        assert "list: not allowed, HTTP 403" in text
        assert "AWS_ACCESS_KEY_ID" in text
        assert "object.region and object.endpoint" in text
    assert ("drain=incomplete prefixes_not_uploaded=1" in log) is puts
