"""Two real daemons, a real Mooncake Store: what one has used again the other one's engines hit."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, Unavailable
from kvstore.model.block import Group, Namespace, Part
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.outcome import Reason
from kvstore.testing.daemon import Daemon
from kvstore.testing.mooncake import INSTALL, Mooncake, has_mooncake
from kvstore.testing.wait import until
from kvstore.tier.pool import record_name

pytestmark = pytest.mark.skipif(not has_mooncake(), reason=INSTALL)

NBYTES = 64 << 10
SPEC = Namespace(16, (Group("all", NBYTES),), (("model", "pool"),))
OTHER = Namespace(16, (Group("all", NBYTES),), (("model", "pool-other"),))
BLOCKS = 24
KEYS = KeyChain(root_key(SPEC.id), 16).update(list(range(16 * BLOCKS)))
OTHER_KEYS = KeyChain(root_key(OTHER.id), 16).update(list(range(16 * 4)))
RECORDS = [bytes([at]) * NBYTES for at in range(BLOCKS)]
WAIT_S = 30.0


@pytest.fixture(scope="module")
def mooncake() -> Iterator[Mooncake]:
    with Mooncake() as mooncake:
        yield mooncake.start()


@pytest.fixture(scope="module")
def pair(mooncake: Mooncake) -> Iterator[tuple[Daemon, Daemon]]:
    """One has files, the other one starts with nothing each time."""
    url = f"pool.url={mooncake.url}"
    with Daemon(url) as one, Daemon(url, file=False) as two:
        yield one.start(), two.start()


def put(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.register(SPEC)
        client.put(SPEC.id, KEYS, RECORDS, durable=True)
        client.register(OTHER)
        client.put(OTHER.id, OTHER_KEYS, RECORDS[:4], durable=True)


def hit(daemon: Daemon, request_id: str = "") -> int:
    """Acquire the prefix, look at every byte, release; return the hit in blocks."""
    with Client(daemon.target) as client:
        client.register(SPEC)
        grant = client.acquire(SPEC.id, KEYS, wait_s=WAIT_S, request_id=request_id)
        for slot, wanted in zip(grant.slots, RECORDS, strict=False):
            assert slot is not None
            assert client.view(slot) == wanted
        assert not grant.lease_id or client.release(grant.lease_id) == [True]
        return grant.hit_blocks


def stats(daemon: Daemon) -> dict[str, object]:
    with Client(daemon.target) as client:
        found: dict[str, object] = client.admin.stats()["pool"]
        return found


def is_up(daemon: Daemon) -> bool:
    return stats(daemon)["state"] == "up"


def in_pool(mooncake: Mooncake, block: int) -> bool:
    return mooncake.exists(record_name(SPEC.id, KEYS[block], Part(0, 0)))


def filled(mooncake: Mooncake, one: Daemon) -> None:
    """Let one daemon put, and use again, the whole prefix, until the pool has it."""
    until(lambda: is_up(one), WAIT_S)
    put(one)
    assert hit(one) == BLOCKS
    with Client(one.target) as client:
        client.register(OTHER)
        grant = client.acquire(OTHER.id, OTHER_KEYS)
        client.release(grant.lease_id)
    until(lambda: not stats(one)["puts_waiting"] and in_pool(mooncake, BLOCKS - 1), WAIT_S)


def emptied(daemon: Daemon) -> None:
    """Start a daemon without files anew: it has nothing of its own, and no process stays behind."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    assert len(children) == 1
    daemon.kill()
    until(lambda: not any(map(_runs, children)), WAIT_S)
    daemon.start()
    until(lambda: is_up(daemon), WAIT_S)


