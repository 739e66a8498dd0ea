"""A daemon remembers what it held and did, also after it was killed."""

import json
import time
from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.model.errors import InvalidRequest
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.store.history import SAVE_EVERY_S, WRITE_S
from kvstore.store.samples import unpacked
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.cli.run import kvstore

LOST_S = 10.0


@pytest.fixture(scope="module")
def worked() -> Iterator[Daemon]:
    """A daemon that has answered three requests, and says so."""
    with Daemon(file=False) as daemon, Client(daemon.start().target) as client:
        work(client, rounds=3)
        until(lambda: total(client.admin.history(1), "requests") == 3)
        yield daemon


def total(reply: pb.HistoryReply, column: str) -> float:
    at = list(reply.columns).index(column)
    return sum(sample.values[at] for sample in reply.samples)


def work(client: Client, rounds: int = 1) -> None:
    """Put 8 blocks, then hit 4 of 6 that are asked for, so many times."""
    namespace_id = client.register(sample_namespace())
    keys = sample_keys("history", 8)
    client.put(namespace_id, keys, sample_records(keys))
    for number in range(rounds):
        asked = [*keys[:4], *sample_keys(f"other {number}", 2)]
        grant = client.acquire(
            namespace_id, asked, request_id=f"r{number}", recompute_s_per_block=0.5
        )
        client.release(grant.lease_id)


def test_all_steps_count_what_happened(worked: Daemon) -> None:
    with Client(worked.target) as client:
        for step_s in (1, 10, 300):
            history = client.admin.history(step_s)
            assert total(history, "lookup_blocks") == 18
            assert total(history, "hit_blocks.dram") == 12
            assert total(history, "hit_tokens.dram") == 12 * 16
            assert total(history, "ended.never_stored") == 3
            assert total(history, "saved_prefill_s") == 6.0
            assert total(history, "written.dram") == total(history, "read.dram") * 8 / 12
        last = client.admin.history(1).samples[-1]
        held = dict(zip(history.columns, last.values, strict=True))
        assert held["dram.capacity_bytes"] == 64 << 20
        assert held["blocks"] == 8
        assert not client.admin.history(1, since=time.time() + 60).samples
        with pytest.raises(InvalidRequest, match="1, 10, 300"):
            client.admin.history(60)


def test_a_killed_daemon_has_lost_the_last_seconds_alone() -> None:
    assert SAVE_EVERY_S + WRITE_S + 2 <= LOST_S  # a sample is at most a second late, or two
    with Daemon() as daemon:
        kill_one(daemon)


def kill_one(daemon: Daemon) -> None:
    with Client(daemon.start().target) as client:
        work(client)
        notes = daemon.directory / "file"
        until(lambda: [*notes.glob("HISTORY.?"), *notes.glob("RECENT.?")], timeout_s=LOST_S)
        written_at = time.time()
        before = client.admin.history(1)
    daemon.kill()
    daemon.start()
    with Client(daemon.target) as client:
        after = client.admin.history(1)
    kept = {sample.at: list(sample.values) for sample in after.samples}
    durable = [sample for sample in before.samples if sample.at < written_at - 1]
    assert len(durable) >= SAVE_EVERY_S - 2
    assert all(kept[sample.at] == list(sample.values) for sample in durable)
    assert total(after, "requests") == 1


def test_a_daemon_that_ends_keeps_everything_and_encrypts_it() -> None:
    with root_key_in_memory() as key, Daemon(f"security.root_key_file={key}") as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            work(client)
            until(lambda: total(client.admin.history(1), "requests") == 1)
        daemon.stop()
        (stored,) = (daemon.directory / "file").glob("HISTORY.?")
        assert not any(unpacked(stored.read_bytes()[at:]) for at in range(64))
        daemon.start()
        with Client(daemon.target) as client:
            assert total(client.admin.history(10), "requests") == 1


def test_top_draws_it(worked: Daemon) -> None:
    drawn = kvstore("top", "--history", "--target", worked.target)
    assert drawn.exit_code == 0
    lines = {line[:16].strip(): line for line in drawn.output.splitlines()}
    assert "67 %" in lines["hit ratio"]
    assert "█" in lines["never_stored"]
    assert "lost" not in lines  # never happened
    printed = kvstore("top", "--history", "1h", "--json", "--target", worked.target)
    samples = [json.loads(line) for line in printed.output.splitlines()]
    assert sum(sample["hit_blocks.dram"] for sample in samples) == 12
    assert kvstore("top", "--history", "2h", "--target", worked.target).exit_code == 2
