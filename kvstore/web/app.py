"""What the page answers. Every answer has the headers that keep a browser from doing more."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.model.errors import InvalidRequest, KVStoreError, Unauthorized, Unavailable
from kvstore.model.tenant import Principal, Role, check_tenant_name
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.web import shapes
from kvstore.web.daemon import Calls
from kvstore.web.visitors import Visitors, cookie_name
from kvstore.web.watch import SHARED, TOLD, Watches

REQUESTS_MAX = 1000
FORM_FIELDS_MAX = 4
TREE_KEPT_S = 2.0  # the daemon draws it every few seconds
TREES_MAX = 32
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(calls: Calls, token: str, hosts: Sequence[str]) -> ASGIApp:
    """Return the page as an ASGI application. token: "" where there are credentials."""
    visitors, watches = Visitors(calls, token, hosts), Watches(calls)
    page, sign_in = _Document("page.html"), _Document("sign_in.html")
    script = (files(__package__) / "page.js").read_bytes()
    api = _Api(calls, visitors, watches)
    door = _Door(calls, visitors, page, sign_in)

    async def module(request: Request) -> Response:
        visitors.principal(request)
        return Response(script, media_type="text/javascript")

    routes = [
        Route("/", door.open),
        Route("/page.js", module),
        Route("/login", door.sign_in, methods=["POST"]),
        Route("/logout", door.sign_out, methods=["POST"]),
        Route("/api/who", api.who),
        Route("/api/status", api.status),
        Route("/api/live", api.live),
        Route("/api/history", api.history),
        Route("/api/requests", api.requests),
        Route("/api/tree", api.tree),
        Route("/api/conversations", api.conversations),
        Route("/api/namespaces", api.namespaces),
        Route("/api/slow", api.slow),
    ]
    handlers: dict[Any, Any] = {KVStoreError: _told}
    starlette = Starlette(routes=routes, exception_handlers=handlers)
    return _Guarded(starlette, calls, visitors, page.policy)


class _Document:
    """A file of HTML with its own style, and the policy under which a browser may show it."""

    def __init__(self, name: str) -> None:
        text = (files(__package__) / name).read_text()
        self.data = text.encode()
        style = "".join(_STYLE.findall(text))
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        self.policy = (
            f"default-src 'none'; script-src 'self'; style-src 'sha256-{digest}'; "
            "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; "
            "frame-ancestors 'none'; require-trusted-types-for 'script'"
        )

    def response(self, status: int = 200) -> Response:
        return Response(
            self.data, status, {"Content-Security-Policy": self.policy}, media_type="text/html"
        )


class _Guarded:
    """Around everything: refuses other names and other sites, and adds the headers."""

    def __init__(self, app: ASGIApp, calls: Calls, visitors: Visitors, policy: str) -> None:
        self._app = app
        self._calls = calls
        self._visitors = visitors
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Content-Security-Policy", self._policy)
            await send(message)

        if scope["type"] != "http":
            return
        scope["scheme"] = "https" if scope["state"]["visitor"].secure else "http"
        request = Request(scope)
        try:
            self._visitors.check_site(request)
        except (InvalidRequest, Unauthorized) as error:
            foreign = isinstance(error, InvalidRequest)
            told = Unauthorized(str(error), reason="host" if foreign else "origin")
            self._calls.refused(scope["state"]["visitor"].host, told)
            await _json({"error": str(error)}, 400 if foreign else 403)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)


class _Door:
    """Lets a browser in: by the address, by the form."""

    def __init__(
        self, calls: Calls, visitors: Visitors, page: _Document, sign_in: _Document
    ) -> None:
        self._calls = calls
        self._visitors = visitors
        self._page = page
        self._form = sign_in

    async def open(self, request: Request) -> Response:
        if shown := request.query_params.get("token", ""):
            return self._signed_in(request, shown)
        try:
            self._visitors.principal(request)
        except Unauthorized:
            return self._form.response(401)
        return self._page.response()

    async def sign_in(self, request: Request) -> Response:
        body = (await request.body()).decode("utf-8", "replace")
        try:
            fields = parse_qs(body, max_num_fields=FORM_FIELDS_MAX)
        except ValueError as error:
            raise InvalidRequest(f"the form has at most {FORM_FIELDS_MAX} fields") from error
        return self._signed_in(request, fields.get("token", [""])[0].strip())

    async def sign_out(self, request: Request) -> Response:
        name = cookie_name(request)
        self._visitors.sign_out(request.cookies.get(name, ""))
        response = RedirectResponse("/", 303)
        response.delete_cookie(name, path="/", httponly=True, samesite="strict")
        return response

    def _signed_in(self, request: Request, shown: str) -> Response:
        """Answer who shows a token: with a cookie, and the page's address without the token."""
        visitor = request.state.visitor
        try:
            cookie = self._visitors.sign_in(shown, visitor)
        except Unauthorized as error:
            if error.reason == "credential":
                self._calls.refused(visitor.host, error)
            return self._form.response(401)
        response = RedirectResponse("/", 303)
        response.set_cookie(
            cookie_name(request),
            cookie,
            path="/",
            httponly=True,
            samesite="strict",
            secure=visitor.secure,
        )
        return response