def test_what_one_uses_again_the_other_reads(
    mooncake: Mooncake, pair: tuple[Daemon, Daemon]
) -> None:
    one, two = pair
    until(lambda: is_up(one) and is_up(two), WAIT_S)
    put(one)
    assert stats(one)["put_records"] == 0  # of what was put, and not used yet
    filled(mooncake, one)
    assert stats(one)["put_records"] == BLOCKS + 4
    assert hit(two, "pooled") == BLOCKS
    with Client(two.target) as client:
        totals = client.admin.stats()["totals"]
        (outcome,) = client.admin.outcomes("pooled")
    assert (outcome.pool_blocks, outcome.ending) == (BLOCKS, None)
    assert totals["hit_blocks"]["pool"] == BLOCKS
    assert totals["tier_bytes"]["pool/read"] >= sum(map(len, RECORDS))
    assert hit(two) == BLOCKS  # from its arena now
    said = subprocess.run(
        two.command("explain", "pooled", "--target", two.target),
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{BLOCKS} from pool" in said.stdout, said


def test_wrong_bytes_are_a_miss_that_names_the_pool(
    mooncake: Mooncake, pair: tuple[Daemon, Daemon]
) -> None:
    one, two = pair
    filled(mooncake, one)
    emptied(two)
    mooncake.change(record_name(SPEC.id, KEYS[3], Part(0, 0)), "flip")
    assert hit(two, "wrong") == 0  # all of it is one window
    with Client(two.target) as client:
        (outcome,) = client.admin.outcomes("wrong")
        assert client.admin.stats()["totals"]["corrupt_blocks"]["pool"] == 1
    assert outcome.ending is not None
    assert outcome.ending.reason is Reason.POOL_CORRUPT
    until(lambda: not in_pool(mooncake, 3), WAIT_S)
    assert hit(two) == 3  # what is before it


def test_what_is_deleted_does_not_come_back(
    mooncake: Mooncake, pair: tuple[Daemon, Daemon]
) -> None:
    one, two = pair
    with Client(one.target) as client:
        client.admin.clear(SPEC.id)
    filled(mooncake, one)
    emptied(two)
    with Client(one.target) as client:
        client.register(SPEC)
        client.admin.delete(SPEC.id, KEYS[10:12])
    assert [in_pool(mooncake, at) for at in (9, 10, 11, 12)] == [True, False, False, True]
    assert hit(two) == 10
    one.kill()  # after a restart it does not know the parts of the namespace
    one.start()
    until(lambda: is_up(one), WAIT_S)
    with Client(one.target) as client:
        client.admin.delete(SPEC.id, KEYS[9:10])
        assert not in_pool(mooncake, 9)
        client.admin.clear(SPEC.id)
        assert not in_pool(mooncake, 0)
        assert mooncake.exists(record_name(OTHER.id, OTHER_KEYS[0], Part(0, 0)))
        client.admin.clear()
        assert not mooncake.exists(record_name(OTHER.id, OTHER_KEYS[0], Part(0, 0)))


@pytest.mark.fault
def test_a_dead_pool_costs_misses_only_and_deletes_say_so(
    mooncake: Mooncake, pair: tuple[Daemon, Daemon]
) -> None:
    one, two = pair
    filled(mooncake, one)
    emptied(two)
    mooncake.kill_hosts()
    mooncake.kill_master()
    assert hit(two, "dead") == 0
    assert hit(one) == BLOCKS
    until(lambda: not is_up(one), WAIT_S)
    with Client(one.target) as client:
        client.register(SPEC)
        with pytest.raises(Unavailable, match="delete again"):
            client.admin.delete(SPEC.id, KEYS[20:])
        grant = client.acquire(SPEC.id, KEYS)  # deleted here all the same
        assert grant.hit_blocks == 20
        client.release(grant.lease_id)
    mooncake.start()  # empty
    until(lambda: is_up(one) and is_up(two), WAIT_S)
    with Client(one.target) as client:
        client.register(SPEC)
        client.admin.delete(SPEC.id, KEYS[20:])
    assert hit(two) == 0
    assert hit(one) == 20  # a use: they are put again
    until(lambda: in_pool(mooncake, 19), WAIT_S)
    assert hit(two) == 20
    assert one.stop() == 0


def _runs(pid: str) -> bool:
    try:
        return b"kvstore.tier.pool.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
