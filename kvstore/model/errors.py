"""The errors of the public surface. A miss and a full tier are return values, never errors."""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of every error kvstore raises on purpose."""


class InvalidRequest(KVStoreError):
    """The call itself is wrong; repeating it cannot help. Nothing was changed."""


class UnknownNamespace(InvalidRequest):
    """The daemon does not know what this namespace id stands for, or has forgotten it (restart, or
    too many others since). Register it and repeat the call; this library's clients do so."""


class Unavailable(KVStoreError):
    """The daemon cannot answer now. Nothing is lost; try again after `retry_after_s`.

    reason: one word for the metrics of the side that refuses, "" where the class says enough.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class SessionEnded(Unavailable):
    """The daemon no longer knows this session (restart, or a member died). Open a new one."""


class CorruptBlock(KVStoreError):
    """Bytes did not match their checksum. The block was dropped; recompute it."""


class Incompatible(KVStoreError):
    """The two sides speak different versions of a format or of the RPC."""


class Unauthorized(KVStoreError):
    """The caller may not do this."""


class ConfigError(KVStoreError):
    """A setting is unknown, malformed or impossible on this machine."""
