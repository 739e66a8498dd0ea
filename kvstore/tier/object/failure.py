"""What an object store does wrong, as outcomes a caller can tell apart.

The messages are our own. What the library says may quote a URL with a signature in it, so neither
its text nor its exception (as a cause, which a traceback would print) goes further than here.
"""

from __future__ import annotations

from kvstore.errors import Unavailable


class ObjectGone(Unavailable):
    """There is no such object: somebody collected it. A miss."""


class ObjectRefused(Unavailable):
    """Credentials, permissions, or a bucket that does not exist: repeating it cannot help."""


class ObjectFailed(Unavailable):
    """It may work later. reason: timeout, throttled, server, connection, short; busy, long: our own
    bounds; breaker: not even tried."""
