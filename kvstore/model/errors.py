"""The errors of the public surface. A miss and a full tier are return values, never errors."""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of every error that kvstore raises on purpose."""


class InvalidRequest(KVStoreError):
    """The call is wrong; repeating it does not help. It changed nothing."""


class UnknownNamespace(InvalidRequest):
    """The daemon does not know this namespace id, or forgot it (after a restart, or after too many
    others). Register the namespace and repeat the call; the clients of this library do so."""


class Unavailable(KVStoreError):
    """The daemon cannot answer now. Nothing is lost; try again after `retry_after_s`.

    reason: one word for the metrics of the side that refuses, "" where the class is enough.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class SessionEnded(Unavailable):
    """The session is over: the daemon restarted, or a process of it died. Open a new one."""


class CorruptBlock(KVStoreError):
    """Bytes did not match their checksum. The block was dropped; recompute it."""


class Incompatible(KVStoreError):
    """The two sides speak different versions of a format or of the RPC."""


class Unauthorized(KVStoreError):
    """The caller may not do this.

    reason: one word for the metrics of the side that refuses, "" where the class is enough.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(KVStoreError):
    """A setting is unknown, malformed or impossible on this machine."""
