"""Who calls over TCP: the certificate of the connection and the token of the call say so.

If both are there, both must name the same tenant. What is unknown, expired or revoked gets the same
answer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from kvstore.model.errors import ConfigError, Unauthorized
from kvstore.model.tenant import DEFAULT_TENANT, Principal, Role, role_of
from kvstore.server.identity import Admitted
from kvstore.system.file_watch import Watched
from kvstore.system.token_file import Shown, Tokens, read_tokens, shown

logger = logging.getLogger(__name__)

WRONG_MAX = 10  # tokens a second that one peer may try
PEERS_MAX = 4096
RIGHT_MAX = 4096
NOT_VALID = "no valid credential: make a token by `kvstore token create`, or use a certificate"
_BEARER = "bearer "
_SAN = "x509_subject_alternative_name"


class TokenFile:
    """The tokens that are valid now. `watch` reads the file again when it changes."""

    def __init__(self, path: Path, reloaded: Callable[[str, str], None]) -> None:
        """reloaded: is told ("tokens", "ok" or what is wrong). Raises ConfigError."""
        self._path = path
        self._reloaded = reloaded
        self._watched = Watched(path)
        self._watched.changed()
        self._problem = ""
        self._tokens = Tokens(read_tokens(path))

    def find(self, token: Shown, now: float) -> Principal | None:
        """Return whose token it is, None if it is nobody's."""
        entry = self._tokens.find(token, now)
        if entry is None:
            return None
        return Principal(entry.tenant, f"token {entry.id}", role_of(entry.role))

    async def look(self) -> None:
        """Read the file if it has changed. One that is wrong leaves the tokens as they are, and is
        read again until it is right: a token may have been revoked in it."""
        if not await asyncio.to_thread(self._watched.changed):
            return
        before = self._problem
        try:
            self._tokens = Tokens(await asyncio.to_thread(read_tokens, self._path))
        except ConfigError as error:
            self._watched.again()
            self._problem = str(error)
            if self._problem != before:
                logger.warning("tokens=not_reloaded reason=%r", self._problem)
                self._reloaded("tokens", self._problem)
        else:
            self._problem = ""
            logger.info("tokens=reloaded tokens=%d", len(self._tokens))
            self._reloaded("tokens", "ok")


class Guesses:
    """Bounds the wrong tokens that a peer may try. One that was right before is no guess."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()  # the HTTP port has threads
        self._wrong: OrderedDict[str, tuple[int, int]] = OrderedDict()  # peer -> second, count
        self._right: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def check(self, peer: str, token: Shown) -> None:
        """Raise Unauthorized if this peer has tried too many, and this is another one."""
        second, count = self._wrong.get(peer, (0, 0))
        if count < WRONG_MAX or second != int(self._now()) or (peer, token.digest) in self._right:
            return
        raise Unauthorized(NOT_VALID, reason="guesses")

    def right(self, peer: str, token: Shown) -> None:
        """Note that it was let in."""
        with self._lock:
            self._right[peer, token.digest] = None
            self._right.move_to_end((peer, token.digest))
            if len(self._right) > RIGHT_MAX:
                self._right.popitem(last=False)

    def wrong(self, peer: str, token: Shown) -> None:
        """Note that it was not."""
        now = int(self._now())
        with self._lock:
            self._right.pop((peer, token.digest), None)
            second, count = self._wrong.get(peer, (now, 0))
            self._wrong[peer] = (now, count + 1 if second == now else 1)
            self._wrong.move_to_end(peer)
            if len(self._wrong) > PEERS_MAX:
                self._wrong.popitem(last=False)


class Evidence(NamedTuple):
    """What a call shows. names: of its certificate, None without one."""

    token: Shown | None
    names: tuple[str, ...] | None


class Credentials:
    """The identity of the calls of one TCP listener that asks for credentials."""

    def __init__(
        self,
        tokens: TokenFile | None,
        *,
        certificates: Callable[[], Mapping[str, str] | None] | None,
        client_role: Role,
        now: Callable[[], float] = time.time,
    ) -> None:
        """tokens: None if none are let in. certificates: name in a client certificate -> tenant,
        asked at every call, and answered by None if every certificate is the default tenant's; None
        if certificates say nothing. client_role: of who shows a certificate alone."""
        self._tokens = tokens
        self._certificates = certificates
        self._client_role = client_role
        self._now = now
        self._guesses = Guesses()

    def admit(self, context: Any) -> Admitted:
        token, peer = _bearer(context.invocation_metadata()), host_of(context.peer())
        names = _names(context.auth_context()) if self._certificates is not None else None
        return self.admit_evidence(Evidence(token, names), peer)

    def admit_evidence(self, evidence: Evidence, peer: str) -> Admitted:
        """Return who shows this. Raises Unauthorized."""
        token = evidence.token
        if token is not None:
            self._guesses.check(peer, token)
        try:
            principal = self._principal(evidence)
        except Unauthorized:
            if token is not None:
                self._guesses.wrong(peer, token)
            raise
        if token is not None:
            self._guesses.right(peer, token)
        return Admitted(principal, lambda: self._is_still(evidence, principal))

    def _is_still(self, evidence: Evidence, principal: Principal) -> bool:
        try:
            return self._principal(evidence) == principal
        except Unauthorized:
            return False

    def _principal(self, evidence: Evidence) -> Principal:
        certified = self._certified(evidence.names)
        if evidence.token is None:
            if certified is None:
                raise Unauthorized(NOT_VALID, reason="credential")
            return certified
        found = self._tokens.find(evidence.token, self._now()) if self._tokens else None
        if found is None:
            raise Unauthorized(NOT_VALID, reason="credential")
        if certified is not None and certified.tenant != found.tenant:
            raise Unauthorized(
                "the certificate and the token are of different tenants", reason="tenant"
            )
        return found

    def _certified(self, names: tuple[str, ...] | None) -> Principal | None:
        """Return whose certificate it is, None for nobody's."""
        if names is None or self._certificates is None:
            return None
        tenants = self._certificates()
        if tenants is None:
            name = names[0] if names else "a certificate without names"
            return Principal(DEFAULT_TENANT, f"certificate {name}", self._client_role)
        found = {tenants[name]: name for name in names if name in tenants}
        if len(found) > 1:
            raise Unauthorized("the certificate is of several tenants", reason="tenant")
        for tenant, name in found.items():
            return Principal(tenant, f"certificate {name}", self._client_role)
        return None


def evidence_of(authorization: str, names: tuple[str, ...] | None) -> Evidence:
    """Return what a header, and the names of a certificate, show."""
    is_bearer = authorization[: len(_BEARER)].lower() == _BEARER
    return Evidence(shown(authorization[len(_BEARER) :]) if is_bearer else None, names)


def host_of(peer: str) -> str:
    """Return the address in what gRPC calls a peer, "ipv4:127.0.0.1:4711"; of IPv6 its /64."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    if kind == "ipv6" and "." not in host:
        head = host.partition("%")[0].split("::")[0]
        host = ":".join(head.split(":")[:4]) + "::/64" if head else host
    return host or peer


def _bearer(metadata: Any) -> Shown | None:
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            return evidence_of(value, None).token
    return None


def _names(auth: Mapping[Any, Any]) -> tuple[str, ...] | None:
    """Return the names in a client's certificate, None without one."""
    found = auth.get(_SAN, auth.get(_SAN.encode()))
    if found is None:
        has_one = any("x509" in str(key) for key in auth)
        return () if has_one else None
    return tuple(each.decode("utf-8", "replace") for each in found)
