"""Every method of the .proto, asked by gRPC with whatever credential a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import grpc
from google.protobuf import message_factory

from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods]
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
ANSWERED, UNAUTHORIZED = "answered", "Unauthorized"
_DESCRIPTORS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods}
_KINDS = {1: 0.1, 2: 0.1, 8: False, 9: "x", 12: b"x"}
_VALUES: dict[str, Any] = {
    "rpc_version": RPC_VERSION,
    "token": "0123456789abcdef",
    "share": 1.0,
    "namespace_id": b"",
    "keys": b"k" * 32,
    "after": b"",
}


def fill(message: Any) -> Any:
    """Set every field of a message, and the first of each choice."""
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1 and oneof.fields[0] != field:
            continue
        if field.message_type is not None:
            at = getattr(message, field.name)
            fill(at.add() if field.is_repeated else at)
            continue
        value = _VALUES.get(field.name, _KINDS.get(field.type, 1))
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


def ask(channel: grpc.Channel, name: str, metadata: Sequence[tuple[str, str]] = ()) -> str:
    """Call a method. Returns "answered", or the class of the daemon's error, or gRPC's code."""
    method = _DESCRIPTORS[name]
    request = message_factory.GetMessageClass(method.input_type)
    reply = message_factory.GetMessageClass(method.output_type)
    kind = "stream" if method.client_streaming else "unary"
    kind += "_stream" if method.server_streaming else "_unary"
    call: Any = getattr(channel, kind)(
        f"/kvstore.rpc.v1.KVStore/{name}",
        request_serializer=request.SerializeToString,
        response_deserializer=reply.FromString,
    )
    filled = fill(request())
    sent = iter([filled]) if method.client_streaming else filled
    try:
        got = call(sent, timeout=10, metadata=metadata)
        if method.server_streaming:
            next(iter(got))
            got.cancel()
    except grpc.RpcError as error:
        failed = cast("grpc.Call", error)
        told = {str(key): str(value) for key, value in failed.trailing_metadata() or ()}
        return told.get("kvstore-error", failed.code().name)
    return ANSWERED


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)
