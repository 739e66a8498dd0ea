"""Over TCP one tenant's calls are bounded, so that it cannot take the others' places."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

from kvstore import Client
from kvstore.model.tenant import Role
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.server.quota import CALLS_MIN
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.server.every_method import OPTIONS
from tests.server.test_credentials import Issuer

SETTINGS = (
    "server.listen=127.0.0.1:0",
    "tenants.many.weight=0.01",
    "tenants.few.weight=1000",
    *(f"tenants.{name}.dram.guaranteed=16MiB" for name in ("many", "few")),
)


def test_a_tenant_that_floods_is_refused_and_no_other(tmp_path: Path) -> None:
    issuer, go_on = Issuer(tmp_path), threading.Event()
    many, few = (
        (("authorization", f"Bearer {issuer.issue(Role.WRITER, tenant=name)}"),)
        for name in ("many", "few")
    )

    def nothing_yet() -> Iterator[pb.PutRequest]:
        go_on.wait(30)
        yield from ()

    with (
        Daemon(*SETTINGS, f"security.tokens={issuer.path}", file=False) as daemon,
        grpc.insecure_channel(daemon.start().address, options=OPTIONS) as channel,
    ):
        stub = KVStoreStub(channel)

        def ask(metadata: tuple[tuple[str, str], ...]) -> str:
            return str(stub.WhoAmI(pb.WhoAmIRequest(), metadata=metadata).tenant)

        def outcome(metadata: tuple[tuple[str, str], ...]) -> str:
            try:
                return ask(metadata)
            except grpc.RpcError as error:
                return str(error)

        assert ask(many) == "many"
        puts = [stub.Put.future(nothing_yet(), metadata=many) for _ in range(CALLS_MIN)]
        until(lambda: "calls of this tenant" in outcome(many))
        assert ask(few) == "few"
        with Client(daemon.target, arena=False) as operator:
            operator.admin.configure(["tenants.many.weight=1000"])
            assert ask(many) == "many"
            operator.admin.configure(["tenants.many.weight=0.01"])
            assert "calls of this tenant" in outcome(many)
        go_on.set()
        for put in puts:
            put.cancel()
        until(lambda: outcome(many) == "many")
        daemon.stop()
