"""Deletes reach a daemon that was away, by a real etcd; real daemons are killed and come back."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore import Client, Unavailable
from kvstore.cli import main
from kvstore.membership.etcd_access import Access
from kvstore.membership.etcd_calls import EtcdCalls
from kvstore.membership.etcd_deletes import (
    ENTRIES_MAX,
    KEYS_MAX,
    PAGE_ENTRIES,
    Delete,
    EtcdDeletes,
    decode_delete,
    encode_delete,
)
from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId
from kvstore.model.errors import InvalidRequest
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.member import NodeId
from kvstore.model.tenant import tenant_id
from kvstore.settings import ClusterSettings
from kvstore.testing.daemon import Daemon
from kvstore.testing.etcd import INSTALL, Etcd, has_etcd
from kvstore.testing.ports import free_ports
from tests.cluster.fleet import met, peers_of, wait_for

if not has_etcd():
    pytest.skip(INSTALL, allow_module_level=True)

SPEC = Namespace(16, (Group("all", 64 << 10),), (("model", "kept-deletes"),))
KEYS = KeyChain(root_key(SPEC.id), 16).update(list(range(16 * 20)))
RECORDS = [bytes([at]) * (64 << 10) for at in range(20)]
FLEET = "kept-" + secrets.token_hex(4)
KEPT_S = 3600.0
NODE = NodeId("a" * 32)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as etcd:
        yield etcd.start()


@pytest.fixture(scope="module")
def pair(etcd: Etcd) -> Iterator[tuple[Daemon, Daemon]]:
    one_port, two_port = free_ports(2)
    with Daemon(*options(etcd, one_port)) as one, Daemon(*options(etcd, two_port)) as two:
        one.start()
        two.start()
        yield one, two


def options(etcd: Etcd, port: int) -> list[str]:
    return [
        "cluster.membership=etcd",
        f"cluster.fleet={FLEET}",
        f"cluster.listen=127.0.0.1:{port}",
        f"cluster.etcd={json.dumps(list(etcd.endpoints))}",
        "cluster.etcd_ttl_s=2",
    ]


def put(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.register(SPEC)
        client.put(SPEC.id, KEYS, RECORDS, durable=True)


def hit(daemon: Daemon, keys: Sequence[BlockKey] = KEYS) -> int:
    with Client(daemon.target) as client:
        client.register(SPEC)
        grant = client.acquire(SPEC.id, keys, wait_s=2.0)
        client.release(grant.lease_id)
        return grant.hit_blocks


def delete(daemon: Daemon, keys: list[BlockKey]) -> None:
    with Client(daemon.target) as client:
        client.register(SPEC)
        client.admin.delete(SPEC.id, keys)


def in_etcd(etcd: Etcd, work: Any, fleet: str = FLEET) -> Any:
    """Run `work(EtcdDeletes)`."""

    async def run() -> Any:
        settings = ClusterSettings(membership="etcd", etcd=etcd.endpoints, fleet=FLEET)
        calls = EtcdCalls(settings.endpoints, Access(settings))
        try:
            return await work(EtcdDeletes(calls, fleet, KEPT_S))
        finally:
            await calls.close()

    return asyncio.run(run())


def test_deletes_of_one_tenant_are_not_told_to_another(etcd: Etcd) -> None:
    settings = ClusterSettings(membership="etcd", etcd=etcd.endpoints, fleet=FLEET)

    async def run() -> list[int]:
        calls = EtcdCalls(settings.endpoints, Access(settings))
        names = ("default", "acme", "beta")
        logs = [EtcdDeletes(calls, "tenants", KEPT_S, tenant_id(name)) for name in names]
        try:
            await logs[1].write(SPEC.id, KEYS[:2])
            await logs[1].renew(NODE, "token")
            assert [await log.token(NODE) for log in logs] == ["", "token", ""]
            return [len((await log.read(0)).deletes) for log in logs]
        finally:
            await calls.close()

    assert asyncio.run(run()) == [0, 1, 0]


def granted_s(etcd: Etcd, prefix: str) -> int:
    """Return for how long etcd keeps what is under a prefix."""
    begin, end = (base64.b64encode(prefix.encode() + each).decode() for each in (b"", b"~"))
    (kv,) = etcd._post(etcd.ports[0], "kv/range", {"key": begin, "range_end": end})["kvs"]
    lease = etcd._post(etcd.ports[0], "lease/timetolive", {"ID": kv["lease"]})
    return int(lease["grantedTTL"])


def test_a_token_is_gone_well_before_any_delete_that_came_after_it(etcd: Etcd) -> None:
    """The rest is for who reads deletes, applies them, and renews its token only then."""

    async def work(log: EtcdDeletes) -> float:
        await log.renew(NODE, "token")
        await log.write(SPEC.id, KEYS[:1])
        return log.token_s

    token_s = in_etcd(etcd, work, "leases")
    kept_s = granted_s(etcd, "/kvstore/v1/leases/deletes/")
    assert kept_s == KEPT_S
    assert granted_s(etcd, "/kvstore/v1/leases/applied/") == token_s <= 0.9 * kept_s


def test_pages_are_of_one_moment_and_no_delete_is_read_twice(etcd: Etcd) -> None:
    """Two are kept between two pages: by their names, one comes before all others, one after."""
    late = encode_delete(Delete(SPEC.id, tuple(KEYS[:1])))

    async def work(log: EtcdDeletes) -> None:
        for _ in range(PAGE_ENTRIES + 1):
            await log.write(SPEC.id, KEYS[1:2])
        ask, pages = log._calls.range, 0

        async def asked(request: Any, *, timeout_s: float) -> Any:
            nonlocal pages
            reply = await ask(request, timeout_s=timeout_s)
            for name in ("!", "~") if not pages else ():
                etcd.put(f"/kvstore/v1/pages/deletes/{name}", late)
            pages += 1
            return reply

        log._calls.range = asked  # type: ignore[method-assign]
        first = await log.read(0)
        assert pages == 2
        assert [each.keys for each in first.deletes] == [(KEYS[1],)] * (PAGE_ENTRIES + 1)
        second = await log.read(first.revision)
        assert [each.keys for each in second.deletes] == [(KEYS[0],)] * 2
        assert (await log.read(second.deletes[-1].revision)).deletes == []

    in_etcd(etcd, work, "pages")


def both_have_all(one: Daemon, two: Daemon) -> None:
    wait_for(lambda: met(one) and met(two))
    for each in (one, two):  # borrowed copies would be in the arena alone
        with Client(each.target) as client:
            client.admin.clear(SPEC.id, this_daemon_only=True)
        put(each)
    assert hit(one) == hit(two) == len(KEYS)


def test_who_is_down_while_a_delete_is_answered_has_it_applied_before_it_serves(
    etcd: Etcd, pair: tuple[Daemon, Daemon]
) -> None:
    one, two = pair
    both_have_all(one, two)
    two.kill()
    wait_for(lambda: not peers_of(one))  # its lease is over: nobody misses it
    delete(one, KEYS[12:])
    two.start()
    assert hit(two) == 12  # nor does it borrow or lend any of them
    wait_for(lambda: met(one) and met(two))
    assert hit(one) == hit(two) == 12
    # And it does not apply it again: what is stored anew stays.
    put(two)
    two.kill()
    two.start()
    assert hit(two) == len(KEYS)
    # Who deletes is killed after etcd has it, and before anybody is told: so etcd alone has it.
    # Other entries are no deletes, or too large. Ids are not in the order in which they came.
    wait_for(lambda: met(one) and met(two))
    put(one)
    two.kill()
    prefix = f"/kvstore/v1/{FLEET}/deletes/"
    late = encode_delete(Delete(SPEC.id, tuple(KEYS[5:7])))
    in_etcd(etcd, lambda log: log.write(SPEC.id, KEYS[9:]))
    etcd.put(prefix + "000", late)
    etcd.put(prefix + "zz", b'{"namespace": 5}')
    etcd.put(prefix + "zzz", b"x" * (1 << 20))
    found = in_etcd(etcd, lambda log: log.read(0))
    assert found.refused == 2
    assert found.deletes[-1].keys == tuple(KEYS[5:7])
    # Compaction takes old revisions of keys, and no delete.
    etcd._post(etcd.ports[0], "kv/compaction", {"revision": found.revision, "physical": True})
    two.start()
    assert hit(two) == 5
    wait_for(lambda: hit(one) == 5)  # it looks every 15 s


def test_an_etcd_that_has_lost_deletes_costs_who_was_away_its_blocks(
    etcd: Etcd, pair: tuple[Daemon, Daemon]
) -> None:
    one, two = pair
    both_have_all(one, two)
    two.kill()
    wait_for(lambda: not peers_of(one))
    etcd.kill()
    with pytest.raises(Unavailable, match="etcd did not keep"):  # yet what is there is deleted
        delete(one, KEYS[3:])
    assert hit(one) == 3
    etcd.empty()
    etcd.start()
    two.start()
    assert hit(two) <= 3
    wait_for(lambda: met(one) and met(two))
    assert hit(one) == 3  # it was there all the time, and keeps what it has
    put(two)
    assert hit(two) == len(KEYS)
    # Now etcd keeps all, and a start finds what it had.
    two.kill()
    two.start()
    assert hit(two) == len(KEYS)


def test_who_starts_while_etcd_is_away_lends_nothing_until_it_has_applied_deletes(
    etcd: Etcd, pair: tuple[Daemon, Daemon]
) -> None:
    one, two = pair
    both_have_all(one, two)
    with Client(one.target) as client:
        client.admin.clear(SPEC.id, this_daemon_only=True)
    two.kill()
    in_etcd(etcd, lambda log: log.write(SPEC.id, KEYS[15:]))
    etcd.pause()
    try:
        two.start()
        wait_for(lambda: met(one))
        assert hit(one, KEYS[:15]) == 0
    finally:
        etcd.resume()
    wait_for(lambda: hit(two) == 15)
    wait_for(lambda: hit(one, KEYS[:15]) == 15)


def test_entries_are_bounded_and_nothing_else_is_believed(etcd: Etcd) -> None:
    all_keys = [BlockKey(secrets.token_bytes(32)) for _ in range(2 * KEYS_MAX + 1)]
    before = len(in_etcd(etcd, lambda log: log.read(0)).deletes)
    in_etcd(etcd, lambda log: log.write(SPEC.id, all_keys))
    in_etcd(etcd, lambda log: log.write(None, None))
    found = in_etcd(etcd, lambda log: log.read(0)).deletes[before:]
    assert [len(each.keys) if each.keys else 0 for each in found] == [KEYS_MAX, KEYS_MAX, 1, 0]
    assert [key for each in found[:3] for key in each.keys] == all_keys
    for wrong in (
        b"",
        b"[]",
        b"null",
        encode_delete(Delete(None, tuple(all_keys[:2]))),
        encode_delete(Delete(SPEC.id, ())),
        encode_delete(Delete(SPEC.id, tuple(all_keys[: KEYS_MAX + 1]))),
        encode_delete(Delete(SPEC.id, (BlockKey(b"short"),))),
        encode_delete(Delete(NamespaceId(b"n" * 65), None)),
        b" " * (64 << 10) + encode_delete(Delete(SPEC.id, None)),
    ):
        with pytest.raises(InvalidRequest):
            decode_delete(wrong)
    many = all_keys[:1] * (KEYS_MAX * ENTRIES_MAX)
    with pytest.raises(Unavailable, match="whole namespaces"):
        in_etcd(etcd, lambda log: log.write(SPEC.id, many))


def test_a_delete_says_whom_it_reaches(pair: tuple[Daemon, Daemon]) -> None:
    put(pair[0])
    options = ["--target", pair[0].target, "--namespace", SPEC.id.hex()]
    done = CliRunner().invoke(main, ["delete", *options, KEYS[-1].hex()])
    assert done.output == "deleted 1 of 1 blocks, fleet: kept\n"
    done = CliRunner().invoke(main, ["clear", *options, "--json"])
    assert json.loads(done.output)["fleet"] == "kept"
