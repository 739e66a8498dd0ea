"""Errors on the wire: a gRPC status for any client, the exact class in the trailing metadata."""

from __future__ import annotations

from typing import Final

import grpc
import grpc.aio

from kvstore.model import errors
from kvstore.model.errors import Incompatible, InvalidRequest, KVStoreError, Unavailable

ERROR_KEY: Final = "kvstore-error"
RETRY_KEY: Final = "kvstore-retry-after-s"
MESSAGE_CHARS_MAX = 1000

_CODES: dict[str, grpc.StatusCode] = {
    "InvalidRequest": grpc.StatusCode.INVALID_ARGUMENT,
    "UnknownNamespace": grpc.StatusCode.INVALID_ARGUMENT,
    "Unavailable": grpc.StatusCode.UNAVAILABLE,
    # Not UNAVAILABLE: repeating the same call cannot help, and some gRPC stacks repeat that one.
    "SessionEnded": grpc.StatusCode.FAILED_PRECONDITION,
    "CorruptBlock": grpc.StatusCode.DATA_LOSS,
    "Incompatible": grpc.StatusCode.FAILED_PRECONDITION,
    "Unauthorized": grpc.StatusCode.PERMISSION_DENIED,
    "ConfigError": grpc.StatusCode.FAILED_PRECONDITION,
}

_TOO_LARGE = "larger than max"  # what gRPC says of a message that is refused
_REASONS = {
    "Connection refused": "connection refused",
    "No such file or directory": "there is no such socket",
    "Permission denied": "permission denied",
    "Connection reset": "the connection was lost",
    "Socket closed": "the connection was lost",
    "Broken pipe": "the connection was lost",
    "GOAWAY": "it is being stopped",
    "timed out": "no answer in time",
    "No route to host": "no route to host",
    "Network is unreachable": "the network is unreachable",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the authorities in tls_ca",
    "Hostname Verification": "its certificate is of another name: see server_name",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "certificate required": "it asks for a client certificate: tls_cert, tls_key",
    "DNS": "the name of the host is not known",
}


def status_of(error: KVStoreError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return the status code, message and trailing metadata for an error.

    A kind of one of the public errors is that error to a client.
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    name = next((name for name in names if name in _CODES), names[0])
    metadata = [(ERROR_KEY, name)]
    if isinstance(error, Unavailable):
        metadata.append((RETRY_KEY, f"{error.retry_after_s:g}"))
    code = _CODES.get(name, grpc.StatusCode.INTERNAL)
    return code, str(error)[:MESSAGE_CHARS_MAX], tuple(metadata)


def error_of(error: grpc.aio.AioRpcError, target: str) -> KVStoreError:
    """Return the kvstore error a failed call stands for."""
    metadata = {str(key): value for key, value in error.trailing_metadata() or ()}
    message = error.details() or error.code().name
    name = metadata.get(ERROR_KEY)
    if name in _CODES:
        return _named(str(name), message, str(metadata.get(RETRY_KEY, "")))
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"no kvstore daemon answers at {target}{_why(message)}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"the kvstore daemon at {target} did not answer in time")
        case grpc.StatusCode.UNIMPLEMENTED:
            return Incompatible(f"what answers at {target} does not know this call: {message}")
        case code if code is grpc.StatusCode.INVALID_ARGUMENT or _TOO_LARGE in message:
            return InvalidRequest(message)
    return Unavailable(f"the call to {target} failed: {error.code().name}: {message}")


def _why(message: str) -> str:
    """Return the reason in what gRPC says: that names the address three times, in its own way."""
    return next((f": {words}" for part, words in _REASONS.items() if part in message), "")


def is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Tell whether a living daemon refused the call, rather than the transport."""
    return any(key == ERROR_KEY for key, _ in error.trailing_metadata() or ())


def is_without_effect(error: KVStoreError) -> bool:
    """Tell whether a failed call was not sent, or was refused: then nothing came of it."""
    cause = error.__cause__
    return not isinstance(cause, grpc.aio.AioRpcError) or is_answer(cause)


def _named(name: str, message: str, retry_after_s: str) -> KVStoreError:
    kind: type[KVStoreError] = getattr(errors, name)
    if issubclass(kind, Unavailable):
        try:
            return kind(message, retry_after_s=min(60.0, max(0.0, float(retry_after_s))))
        except ValueError:
            return kind(message)
    return kind(message)
