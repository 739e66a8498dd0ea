"""Settings -> who is let in over TCP, and by which certificate the daemon is known there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from kvstore.model.errors import Unauthorized
from kvstore.model.tenant import Principal, Role, role_of
from kvstore.server.credentials import Credentials, TokenFile, evidence_of
from kvstore.server.identity import OPEN_LOOPBACK, Fixed, Identity
from kvstore.server.tls import Certificates
from kvstore.settings import Settings, has_credentials

WATCH_S = 0.25  # between two looks at the files
CLOSED = (
    "metrics of several tenants are told to credentials only: set security.tokens, and let the "
    "scraper show a token of the role admin; or set server.metrics_open=true, if everybody who "
    "reaches this port may see what each tenant does"
)


class CertifiedNames:
    """Returns name in a client's certificate -> tenant, as the settings are now; None where there
    is one tenant, whose every certificate then is."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._seen: Settings | None = None
        self._names: dict[str, str] | None = None

    def __call__(self) -> Mapping[str, str] | None:
        settings = self._settings()
        if settings is not self._seen:
            names = {name: each.name for each in settings.tenants for name in each.names}
            self._seen, self._names = settings, names if settings.tenants else None
        return self._names


class TcpAccess:
    """What the TCP listener and the HTTP port need to know of credentials."""

    def __init__(
        self,
        settings: Settings,
        reloaded: Callable[[str, str], None],
        *,
        certified: Callable[[], Mapping[str, str] | None],
    ) -> None:
        """reloaded: is told what file was read again, and "ok" or why not; by any thread.
        certified: see `CertifiedNames`. Raises ConfigError."""
        self._metrics_open = settings.server.metrics_open
        self._tokens: TokenFile | None = None
        self.certificates: Certificates | None = None
        if settings.tls.cert:
            self.certificates = Certificates(settings.tls, reloaded)
        if settings.security.tokens:
            self._tokens = TokenFile(Path(settings.security.tokens), reloaded)
        # What the port tells is of all tenants.
        self._metrics_role = Role.ADMIN if settings.tenants else Role.OPERATOR
        self._credentials: Credentials | None = None
        if has_credentials(settings):
            self._credentials = Credentials(
                self._tokens,
                certificates=certified if settings.tls.require_client_cert else None,
                client_role=role_of(settings.tls.client_role),
            )

    @property
    def identity(self) -> Identity:
        """Who makes the calls that come over TCP."""
        return self._credentials or Fixed(OPEN_LOOPBACK)

    def guard(self) -> dict[str, bool]:
        """Return what decides who may use the TCP address."""
        return {
            "tls": self.certificates is not None,
            "asks_who": self._credentials is not None,
            "metrics_open": self._metrics_open,
        }

    @property
    def changes(self) -> bool:
        """Whether there are files to `look` at."""
        return self._credentials is not None or self.certificates is not None

    async def look(self) -> None:
        """Take what has changed in the files."""
        if self._tokens is not None:
            await self._tokens.look()
        if self.certificates is not None:
            await asyncio.to_thread(self.certificates.look)

    def caller(
        self, authorization: str, names: tuple[str, ...] | None, host: str
    ) -> Principal | None:
        """Return who asks by HTTP; None where nobody has credentials. Raises Unauthorized. Any
        thread may call it."""
        if self._credentials is None:
            return None
        evidence = evidence_of(authorization, names)
        return self._credentials.admit_evidence(evidence, host).principal

    def check_metrics(
        self, authorization: str, names: tuple[str, ...] | None, host: str, tenant: str
    ) -> None:
        """Raise Unauthorized for who may not read the metrics. Any thread may call it.

        authorization: the header. names: in the client's certificate, None without one. tenant:
        whose metrics are asked for; "": all.
        """
        principal = self.caller(authorization, names, host)
        if principal is None:
            raise Unauthorized(CLOSED, reason="credential")
        own = tenant == principal.tenant
        needed = Role.OPERATOR if own else self._metrics_role
        if principal.role < needed or (tenant and not own and principal.role < Role.ADMIN):
            raise Unauthorized(f"these metrics take the role {needed.word}", reason="role")
