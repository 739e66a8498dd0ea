"""LMCache's keys become namespaces and keys of ours.

A page is named by model, rank, object group, hash of the chunk, and the request's cache salt. The
first three say whose pages they are, and with LMCache's version and what tells the weights (see
`weights`) they are the identity of a namespace. The hash and what a request adds are its key:

    key = SHA-256("kvstore.lmcache.v1" | namespace id | u32 n | n times: u32 length, text)

LMCache's server names no shape and no dtype, so records have sizes of their own: `varies`.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import OrderedDict
from functools import lru_cache

from kvstore import BlockKey, Group, InvalidRequest, Namespace
from kvstore.client.pages import Place
from kvstore_lmcache.settings import Settings

KEY_CHARS_MAX = 4096
NAMESPACES_MAX = 1024  # remembered; it costs little to make one again
PLACES_MAX = 4096  # remembered: what is looked up is loaded next
_TAG = b"kvstore.lmcache.v1"
_OBJECT_KEY = re.compile(
    r"(?P<model>[^@]*)"
    r"@(?P<kv_rank>[0-9a-f]{8,16})"
    r"@(?P<group>[0-9a-f]{1,8})"
    r"@(?P<chunk>(?:[0-9a-f]{2}){1,64})"
    r"(?:@(?P<salt>[^@]+))?"
)


Owner = tuple[tuple[str, str], ...]
"""Whose pages they are, as fields of an identity."""


class Names:
    """Names the pages of one LMCache. version: LMCache's."""

    def __init__(self, settings: Settings, version: str) -> None:
        self.page_nbytes_max = settings.page_mib_max << 20
        self._settings = settings
        self._version = version
        self._namespaces: OrderedDict[tuple[Owner, str], tuple[Namespace, bytes]] = OrderedDict()
        self._remembered = lru_cache(PLACES_MAX)(self._object_place)

    def object_place(self, text: str, weights: str) -> Place:
        """Read `model@kv_rank@group@chunk[@salt]`. Raises InvalidRequest for anything else.

        weights: what tells those of the model.
        """
        return self._remembered(text, weights)

    def _object_place(self, text: str, weights: str) -> Place:
        found = _OBJECT_KEY.fullmatch(text) if len(text) <= KEY_CHARS_MAX else None
        if found is None:
            raise InvalidRequest(f"{text[:80]!r} is no key of an object of LMCache")
        owner = (
            ("model", found["model"]),
            ("kv_rank", found["kv_rank"]),
            ("object_group", found["group"]),
        )
        return self.place(owner, weights, found["chunk"], found["salt"] or "")

    def place(self, owner: Owner, weights: str, *parts: str) -> Place:
        """Return the place of a page. owner: whose it is. parts: what names it among theirs."""
        namespace, root = self._namespace(owner, weights)
        digest = hashlib.sha256(root + struct.pack("<I", len(parts)))
        for part in parts:
            text = part.encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<I", len(text)) + text)
        return Place(namespace, BlockKey(digest.digest()))

    def _namespace(self, owner: Owner, weights: str) -> tuple[Namespace, bytes]:
        """Return a namespace, and what all its keys begin with."""
        known = self._namespaces.get((owner, weights))
        if known is None:
            kept_as = self._settings.kv_dtype
            namespace = Namespace(
                block_tokens=self._settings.chunk_tokens,
                groups=(Group("page", self.page_nbytes_max, varies=True),),
                identity=(
                    *owner,
                    ("engine", f"lmcache {self._version}"),
                    ("weights", weights),
                    *((("kv_dtype", kept_as),) if kept_as else ()),
                ),
                name=dict(owner).get("model", ""),
            )
            known = self._namespaces[owner, weights] = namespace, _TAG + namespace.id
            if len(self._namespaces) > NAMESPACES_MAX:
                self._namespaces.popitem(last=False)
        return known
