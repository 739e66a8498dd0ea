"""The service on the daemon's own socket where no tenant is `default`: it has no blocks."""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore.model.errors import Unauthorized
from kvstore.model.tenant import Role
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.server.boundary import Context
from kvstore.server.config_calls import ConfigCalls
from kvstore.server.identity import CALLER
from kvstore.server.rights import NO_RIGHT
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.store.live_settings import LiveSettings
from kvstore.transport.arena_host import check_version


class OperatorCalls(ConfigCalls):
    """Looks after the daemon and its tenants; blocks are asked for at a tenant's own socket."""

    def __init__(
        self,
        *,
        version: str,
        instance: str,
        config: LiveSettings,
        admin: TenantAdmin,
        stats: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        """stats: of all tenants together, and of each."""
        super().__init__(config, admin)
        self._version = version
        self._instance = instance
        self._stats = stats

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionReply:
        check_version(request.rpc_version)
        if request.token:
            raise _elsewhere()
        return pb.OpenSessionReply(instance=self._instance, server_version=self._version)

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        return pb.StatsReply(json=json.dumps(await self.look()))

    async def look(self) -> dict[str, Any]:
        """Return what Stats says. Raises Unauthorized."""
        if CALLER.get().role is not Role.ADMIN:
            raise Unauthorized("the stats of all tenants take the role admin", reason=NO_RIGHT)
        about = {"version": self._version, "instance": self._instance, "pid": os.getpid()}
        return about | await self._stats()

    def counted(self) -> dict[str, Any]:
        """Return nothing: `look` has all."""
        return {}


def _elsewhere() -> Unauthorized:
    return Unauthorized(
        "this socket is the operator's and has no blocks: each tenant has a socket of its own, in "
        "a directory of its name (see `kvstore tenant list`), or name [tenants.default]"
    )


def _refusal(name: str) -> Any:
    async def refuse(self: Any, request: Any, context: Context) -> Any:
        raise _elsewhere()

    async def refuse_all(self: Any, request: Any, context: Context) -> Any:
        raise _elsewhere()
        yield  # a method with several replies

    return refuse_all if _METHODS[name].server_streaming else refuse


_METHODS = pb.DESCRIPTOR.services_by_name["KVStore"].methods_by_name
_REFUSED = {
    name: _refusal(name)
    for name in _METHODS
    if getattr(OperatorCalls, name) is getattr(rpc.KVStoreServicer, name)
}
OperatorService: Any = type("OperatorService", (OperatorCalls,), _REFUSED)
