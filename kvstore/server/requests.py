"""What requests name, checked: keys, namespaces, times, ids."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstore.model.block import KEY_NBYTES, BlockKey, Namespace, NamespaceId, split_keys
from kvstore.model.errors import InvalidRequest
from kvstore.model.hint import SESSION_ID_CHARS_MAX
from kvstore.model.member import SESSION_ENGINES_MAX, SOURCE_CHARS_MAX, Origin
from kvstore.model.tokens import BlockTokens, check_tokens
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.store.store import Store


class Requests:
    """Checks what requests name against one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def known(self, namespace_id: bytes) -> NamespaceId:
        known = namespace_id_of(namespace_id)
        self._store.namespaces.get(known)
        return known

    def namespace(self, namespace_id: bytes) -> Namespace:
        return self._store.namespaces.get(namespace_id_of(namespace_id))

    def keys(self, keys: bytes) -> Sequence[BlockKey]:
        return split_keys(keys, keys_max=self._store.limits.batch_keys_max)

    def wait_s(self, wait_s: float) -> float:
        if not (math.isfinite(wait_s) and wait_s >= 0):
            raise InvalidRequest(f"wait_s={wait_s} is not a time to wait")
        return min(wait_s, self._store.limits.wait_max_s)


def pace_of(seconds: float) -> float:
    return seconds_of("recompute_s_per_block", seconds)


def seconds_of(name: str, seconds: float, most: float = math.inf) -> float:
    if not (math.isfinite(seconds) and 0 <= seconds <= most):
        raise InvalidRequest(f"{name}={seconds} is not a time, or too long")
    return seconds


def session_id_of(session_id: str) -> str:
    if len(session_id) > SESSION_ID_CHARS_MAX:
        raise InvalidRequest(f"a session id has at most {SESSION_ID_CHARS_MAX} characters")
    return session_id


def tokens_of(
    request: pb.AcquireRequest | pb.ReserveRequest | pb.PutHeader,
    keys: Sequence[BlockKey],
    block_tokens: int,
) -> BlockTokens:
    """Return the tokens of a request's blocks. Raises InvalidRequest."""
    tokens = BlockTokens(request.tokens, request.lora_name)
    check_tokens(tokens, len(keys), block_tokens)
    return tokens


def origin_of(request: pb.AcquireRequest) -> Origin | None:
    """Return who has the prefix, as the request says; None: it does not say. Raises
    InvalidRequest."""
    if not request.HasField("origin"):
        return None
    source = request.origin.source
    if not 0 < len(source) <= SOURCE_CHARS_MAX:
        raise InvalidRequest(f"the source of a prefix has 1 to {SOURCE_CHARS_MAX} characters")
    return Origin(source, request.origin.expect_blocks)


def engines_of(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a session's engine. Raises InvalidRequest."""
    if len(addresses) > SESSION_ENGINES_MAX:
        raise InvalidRequest(f"an engine has at most {SESSION_ENGINES_MAX} addresses")
    if any(not 0 < len(each) <= SOURCE_CHARS_MAX for each in addresses):
        raise InvalidRequest(f"an address has 1 to {SOURCE_CHARS_MAX} characters")
    return tuple(addresses)


def namespace_id_of(value: bytes) -> NamespaceId:
    if len(value) != KEY_NBYTES:
        raise InvalidRequest(f"a namespace id has {KEY_NBYTES} bytes, not {len(value)}")
    return NamespaceId(value)
