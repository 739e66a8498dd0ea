"""More daemons than are asked each time: who has a prefix is known from what they tell."""

from __future__ import annotations

from kvstore import Client
from kvstore.model.block import Group, Namespace
from kvstore.model.keys import KeyChain, root_key
from tests.cluster.fleet import fleet, wait_for

SPEC = Namespace(16, (Group("all", 4096),), (("model", "view"),))
ROOM = ("dram.capacity=16MiB", "dram.extent=8MiB")


def prefix(name: int) -> list[bytes]:
    return KeyChain(root_key(SPEC.id), 16).update([name] * 16 * 64)


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
            totals = clients[0].admin.stats()["totals"]
            assert totals["peer_reads"] == {"read": 1}
        finally:
            for client in clients:
                client.close()