class _Api:
    """The same as JSON: see docs/page.md."""

    def __init__(self, calls: Calls, visitors: Visitors, watches: Watches) -> None:
        self._calls = calls
        self._visitors = visitors
        self._watches = watches
        self._trees: dict[tuple[Principal, str], tuple[float, bytes]] = {}  # and when each came

    async def who(self, request: Request) -> Response:
        principal = self._principal(request)
        shown = {"tenant": principal.tenant, "name": principal.name, "role": principal.role.word}
        return _json(shown | {"watches": principal.role >= SHARED, "reasons": shapes.reasons()})

    async def status(self, request: Request) -> Response:
        stats = await self._calls.stats(self._principal(request), _host(request))
        return _json(shapes.status(stats))

    async def live(self, request: Request) -> Response:
        principal = self._principal(request)
        if principal.role < SHARED:
            words = f"this takes the role {SHARED.word}: you have {principal.role.word}"
            error = Unauthorized(words, reason="role")
            self._calls.refused_call(TOLD[0], principal, _host(request), error)
            raise error
        try:
            self._watches.place(principal)
        except Unavailable as error:
            self._calls.refused(_host(request), error)
            raise
        self._calls.noted(principal, _host(request), "begun", *TOLD)

        def is_still() -> bool:
            try:
                return self._principal(request) == principal
            except Unauthorized:
                return False

        frames = self._watches.frames(principal, is_still)
        return StreamingResponse(frames, media_type="application/x-ndjson")

    async def history(self, request: Request) -> Response:
        step_s, since = _count(request, "step_s", 1, 300), _number(request, "since")
        asked = pb.HistoryRequest(step_s=step_s, since=since)
        return _json(shapes.history(await self._ask(request, "History", asked)))

    async def requests(self, request: Request) -> Response:
        limit = _count(request, "limit", 100, REQUESTS_MAX)
        asked = pb.OutcomesRequest(request_id=_text(request, "id"), limit=limit)
        return _json(shapes.outcomes(await self._ask(request, "Outcomes", asked)))

    async def tree(self, request: Request) -> Response:
        """Every viewer asks for the same now and then: they share an answer."""
        key, now = (self._principal(request), request.url.query), time.monotonic()
        at, told = self._trees.get(key, (0.0, b""))
        if not told or now - at > TREE_KEPT_S:
            told = msgspec.json.encode(await self._tree(request))
            if len(self._trees) >= TREES_MAX:
                self._trees.clear()
            self._trees[key] = now, told
        else:
            self._calls.noted(key[0], _host(request), "ok", "Tree")
        return Response(told, media_type="application/json")

    async def _tree(self, request: Request) -> shapes.Shape:
        asked = pb.TreeRequest(
            namespace_id=_hex(request, "namespace"),
            prefix=_hex(request, "prefix"),
            through=_hex(request, "through"),
            depth=_count(request, "depth", 1, 8),
            limit=_count(request, "limit", 200, 1000),
            cursor=_hex(request, "cursor"),
        )
        return shapes.tree(await self._ask(request, "Tree", asked))

    async def conversations(self, request: Request) -> Response:
        asked = pb.ConversationsRequest(
            session_id=_text(request, "id"),
            namespace_id=_hex(request, "namespace"),
            limit=_count(request, "limit", 100, 1000),
        )
        reply = await self._ask(request, "Conversations", asked)
        return _json(shapes.conversations(reply))

    async def namespaces(self, request: Request) -> Response:
        reply = await self._ask(request, "ListNamespaces", pb.ListNamespacesRequest())
        return _json(shapes.namespaces(reply.items))

    async def slow(self, request: Request) -> Response:
        asked = pb.SlowRequest(
            kind=_text(request, "kind"),
            over_s=_number(request, "over_s"),
            limit=_count(request, "limit", 100, 1000),
        )
        return _json(shapes.slow(await self._ask(request, "Slow", asked)))

    async def _ask(self, request: Request, method: str, asked: Any) -> Any:
        return await self._calls.ask(self._principal(request), method, asked, _host(request))

    def _principal(self, request: Request) -> Principal:
        """Return who asks; an admin may ask for another tenant. Raises Unauthorized,
        InvalidRequest."""
        principal = self._visitors.principal(request)
        tenant = request.query_params.get("tenant", "") or principal.tenant
        if tenant == principal.tenant:
            return principal
        if principal.role is not Role.ADMIN:
            error = Unauthorized("another tenant's is told to an admin", reason="tenant")
            self._calls.refused_call("page", principal, _host(request), error)
            raise error
        check_tenant_name(tenant)
        return principal._replace(tenant=tenant)


def _host(request: Request) -> str:
    """Return the address of who asks."""
    host: str = request.state.visitor.host
    return host


def _text(request: Request, name: str) -> str:
    return request.query_params.get(name, "")[:256]


def _hex(request: Request, name: str) -> bytes:
    try:
        return bytes.fromhex(request.query_params.get(name, ""))
    except ValueError as error:
        raise InvalidRequest(f"{name} is written in hex") from error


def _count(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, "")
    if text and not (text.isdecimal() and len(text) < 10):
        raise InvalidRequest(f"{name} is a count, at most {most}")
    return min(int(text) if text else default, most)


def _number(request: Request, name: str) -> float:
    try:
        return float(request.query_params.get(name, "") or 0.0)
    except ValueError as error:
        raise InvalidRequest(f"{name} is a number") from error


def _json(shape: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(shape), status, media_type="application/json")


async def _told(request: Request, error: Exception) -> Response:
    """Return an error of the daemon as an answer."""
    status = 400
    if isinstance(error, Unauthorized):
        status = 403 if error.reason in ("role", "tenant") else 401
    elif isinstance(error, Unavailable):
        status = 503
    return _json({"error": str(error)}, status)
