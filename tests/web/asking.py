"""Asks a daemon's page as a browser would, or as one that should not."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    port: int,
    path: str = "/",
    *,
    token: str = "",
    method: str = "GET",
    body: str | None = None,
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    """headers: Host, Cookie and others; _ stands for -."""
    if tls is not None:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=10, context=tls
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    shown = {name.replace("_", "-"): value for name, value in headers.items()}
    if token:
        shown["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, body, shown)
        reply = connection.getresponse()
        told = {name.lower(): value for name, value in reply.getheaders()}
        return Answer(reply.status, reply.read(), told)
    finally:
        connection.close()


def token_of(daemon: Daemon) -> str:
    """Return the token in the address that the daemon prints, once it serves."""
    until(lambda: daemon.page_address)
    return parse_qs(urlsplit(daemon.page_address).query)["token"][0]
