"""More daemons than are asked each time: who has a prefix is known from what they tell."""

from __future__ import annotations

import json
import urllib.request

from kvstore import Client
from kvstore.model.block import Group, Namespace
from kvstore.model.keys import KeyChain, root_key
from tests.cluster.fleet import fleet, wait_for

SPEC = Namespace(16, (Group("all", 4096),), (("model", "view"),))
ROOM = ("dram.capacity=16MiB", "dram.extent=8MiB")


def prefix(name: int) -> list[bytes]:
    return KeyChain(root_key(SPEC.id), 16).update([name] * 16 * 64)


def who_has_it_is_said_without_asking(clients: list[Client], port: int) -> None:
    """By gRPC and by HTTP: what this host lacks, and which one has it."""
    nodes = [client.admin.stats()["fleet"]["node"] for client in clients]
    keys = prefix(4)

    def said() -> list[tuple[str, int]]:
        match = clients[1].match(SPEC.id, keys, fleet=True)
        assert match.hit_blocks == 0
        return [(holder.node, holder.blocks) for holder in match.holders]

    wait_for(lambda: said() == [(nodes[4], 64)])
    assert clients[1].match(SPEC.id, keys).holders == ()
    body = json.dumps({"namespace": SPEC.id.hex(), "keys": [key.hex() for key in keys]})
    url = f"http://127.0.0.1:{port}/v1/match"
    with urllib.request.urlopen(url, body.encode(), timeout=20) as answer:
        told = json.loads(answer.read())
    (found,) = told["namespaces"]
    assert (told["node"], found["hit_blocks"], found["asked_blocks"]) == (nodes[1], 0, 64)
    assert [(each["node"], each["blocks"]) for each in found["peers"]] == [(nodes[4], 64)]


def test_a_prefix_is_found_among_many_hosts() -> None:
    with fleet(6, *ROOM, file=False) as daemons:
        clients = [Client(each.target) for each in daemons]
        try:
            for number, client in enumerate(clients):
                client.register(SPEC)
                keys = prefix(number)
                client.put(SPEC.id, keys, [bytes([number]) * 4096] * len(keys))

            def borrowed(borrower: int, lender: int) -> bool:
                keys = prefix(lender)
                grant = clients[borrower].acquire(SPEC.id, keys, wait_s=2.0)
                good = all(
                    slot is not None and clients[borrower].view(slot) == bytes([lender]) * 4096
                    for slot in grant.slots
                )
                assert clients[borrower].release(grant.lease_id) == [True]
                assert good
                return grant.hit_blocks == len(keys)

            for borrower, lender in ((0, 5), (3, 1), (5, 0)):
                wait_for(lambda b=borrower, n=lender: borrowed(b, n))
            who_has_it_is_said_without_asking(clients, daemons[1].metrics_port)
            totals = clients[0].admin.stats()["totals"]
            assert totals["peer_reads"] == {"read": 1}
        finally:
            for client in clients:
                client.close()
