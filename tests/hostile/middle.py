"""A man in the middle of a connection over TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Self

from tests.tls import Files

PREFACE = b"PRI * HTTP/2.0"
POLL_S = 0.1


class Middle:
    """A man in the middle: ends TLS with a certificate of his own, and reads what is sent.

    seen: the first bytes of each connection that believed him.
    """

    def __init__(self, pair: Files) -> None:
        self.seen: list[bytes] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*pair)
        self._context.set_alpn_protocols(["h2"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_S)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @contextlib.contextmanager
    def listening(self) -> Iterator[Self]:
        """Listen for the time of the context."""
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()
            self._listener.close()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(2.0)
            with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
                closing.callback(connection.close)
                believed = self._context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                closing.callback(believed.close)
                believed.do_handshake()
                self.seen.append(believed.recv(1 << 14))
