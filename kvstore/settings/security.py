"""Who may ask over TCP, and how they show it: TLS, tokens, the audit log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.model.tenant import Role, role_of
from kvstore.settings.declare import setting
from kvstore.settings.root_key import RootKeySettings
from kvstore.settings.values import is_loopback, is_path, parse_listen

if TYPE_CHECKING:
    from kvstore.settings.sections import Settings

JOURNAL = "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """TLS of server.listen and server.metrics_listen. Files are read again when they change."""

    cert: str = setting(
        'PEM file with the daemon\'s certificate, then those that signed it; "" is no TLS. '
        "Unreadable or mismatched files keep the last good pair in use.",
        "",
    )
    key: str = setting("PEM file with the key of tls.cert, without a passphrase; mode 0600.", "")
    client_ca: str = setting(
        "PEM file with the certificate authorities of clients; needs tls.require_client_cert.", ""
    )
    require_client_cert: bool = setting(
        "Let only clients in that have a certificate of tls.client_ca. Its names (SAN) say "
        "which tenant the client belongs to, if there are several.",
        False,
    )
    client_role: str = setting(
        "What a client with a certificate and no token may do: reader, writer, operator or admin.",
        Role.WRITER.word,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings(RootKeySettings):
    """Credentials, the record of what they were used for, and encryption of what is stored."""

    tokens: str = setting(
        "File of the tokens that are let in over TCP, made by `kvstore token create`; mode "
        '0600, read again when it changes. "" is no tokens.',
        "",
    )
    audit: str = setting(
        'File of the audit log, or `journal` for systemd\'s; "" is no audit log. It tells '
        "refusals and what changes or reveals data, and never keys, tokens or prompts.",
        "",
    )
    audit_key: str = setting(
        "File of the key that chains the lines of the audit log, made at the first start. "
        'Keep it where readers of the log cannot write. "" is <security.audit>.key.',
        "",
    )


def has_credentials(settings: Settings) -> bool:
    """Tell whether callers over TCP have to show who they are."""
    return bool(settings.security.tokens) or settings.tls.require_client_cert


def listen_address(settings: Settings) -> tuple[str, int] | None:
    """Return (host, port) of server.listen, None for "". Raises ConfigError."""
    return _address(settings, "server.listen", settings.server.listen)


def metrics_address(settings: Settings) -> tuple[str, int] | None:
    """Return (host, port) of server.metrics_listen, None for "". Raises ConfigError."""
    server = settings.server
    if server.metrics_open:
        return parse_listen("server.metrics_listen", server.metrics_listen, loopback_only=False)
    return _address(settings, "server.metrics_listen", server.metrics_listen)


def metrics_are_open(settings: Settings) -> bool:
    """Tell whether everybody who reaches server.metrics_listen may read /metrics: by
    server.metrics_open, or on loopback of a daemon that has one user and asks nobody."""
    if settings.server.metrics_open:
        return True
    address = metrics_address(settings)
    asks = has_credentials(settings) or bool(settings.tenants)
    return not asks and address is not None and is_loopback(address[0])


def _address(settings: Settings, key: str, text: str) -> tuple[str, int] | None:
    secured = bool(settings.tls.cert) and has_credentials(settings)
    return parse_listen(key, text, loopback_only=not secured)


def check_security(settings: Settings) -> None:
    """Raise ConfigError on settings that would let anybody in by mistake, or that go nowhere."""
    tls, security = settings.tls, settings.security
    for key, path in (
        ("tls.cert", tls.cert),
        ("tls.key", tls.key),
        ("tls.client_ca", tls.client_ca),
        ("security.tokens", security.tokens),
        ("security.audit", security.audit),
        ("security.audit_key", security.audit_key),
    ):
        if not is_path(path):
            raise ConfigError(f"{key}={path!r} is not a path")
    if bool(tls.cert) != bool(tls.key):
        raise ConfigError("tls.cert and tls.key go together: set both")
    if bool(tls.client_ca) != tls.require_client_cert:
        raise ConfigError("tls.client_ca and tls.require_client_cert=true go together: set both")
    if tls.client_ca and not tls.cert:
        raise ConfigError("tls.client_ca needs TLS: set tls.cert and tls.key")
    try:
        role_of(tls.client_role)
    except InvalidRequest as error:
        raise ConfigError(f"tls.client_role: {error}") from error
    if security.audit == JOURNAL and not security.audit_key:
        raise ConfigError("security.audit=journal needs a file: set security.audit_key")
    names = [name for tenant in settings.tenants for name in tenant.names]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"tenants: the certificate's name {twice!r} stands for two of them")
    _check_listen(settings)


def _check_listen(settings: Settings) -> None:
    server = settings.server
    metrics_address(settings)
    if server.metrics_open and has_credentials(settings):
        raise ConfigError(
            "server.metrics_open=true lets everybody read /metrics without credentials, and there "
            "are some: leave it out"
        )
    if listen_address(settings) is None:
        return
    if has_credentials(settings):
        if server.listen_open:
            raise ConfigError(
                "server.listen_open=true lets every user of this host in without credentials, and "
                "there are some: leave it out"
            )
        return
    if not server.listen_open:
        raise ConfigError(
            f"server.listen={server.listen!r} lets every user of this host read, record and wipe "
            "the cache, because TCP alone does not authenticate: set tls.cert, tls.key and "
            "security.tokens. If you want it open, add --set server.listen_open=true; if not, set "
            'server.listen="" and use the unix socket'
        )
