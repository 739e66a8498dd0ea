"""gRPC's health service: https://github.com/grpc/grpc/blob/master/doc/health-checking.md.

Anybody may ask it, with or without a credential. A watch lasts as long as its watcher likes, so
there are few at once: watchers must not take the place of calls. Others hear that there is no such
thing as a watch, after which gRPC's clients do without. One that does not read holds up nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.server.health import BEAT_S

if TYPE_CHECKING:
    import grpc.aio

    _Context = grpc.aio.ServicerContext[Any, Any]

WATCHES_MAX = 32
_States = health_pb2.HealthCheckResponse


class GrpcHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Says whether services are served: "" is all of them."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {"": _States.SERVING}
        self._watches = 0

    def set(self, service: str, *, ready: bool) -> None:
        """Say of a service whether it is served now."""
        self._states[service] = _States.SERVING if ready else _States.NOT_SERVING

    async def Check(self, request: Any, context: _Context) -> Any:  # noqa: N802
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return _States(status=state)

    async def Watch(self, request: Any, context: _Context) -> None:  # noqa: N802
        if self._watches >= WATCHES_MAX:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, f"{WATCHES_MAX} watch already: use Check"
            )
        self._watches += 1
        try:
            told = None
            while True:
                state = self._states.get(request.service, _States.SERVICE_UNKNOWN)
                if state != told:
                    await context.write(_States(status=state))
                    told = state
                await asyncio.sleep(BEAT_S)
        finally:
            self._watches -= 1
