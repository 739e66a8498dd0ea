"""What an object store does wrong, as outcomes a caller can tell apart.

The messages are our own. What the library says may quote a URL with a signature in it, so neither
its text nor its exception (as a cause, which a traceback would print) goes further than here.
"""

from __future__ import annotations

from enum import StrEnum

from kvstore.model.errors import Unavailable


class Cause(StrEnum):
    """What somebody would have to mend: see `advice`."""

    NONE = ""  # nothing that is known
    CREDENTIALS = "credentials"  # there are none
    FORBIDDEN = "forbidden"  # they do not suffice
    BUCKET = "bucket"  # there is none of this name
    REGION = "region"
    NAME = "name"  # DNS
    CONNECTION = "connection"
    TLS = "tls"


class ObjectGone(Unavailable):
    """There is no such object: somebody collected it. A miss."""


class ObjectRefused(Unavailable):
    """Credentials, permissions, or a bucket that does not exist: repeating it cannot help."""

    def __init__(self, message: str, *, reason: str, cause: Cause = Cause.NONE) -> None:
        super().__init__(message, reason=reason)
        self.cause = cause


class ObjectFailed(Unavailable):
    """It may work later. reason: timeout, throttled, server, connection, short; busy, long: our own
    bounds; breaker: not even tried."""

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
