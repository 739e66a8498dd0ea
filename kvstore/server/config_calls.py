"""Calls about the daemon itself: its settings, its tenants, its log, who asks."""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

from kvstore.model.errors import InvalidRequest
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.server.boundary import Context
from kvstore.server.identity import CALLER
from kvstore.server.requests import seconds_of
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.store.live_settings import LiveSettings
from kvstore.system.logs import LAST_LINES, LINES_MAX

ASSIGNMENTS_MAX = 256


class ConfigCalls(rpc.KVStoreServicer):
    """The part of the service that needs no store."""

    def __init__(self, config: LiveSettings, admin: TenantAdmin) -> None:
        self._config = config
        self._admin = admin

    async def GetConfig(self, request: pb.GetConfigRequest, context: Context) -> pb.GetConfigReply:
        return pb.GetConfigReply(
            settings=[pb.Setting(**entry._asdict()) for entry in self._config.entries()],
            path=str(self._config.path or ""),
        )

    async def SetConfig(self, request: pb.SetConfigRequest, context: Context) -> pb.SetConfigReply:
        if len(request.assignments) > ASSIGNMENTS_MAX:
            raise InvalidRequest(f"{len(request.assignments)} settings in one call")
        wait_s = seconds_of("wait_s", request.wait_s)
        done = await self._config.change(list(request.assignments), wait_s)
        return pb.SetConfigReply(
            changed=[pb.ChangedSetting(**each._asdict()) for each in done.changed],
            pending=done.pending,
        )

    async def LogLines(self, request: pb.LogLinesRequest, context: Context) -> pb.LogLinesReply:
        return pb.LogLinesReply(lines=LAST_LINES.lines(request.limit or LINES_MAX))

    async def AddTenant(self, request: pb.AddTenantRequest, context: Context) -> pb.AddTenantReply:
        if len(request.assignments) > ASSIGNMENTS_MAX:
            raise InvalidRequest(f"{len(request.assignments)} settings in one call")
        path = await self._admin.add(request.name, list(request.assignments))
        return pb.AddTenantReply(socket=str(path))

    async def DeleteTenant(
        self, request: pb.DeleteTenantRequest, context: Context
    ) -> pb.DeleteTenantReply:
        return pb.DeleteTenantReply(**(await self._admin.delete(request.name))._asdict())

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Context) -> pb.WhoAmIReply:
        principal = CALLER.get()
        return pb.WhoAmIReply(
            tenant=principal.tenant, name=principal.name, role=principal.role.word
        )
