"""Where clients, scrapers and people reach the daemon."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.settings.declare import setting
from kvstore.settings.places import default_socket
from kvstore.settings.tenants import SOCKET_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where clients reach the daemon."""

    socket: str = setting(
        "Path of the unix socket, at most 101 bytes, mode 0600, in a directory of mode "
        "0700. Two more sockets are beside it: <socket>.arena hands out the arena, and "
        "<socket>.calls takes frequent calls. Clients without a target try the same "
        "default places.",
        factory=default_socket,
    )
    sockets: str = setting(
        "Directory in which each tenant has a directory of sockets of its own, to be mounted "
        'into its containers; "" is the directory of `socket`. Without [tenants.NAME] nothing '
        "is made there.",
        "",
    )
    listen: str = setting(
        'TCP address for clients without shared memory; port 0 takes a free port, "" '
        "switches TCP off. It needs credentials: security.tokens or "
        "tls.require_client_cert, or else server.listen_open. Beyond loopback it needs "
        "tls.cert as well.",
        "",
    )
    listen_open: bool = setting(
        "Allow server.listen without credentials: every user of this host may then read, "
        "record and wipe the cache.",
        False,
    )
    metrics_listen: str = setting(
        "HTTP address of /metrics for Prometheus, /healthz (200 while the event loop "
        "answers) and /readyz (503 while clients should use another daemon). Port 0 "
        'takes a free port, "" switches it off. On loopback, without credentials and tenants, '
        "every user of this host may read counts, sizes, times and directories there, but no keys "
        "and no prompts, and ask /v1/match whether a prompt that they know is stored. Otherwise "
        "/metrics takes a credential of the role operator, or admin of several tenants. "
        "Beyond loopback it needs tls.cert and credentials. With tls.cert it is HTTPS. "
        "server.metrics_open allows it without both.",
        "127.0.0.1:7701",
    )
    metrics_open: bool = setting(
        "Allow server.metrics_listen beyond loopback without TLS and credentials: everybody "
        "who reaches it may read counts, sizes, times and directories, of every tenant, and, "
        "without tenants, ask /v1/match whether a prompt that they know is stored. For networks "
        "that keep others away, such as a pod's behind a NetworkPolicy.",
        False,
    )
    page: bool = setting(
        "Serve a page for people at / of server.metrics_listen. It needs the extra "
        "kvstore-tiers[web], and beyond loopback tls.cert. It shows what a credential's role may "
        "see; without credentials it wants the token that `kvstore page` prints.",
        True,
    )
    page_hosts: str | tuple[str, ...] = setting(
        "Names by which browsers reach the page, beside localhost, this host's name and the "
        "address of server.metrics_listen: of a certificate, or of a proxy. A request for another "
        "name is refused, so that no site can point a name of its own here.",
        "",
    )
    traces_endpoint: str = setting(
        "OTLP over HTTP address that receives a span for each call, e.g. "
        'http://127.0.0.1:4318/v1/traces; "" switches tracing off. Needs the extra '
        "kvstore-tiers[otel]; costs about 0.1 ms a call.",
        "",
    )
    log_level: str = setting(
        "Lowest level that is logged: debug, info, warning or error.", "info", live=True
    )
    log_format: str = setting(
        "text: key=value pairs. json: one object per line, with a field for each pair.", "text"
    )
    drain_s: float = setting(
        "Most seconds that each step of a stop may take after SIGTERM: running calls, the last "
        "flush, uploads. A stop takes at most five times as long. Longer keeps more blocks; "
        "shorter restarts sooner.",
        10.0,
    )

    @property
    def socket_path(self) -> Path:
        """The socket's path in full."""
        return Path(os.path.abspath(self.socket))

    @property
    def page_names(self) -> tuple[str, ...]:
        """The names that page_hosts lists."""
        hosts = self.page_hosts
        return hosts if isinstance(hosts, tuple) else (hosts,) * bool(hosts)

    def tenant_socket_path(self, tenant: str) -> Path:
        """The path of one tenant's socket."""
        sockets = Path(os.path.abspath(self.sockets)) if self.sockets else self.socket_path.parent
        return sockets / tenant / SOCKET_NAME
