"""Errors of an object store, as types that callers can tell apart.

The messages are our own. The library's message may quote a signed URL. So neither its text nor its
exception (a traceback would print a cause) is passed on.
"""

from __future__ import annotations

from enum import StrEnum

from kvstore.model.errors import Unavailable


class Cause(StrEnum):
    """What the operator has to mend: see `advice`."""

    NONE = ""  # no known cause
    CREDENTIALS = "credentials"  # there are none
    FORBIDDEN = "forbidden"  # they have too few rights
    BUCKET = "bucket"  # there is none of this name
    REGION = "region"
    NAME = "name"  # DNS
    CONNECTION = "connection"
    TLS = "tls"


class ObjectGone(Unavailable):
    """There is no such object: it was collected. A miss."""


class ObjectExists(Unavailable):
    """There is an object of that name: somebody else was faster. Nothing was stored."""


class ObjectRefused(Unavailable):
    """Credentials, permissions, or a bucket that does not exist: a retry cannot help."""

    def __init__(self, message: str, *, reason: str, cause: Cause = Cause.NONE) -> None:
        super().__init__(message, reason=reason)
        self.cause = cause


class ObjectFailed(Unavailable):
    """It may work later. reason: timeout, throttled, server, connection, short; busy, long: our own
    bounds; breaker: not tried."""

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        cause: Cause = Cause.NONE,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s)
        self.cause = cause
