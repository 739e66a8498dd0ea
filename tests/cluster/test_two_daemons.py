"""Two real daemons: what one has stored the other one's engines hit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from kvstore import Client, Unavailable
from kvstore.cli import main
from kvstore.model.block import Group, Namespace
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.member import Origin
from kvstore.testing.daemon import Daemon
from tests.cluster.fleet import fleet, met, peers_of, wait_for

SPEC = Namespace(16, (Group("all", 256 << 10),), (("model", "two-daemons"),))
KEYS = KeyChain(root_key(SPEC.id), 16).update(list(range(16 * 40)))
RECORDS = [bytes([at]) * (256 << 10) for at in range(40)]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Daemon, Daemon]]:
    with fleet() as (one, two):
        yield one, two


def put(daemon: Daemon, *, durable: bool = False) -> None:
    with Client(daemon.target) as client:
        client.register(SPEC)
        client.put(SPEC.id, KEYS, RECORDS, durable=durable)


def hit(daemon: Daemon, **options: object) -> int:
    """Acquire the prefix, look at every byte, release; return the hit in blocks."""
    with Client(daemon.target) as client:
        client.register(SPEC)
        grant = client.acquire(SPEC.id, KEYS, wait_s=5.0, **options)  # type: ignore[arg-type]
        for slot, wanted, number in zip(grant.slots, RECORDS, grant.checksums, strict=False):
            assert slot is not None
            view = client.view(slot)
            assert view == wanted
            assert checksum(view) == number
        assert client.release(grant.lease_id) == [True]
        return grant.hit_blocks


def clear(*daemons: Daemon) -> None:
    for each in daemons:
        with Client(each.target) as client:
            client.admin.clear(SPEC.id, this_daemon_only=True)


def test_what_one_daemon_has_the_other_reads(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    put(one)
    # A daemon that is busy with what was put may answer too late: then that acquire is a miss.
    wait_for(lambda: hit(two, request_id="borrowed") == len(KEYS))
    with Client(two.target) as client:
        totals = client.admin.stats()["totals"]
        (outcome,) = [each for each in client.admin.outcomes("borrowed") if each.hit_blocks]
    assert totals["hit_blocks"]["peer"] == len(KEYS)
    assert totals["peer_bytes"]["borrowed"] == sum(map(len, RECORDS))
    with Client(one.target) as client:
        stats = client.admin.stats()
    node = stats["fleet"]["node"]
    assert stats["fleet"]["membership"]["unknown"] == []  # it knows itself
    assert stats["totals"]["peer_bytes"]["lent"] == sum(map(len, RECORDS))
    assert (outcome.peer_blocks, outcome.peer, outcome.ending) == (len(KEYS), node, None)
    assert hit(one) == len(KEYS)


def test_a_killed_daemon_is_met_again_with_what_its_files_have(
    pair: tuple[Daemon, Daemon],
) -> None:
    one, two = pair
    clear(one, two)
    put(one, durable=True)
    one.kill()
    assert hit(two) == 0
    one.start()
    wait_for(lambda: met(two))
    wait_for(lambda: hit(two) == len(KEYS))


def test_a_stopped_daemon_costs_no_more_than_its_deadline(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    clear(one, two)
    put(one)
    os.kill(one.pid, signal.SIGSTOP)
    try:
        assert hit(two, recompute_s_per_block=0.01) == 0
        wait_for(lambda: not met(two))
        assert hit(two) == 0
    finally:
        os.kill(one.pid, signal.SIGCONT)
    wait_for(lambda: met(two))
    wait_for(lambda: hit(two) == len(KEYS))


def test_a_request_may_name_the_engine_that_has_its_prefix(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    clear(one, two)
    with Client(one.target, engines=["10.0.0.1:8000"]) as client:
        client.register(SPEC)
        client.put(SPEC.id, KEYS, RECORDS)
        wait_for(lambda: peers_of(two)[0]["engines"] == ["10.0.0.1:8000"])
        assert hit(two, origin=Origin("10.0.0.1:8000")) == len(KEYS)
    assert hit(two, origin=Origin("10.9.9.9:22")) == len(KEYS)  # its own, and nobody else asked


def test_two_engines_of_one_daemon_prefill_and_decode_at_once(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    clear(one, two)
    origin = Origin("10.0.0.1:8000", len(KEYS))
    with (
        Client(one.target, engines=["10.0.0.1:8000"]) as prefiller,
        ThreadPoolExecutor(1) as threads,
    ):
        prefiller.register(SPEC)
        decoding = threads.submit(hit, one, origin=origin, request_id="decoded")
        for begin in range(0, len(KEYS), 20):
            with pytest.raises(TimeoutError):
                decoding.result(0.2)
            prefiller.put(
                SPEC.id,
                KEYS[begin : begin + 20],
                RECORDS[begin : begin + 20],
                first_block=begin,
                parent=KEYS[begin - 1] if begin else None,
            )
        assert decoding.result(10) == len(KEYS)
        (outcome,) = prefiller.admin.outcomes("decoded")
        assert (outcome.peer_blocks, outcome.peer) == (0, "")


def test_a_draining_daemon_lends_nothing_and_is_not_asked(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    clear(one, two)
    put(two)
    assert two.stop() == 0
    assert hit(one) == 0
    two.start()
    wait_for(lambda: met(one) and met(two))


def test_clear_reaches_the_other_daemon_or_says_that_it_did_not(
    pair: tuple[Daemon, Daemon],
) -> None:
    one, two = pair
    clear(one, two)
    put(one, durable=True)
    with Client(two.target) as client:
        client.register(SPEC)
        client.admin.clear(SPEC.id)
    with Client(one.target) as client:
        client.register(SPEC)
        assert client.match(SPEC.id, KEYS).hit_blocks == 0
    one.kill()
    with Client(two.target) as client:
        client.register(SPEC)
        with pytest.raises(Unavailable, match="deleted on 0 of 1"):
            client.admin.clear(SPEC.id)
    one.start()
    wait_for(lambda: met(one) and met(two))


def test_a_delete_says_whom_it_reaches(pair: tuple[Daemon, Daemon]) -> None:
    put(pair[0])
    options = ["--target", pair[0].target, "--namespace", SPEC.id.hex()]
    done = CliRunner().invoke(main, ["delete", *options, KEYS[-1].hex()])
    assert done.output == "deleted 1 of 1 blocks, fleet: members only\n"
    done = CliRunner().invoke(main, ["clear", *options, "--json"])
    assert json.loads(done.output)["fleet"] == "members only"
