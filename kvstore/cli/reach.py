"""Who can reach a daemon, by which address, and what they may do there."""

from __future__ import annotations

from typing import Any

from kvstore.client.trust import user_name
from kvstore.settings import (
    Settings,
    has_credentials,
    is_loopback,
    listen_address,
    metrics_address,
)
from kvstore.store.findings import Finding, note, ok, wrong

ALL_OF_IT = "may read, record and wipe the cache"


def reach(stats: dict[str, Any]) -> list[Finding]:
    """Say who may ask the daemon that told these statistics; nothing of one that does not tell."""
    addresses = stats.get("addresses")
    if not addresses:
        return []
    guard = addresses.get("tcp_guard", {})  # of a release that has no credentials: none
    asks_who = bool(guard.get("asks_who"))
    return [
        _socket(addresses["socket"]),
        _tcp(addresses["tcp"], guard),
        _metrics(
            addresses["metrics"],
            is_open=guard.get("metrics_open", False),
            matches=not (asks_who or "tenants" in stats),
        ),
        *_page(addresses, asks_who=asks_who),
    ]


def reach_of(settings: Settings) -> list[Finding]:
    """Say who could ask a daemon with these settings, other than by its unix socket."""
    guard = {"tls": bool(settings.tls.cert), "asks_who": has_credentials(settings)}
    server = settings.server
    return [
        _tcp(server.listen if listen_address(settings) else "", guard),
        _metrics(
            server.metrics_listen if metrics_address(settings) else "",
            is_open=server.metrics_open,
            matches=not (guard["asks_who"] or settings.tenants),
        ),
    ]


def _socket(guard: dict[str, Any]) -> Finding:
    about, path = "unix socket", guard["path"]
    if "mode" not in guard:
        return wrong(about, f"{path} has been removed: no new client finds it", "restart kvstore")
    mode, directory = int(guard["mode"], 8), int(guard["directory_mode"], 8)
    owner = user_name(guard["uid"])
    text = f"{path}, mode {guard['mode']} in a directory of {guard['directory_mode']}, of {owner}"
    if mode & 0o002 and directory & 0o001:
        return wrong(about, f"{text}: every user of this host {ALL_OF_IT}", f"chmod 600 {path}")
    if mode & 0o020 and directory & 0o010:
        return note(about, f"{text}: every user of its group {ALL_OF_IT}", f"chmod 600 {path}")
    return ok(about, f"{text}: only this user and root may use it")


def _tcp(address: str, guard: dict[str, bool]) -> Finding:
    if not address:
        return ok("tcp", "off")
    if guard.get("asks_who"):
        how = "over TLS" if guard.get("tls") else "in the clear, so only behind a proxy"
        return ok("tcp", f"{address}, {how}: each call shows a certificate or a token")
    return note(
        "tcp",
        f"{address} is open: every user of this host {ALL_OF_IT}",
        'set server.listen="" unless you want that, or give it tls.cert and security.tokens; the '
        "unix socket authenticates its users",
    )


def _page(addresses: dict[str, Any], *, asks_who: bool) -> list[Finding]:
    if not addresses["metrics"] or "page" not in addresses:
        return []  # a release before the page
    if not addresses["page"]:
        text = (
            "none: server.page is false, kvstore-tiers[web] is missing, or the address is beyond "
            "loopback without tls.cert"
        )
        return [ok("page", text)]
    if asks_who:
        return [ok("page", f"{addresses['metrics']}: shows what a credential's role may see")]
    return [ok("page", f"{addresses['metrics']}: wants its token, which `kvstore page` prints")]


def _metrics(address: str, *, is_open: bool, matches: bool) -> Finding:
    """matches: whether /v1/match asks nobody who they are."""
    if not address:
        return ok("metrics", "off")
    told = "counts, sizes and times"
    if matches:
        told += ", and ask whether a prompt that they know is stored"
    if not is_loopback(address.rpartition(":")[0].strip("[]")):
        if is_open:
            text = f"{address} is open: everybody who reaches it may read {told}"
            return note("metrics", text, "let a NetworkPolicy or a firewall say who reaches it")
        return ok("metrics", f"{address}, over TLS: /metrics takes the role operator")
    if is_open or matches:
        return ok("metrics", f"{address}: every user of this host may read {told}")
    return ok("metrics", f"{address}: /metrics takes a credential of the role operator or admin")
