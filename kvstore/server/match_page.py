"""GET and POST /v1/match: how much of a prompt this host has, and which other hosts have more.

For gateways without an index of their own. A prompt is named by its tokens or by its keys. Tokens
are turned into keys as the connectors do it: by the block size of the namespace, and the salt if
there is one. What else a key depends on (a LoRA adapter's content) only an engine knows: such
prompts are asked for by their keys.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs

import msgspec

from kvstore.model.block import KEY_NBYTES, BlockKey, Namespace, NamespaceId
from kvstore.model.errors import InvalidRequest, KVStoreError, Unauthorized, Unavailable
from kvstore.model.keys import KeyChain, root_key
from kvstore.store.store import Store

BODY_NBYTES_MAX = 4 << 20
KEYS_MAX = 8192  # of one prompt; what is longer is asked for up to here
TOKENS_MAX = 1 << 19
SPACES_MAX = 8  # namespaces of one model that are looked at
ANSWER_S = 2.0
PEERS_MAX = 16
MATCH_PATH = "/v1/match"
HOW = (
    'ask with ?model=NAME&token_ids=1,2,3, or POST {"model": NAME, "token_ids": [1, 2, 3]}; keys, '
    "in hex, may stand for tokens, and namespace for model"
)
T = TypeVar("T")


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """A question. namespace: the first digits of one, where a model has several."""

    model: str = ""
    namespace: str = ""
    token_ids: list[int] = []
    keys: list[str] = []
    salt: str = ""


class Reply(NamedTuple):
    """A status, and a JSON object."""

    status: HTTPStatus
    body: bytes


class MatchPage:
    """Answers on the port's threads; what it looks at belongs to the event loop.

    store_of: the store that a caller may ask, by the header Authorization, the names of the
    client's certificate, its address and its headers Host; raises InvalidRequest, Unauthorized.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store_of: Callable[[str, tuple[str, ...] | None, str, list[str]], Store],
    ) -> None:
        self._loop = loop
        self._store_of = store_of

    def answer(
        self,
        query: str,
        body: bytes,
        *,
        authorization: str,
        names: tuple[str, ...] | None,
        host: str,
        hosts: list[str],
    ) -> Reply:
        """body: of a POST, else empty. The others: see `store_of`."""
        try:
            store = self._store_of(authorization, names, host, hosts)
            asked = _posted(body) if body else _queried(query)
            return Reply(HTTPStatus.OK, msgspec.json.encode(self._match(store, asked)))
        except Unauthorized as error:
            return _refused(HTTPStatus.UNAUTHORIZED, error)
        except Unavailable as error:
            return _refused(HTTPStatus.SERVICE_UNAVAILABLE, error)
        except KVStoreError as error:
            return _refused(HTTPStatus.BAD_REQUEST, error)

    def _match(self, store: Store, asked: Asked) -> dict[str, Any]:
        spaces = self._on_loop(lambda: _spaces(store, asked))
        if not spaces:
            raise InvalidRequest("no engine has told of such a model or namespace here yet")
        if len(spaces) > SPACES_MAX:
            raise InvalidRequest(f"{len(spaces)} namespaces are meant: say which by namespace")
        found = []
        for namespace_id, spec in spaces:
            look = partial(_found, store, namespace_id, spec, _keys_of(namespace_id, spec, asked))
            found.append(self._on_loop(look))
        return {"node": store.node_id, "namespaces": found}

    def _on_loop(self, look: Callable[[], T]) -> T:
        """Return what `look` finds on the event loop. Raises Unavailable after ANSWER_S."""

        async def looked() -> T:
            return look()

        future = asyncio.run_coroutine_threadsafe(looked(), self._loop)
        try:
            return future.result(ANSWER_S)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise Unavailable("the daemon is busy: ask again in a moment") from error


def _refused(status: HTTPStatus, error: KVStoreError) -> Reply:
    return Reply(status, msgspec.json.encode({"error": str(error)}))


def _posted(body: bytes) -> Asked:
    try:
        return _checked(msgspec.json.decode(body, type=Asked))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"not a question ({error}): {HOW}") from error


def _queried(query: str) -> Asked:
    try:
        fields = parse_qs(query, strict_parsing=bool(query), max_num_fields=8)
        if unknown := fields.keys() - {*Asked.__struct_fields__}:
            raise InvalidRequest(f"there is no {min(unknown)[:50]!r}: {HOW}")
        one = {name: values[-1] for name, values in fields.items()}
        tokens = [int(each) for each in one.get("token_ids", "").split(",") if each]
    except ValueError as error:
        raise InvalidRequest(f"not a question ({error}): {HOW}") from error
    keys = [each for each in one.get("keys", "").split(",") if each]
    plain = {name: one.get(name, "") for name in ("model", "namespace", "salt")}
    return _checked(Asked(token_ids=tokens, keys=keys, **plain))


def _checked(asked: Asked) -> Asked:
    if not (asked.model or asked.namespace) or bool(asked.token_ids) == bool(asked.keys):
        raise InvalidRequest(f"say which model, and either tokens or keys: {HOW}")
    if len(asked.token_ids) > TOKENS_MAX or len(asked.keys) > KEYS_MAX:
        raise InvalidRequest(f"at most {TOKENS_MAX} tokens or {KEYS_MAX} keys at once")
    return asked


def _spaces(store: Store, asked: Asked) -> list[tuple[NamespaceId, Namespace]]:
    """Return the namespaces that are meant: of the model's name, by the first digits."""
    return [
        (use.namespace_id, use.namespace)
        for use in store.namespaces.all()
        if use.namespace is not None
        and asked.model in ("", use.namespace.title)
        and use.namespace_id.hex().startswith(asked.namespace.lower())
    ]


def _keys_of(namespace_id: NamespaceId, spec: Namespace, asked: Asked) -> Sequence[BlockKey]:
    """Return the keys of a prompt, as the connectors make them. Raises InvalidRequest."""
    if asked.keys:
        try:
            keys = [BlockKey(bytes.fromhex(each)) for each in asked.keys]
        except ValueError as error:
            raise InvalidRequest("keys are written in hex") from error
        if any(len(each) != KEY_NBYTES for each in keys):
            raise InvalidRequest(f"a key has {KEY_NBYTES} bytes, {2 * KEY_NBYTES} digits")
        return keys
    if spec.salted and not asked.salt:
        raise InvalidRequest("the engines of this namespace store salted prompts only: send salt")
    salt = asked.salt.encode(errors="surrogatepass")
    chain = KeyChain(root_key(namespace_id, salt), spec.block_tokens)
    return chain.update(asked.token_ids[: KEYS_MAX * spec.block_tokens])


def _found(
    store: Store, namespace_id: NamespaceId, spec: Namespace, keys: Sequence[BlockKey]
) -> dict[str, Any]:
    match = store.gets.match(namespace_id, keys)
    return {
        "namespace": namespace_id.hex(),
        "model": spec.title,
        "block_tokens": spec.block_tokens,
        "asked_blocks": len(keys),
        "hit_blocks": match.hit_blocks,
        "dram_blocks": match.resident_blocks,
        "file_blocks": match.hit_blocks - match.resident_blocks,
        "peers": [each._asdict() for each in store.holders(namespace_id, keys, PEERS_MAX)],
    }
