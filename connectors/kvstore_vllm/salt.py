"""The caller of a request -> its `cache_salt`, so that no user learns what another one has asked.

A prefix that is a hit is answered sooner, so time tells whether somebody has sent it before. vLLM
and kvstore share KV only between requests of the same `cache_salt`. That is a field of the body:
whoever sends the request chooses it, and may choose another user's. This middleware of vLLM's
server sets it from who the caller is, whatever the body says:

    KVSTORE_SALT_SECRET_FILE=/etc/kvstore/salt KVSTORE_SALT_HEADER=X-User
    vllm serve MODEL --middleware kvstore_vllm.headers.TenantSalt ...

    cache_salt = HMAC-SHA256(secret, header name | 0 | value), in hex

| variable | meaning |
| --- | --- |
| KVSTORE_SALT_SECRET_FILE | a file of 32 bytes and more that only the server's user may read |
| KVSTORE_SALT_HEADER | the header in which the gateway names the user; the bearer token if unset |

A gateway has to remove this header from what users send. A request without it gets a random salt,
and shares nothing. One that has it twice, or a body that is too long or cannot be read, is refused.
(The idea: vLLM's issue 53347, on salts that attackers choose.)
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

import msgspec

from kvstore.model.errors import ConfigError
from kvstore_vllm.bodies import App, Body, Header, Message, Receive, Send, object_of, values_of

SECRET_VARIABLE = "KVSTORE_SALT_SECRET_FILE"
HEADER_VARIABLE = "KVSTORE_SALT_HEADER"
SECRET_NBYTES_MIN = 32
SECRET_NBYTES_MAX = 4096
BEARER = b"authorization"


class TenantSalt:
    """An ASGI application around another, which sees every body with the salt of its caller."""

    def __init__(self, app: App) -> None:
        """Read the secret. Raises ConfigError."""
        self._app = app
        self._secret = read_secret(os.environ.get(SECRET_VARIABLE, ""))
        self._header = os.environ.get(HEADER_VARIABLE, "").strip().lower().encode() or BEARER

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope.get("method") == "POST"
        if not asks or _is_form(scope["headers"]):  # nothing in a form is a salt
            await self._app(scope, receive, send)
            return
        users = values_of(scope["headers"], self._header)
        if len(users) > 1:
            await _refuse(send, 400, f"the header {self._header.decode()} is there twice")
            return
        body = Body(scope, receive)
        await body.read()
        if not body.whole and not body.gone:
            await _refuse(send, 413, "the body is too long")
            return
        if body.whole and body.data.strip():
            request = object_of(body.data)
            if request is None:  # the server might read it in another way, with a salt of its own
                await _refuse(send, 400, "the body is no JSON object")
                return
            request["cache_salt"] = self._salt(users[0]) if users else secrets.token_hex(32)
            body.replace(msgspec.json.encode(request))
        await body.pass_on(self._app, send)

    def _salt(self, user: bytes) -> str:
        who = self._header + b"\0" + user.strip()
        return hmac.new(self._secret, who, hashlib.sha256).hexdigest()


def read_secret(path: str) -> bytes:
    """Return the bytes of a secret's file. Raises ConfigError, with what to type."""
    make = f"(umask 077; head -c 32 /dev/urandom > {path or 'PATH'})"
    if not path:
        raise ConfigError(
            f"{SECRET_VARIABLE} names no file: TenantSalt needs a secret of its own; make one by "
            f"{make}, and set the variable"
        )
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(SECRET_NBYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f"{SECRET_VARIABLE}={path}: {error.strerror}; make one by {make}"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{SECRET_VARIABLE}={path}: others may read it: chmod 600 {path}")
    if len(secret) < SECRET_NBYTES_MIN:
        raise ConfigError(
            f"{SECRET_VARIABLE}={path} has {len(secret)} bytes, and needs {SECRET_NBYTES_MIN}: "
            f"make one by {make}"
        )
    return secret


def _is_form(headers: list[Header]) -> bool:
    kinds = values_of(headers, b"content-type")
    return len(kinds) == 1 and kinds[0].strip().lower().startswith(b"multipart/form-data")


async def _refuse(send: Send, status: int, why: str) -> None:
    """Answer as vLLM's server does."""
    error = {"message": f"kvstore: {why}", "type": "BadRequestError", "code": status}
    data = msgspec.json.encode({"error": error})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
