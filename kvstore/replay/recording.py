"""What a daemon was asked -> rows of a trace that says nothing of its contents.

A block key is a hash of tokens: who knows a prompt knows its keys. So every key is hashed once
more, with a secret that nobody keeps, into a number of 63 bits: two blocks of ten million get the
same one with a chance of 1 in 100,000.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, Protocol

from kvstore.model.block import KEY_NBYTES

LAST_MAX = 4096  # requests remembered, to tell who asks again
ENGINES_MAX = 1 << 16
NUMBER_MAX = (1 << 63) - 1


class Lookup(Protocol):
    """One answered request for a prefix; at: seconds since the epoch."""

    at: float
    session: int
    namespace_id: bytes
    keys: bytes
    hit_blocks: int
    request_id: str
    block_tokens: int
    block_nbytes: int
    session_id: str


class Recorded:
    """Turns lookups into rows. repeated: those that one and the same request had made before."""

    def __init__(self, secret: bytes) -> None:
        self.repeated = 0
        self._secret = secret
        self._engines: dict[int, int] = {}
        self._last: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        self._began: float | None = None
        self._at_s = 0.0

    def rows(self, lookups: Iterable[Lookup]) -> Iterator[dict[str, Any]]:
        """Yield the rows of lookups, in the order in which these were answered."""
        for lookup in lookups:
            if self._is_repeated(lookup):
                self.repeated += 1
                continue
            if self._began is None:
                self._began = lookup.at
            self._at_s = max(self._at_s, lookup.at - self._began)  # clocks are set back
            named = lookup.session_id.encode()
            yield {
                **({"session_id": self._number(named)} if named else {}),
                "at_s": round(self._at_s, 3),
                "engine": self._engine(lookup.session),
                "namespace": self._number(lookup.namespace_id),
                "block_tokens": lookup.block_tokens,
                "block_nbytes": lookup.block_nbytes,
                "hit_blocks": lookup.hit_blocks,
                "hash_ids": [*map(self._number, _cut(lookup.keys))],
            }

    def _is_repeated(self, lookup: Lookup) -> bool:
        """Say whether a request asks for the same prefix again, because it had to wait."""
        name = lookup.request_id
        if not name:
            return False
        asked = (len(lookup.keys), lookup.keys[-KEY_NBYTES:])
        repeated = self._last.pop(name, None) == asked
        self._last[name] = asked
        if len(self._last) > LAST_MAX:
            self._last.popitem(last=False)
        return repeated

    def _engine(self, session: int) -> int:
        """Return the number of an engine, from 0; those beyond the bound share one."""
        if session not in self._engines and len(self._engines) >= ENGINES_MAX:
            return ENGINES_MAX
        return self._engines.setdefault(session, len(self._engines))

    def _number(self, key: bytes) -> int:
        digest = blake2b(key, key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "little") & NUMBER_MAX


def _cut(keys: bytes) -> Iterator[bytes]:
    return (keys[at : at + KEY_NBYTES] for at in range(0, len(keys), KEY_NBYTES))
