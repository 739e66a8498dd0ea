"""Who listens on the network, and who sits in the middle of it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

ETH_P_ALL = 0x0003
PREFACE = b"PRI * HTTP/2.0"
POLL_S = 0.1


class Sniffer:
    """Every packet on loopback, as root sees it. `found`: canaries that were in one."""

    def __init__(self, canaries: dict[str, bytes]) -> None:
        self.found: set[str] = set()
        self.packets = 0
        self._canaries = canaries
        self._over = threading.Event()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(POLL_S)
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for the time of the context, and to the end of what was sent in it."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()
            self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                packet = self._socket.recv(1 << 17)
            except TimeoutError:
                if self._over.is_set():
                    return
                continue
            self.packets += 1
            self.found |= {name for name, canary in self._canaries.items() if canary in packet}


class Middle:
    """A man in the middle: ends TLS with a certificate of his own, and reads what is sent.

    seen: the first bytes of each connection that believed him.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self.seen: list[bytes] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._context.set_alpn_protocols(["h2"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_S)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
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
            with contextlib.suppress(OSError), connection:
                believed = self._context.wrap_socket(connection, server_side=True)
                self.seen.append(believed.recv(1 << 14))
