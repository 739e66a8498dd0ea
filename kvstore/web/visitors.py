"""Who may look at the page.

A request is answered only for a name of this daemon in its header Host: a site that lets a name of
its own lead to 127.0.0.1 is refused. No other origin gets an answer. Then, where credentials are
configured, the visitor shows one: a certificate, a token in the header Authorization, or the cookie
that the form gave for it. Where none are, the token in the address that `kvstore serve` prints
stands for them: every user of a host can open its loopback ports.

The cookie of that token is made from it, and says nothing of it; it outlives a restart, like the
token. The cookie for a credential is the number of a note kept here: what it stands for is looked
at again at each request, so one that is revoked is out at once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from kvstore.model.errors import InvalidRequest, Unauthorized
from kvstore.model.tenant import DEFAULT_TENANT, Principal, Role
from kvstore.system.host_names import SAY, HostNames
from kvstore.web.daemon import Calls, Visitor

SIGNED_IN_MAX = 64  # browsers that showed a credential by the form; the oldest has to show it again
COOKIE: Final = "kvstore_page"
_BEARER: Final = "bearer "
SHOW: Final = "open the address that `kvstore page` prints, or send its token as a Bearer token"
WITH_TOKEN: Final = Principal(DEFAULT_TENANT, "the page's token", Role.ADMIN)
"""Who has the token: it is as private as the daemon's own socket, whose user is an admin too."""


class Visitors:
    """Lets visitors in, or not."""

    def __init__(self, calls: Calls, token: str, hosts: Sequence[str]) -> None:
        """token: "" where there are credentials. hosts: names of this daemon, beside its own."""
        self._calls = calls
        self._token = token.encode()
        self._cookie = _made_of(token) if token else ""
        self._hosts = HostNames(hosts)
        self._signed_in: OrderedDict[str, str] = OrderedDict()  # cookie -> header Authorization

    def check_site(self, request: HTTPConnection) -> None:
        """Raise InvalidRequest for another's name, Unauthorized for another origin."""
        hosts = request.headers.getlist("host")
        if not self._hosts.include(hosts):
            raise InvalidRequest(SAY)
        origin = request.headers.get("origin", "")
        if origin and _host_of(origin) != hosts[0].lower():
            raise Unauthorized("another site may not ask", reason="origin")
        site = request.headers.get("sec-fetch-site", "none")
        opened = request.headers.get("sec-fetch-mode") == "navigate" and request.url.path == "/"
        if site not in ("none", "same-origin") and not opened:
            raise Unauthorized("another site may not ask", reason="origin")

    def principal(self, request: HTTPConnection) -> Principal:
        """Return who asks. Raises Unauthorized."""
        visitor: Visitor = request.state.visitor
        shown = request.headers.get("authorization", "")
        cookie = request.cookies.get(cookie_name(request), "")
        if not self._token:
            shown = shown or self._signed_in.get(cookie, "")
            if not shown and visitor.names is None:
                raise self._refused(request, "show a credential of this daemon", was_shown=False)
            return self._with_credential(shown, visitor)
        given = shown[len(_BEARER) :] if shown[: len(_BEARER)].lower() == _BEARER else ""
        if self._is_token(given) or self._is_cookie(cookie):
            return WITH_TOKEN
        raise self._refused(request, SHOW, was_shown=bool(shown or cookie))

    def _refused(self, request: HTTPConnection, words: str, *, was_shown: bool) -> Unauthorized:
        """Return a refusal, which is counted unless somebody has only opened the page: then the
        form asks him."""
        error = Unauthorized(words, reason="credential")
        if was_shown or request.url.path != "/":
            self._calls.refused(request.state.visitor.host, error)
        return error

    def sign_in(self, shown: str, visitor: Visitor) -> str:
        """Return the cookie for a token that was typed, or was in the address. Raises
        Unauthorized."""
        if self._token:
            if not self._is_token(shown):
                raise Unauthorized("this is not the page's token: " + SHOW, reason="credential")
            return self._cookie
        authorization = f"Bearer {shown}"
        self._with_credential(authorization, visitor)
        cookie = secrets.token_urlsafe(32)
        self._signed_in[cookie] = authorization
        if len(self._signed_in) > SIGNED_IN_MAX:
            self._signed_in.popitem(last=False)
        return cookie

    def sign_out(self, cookie: str) -> None:
        """Forget the credential of a cookie."""
        self._signed_in.pop(cookie, None)

    def _with_credential(self, authorization: str, visitor: Visitor) -> Principal:
        principal = self._calls.caller(authorization, visitor.names, visitor.host)
        if principal is None:
            raise Unauthorized(SHOW, reason="credential")
        return principal

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token)

    def _is_cookie(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._cookie.encode())


def cookie_name(request: HTTPConnection) -> str:
    """Return the cookie's name: ports of a host share their cookies, so it has the port."""
    return f"{COOKIE}_{request.url.port or 0}"


def _made_of(token: str) -> str:
    return hmac.new(token.encode(), b"kvstore page cookie", hashlib.sha256).hexdigest()


def _host_of(origin: str) -> str:
    """Return the host and port of a header Origin; "" if it is no origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
