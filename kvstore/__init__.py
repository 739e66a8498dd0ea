"""kvstore: a tiered, shared KV cache for LLM serving.

    from kvstore import Client, Namespace, Group, KeyChain, root_key

The clients are imported on first use: they need gRPC, the rest does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.model.block import (
    BlockKey,
    Committed,
    FilePlace,
    Grant,
    Group,
    Match,
    Namespace,
    NamespaceId,
    Part,
    Slot,
    Span,
)
from kvstore.model.checksum import checksum
from kvstore.model.errors import (
    ConfigError,
    CorruptBlock,
    Incompatible,
    InvalidRequest,
    KVStoreError,
    SessionEnded,
    Unauthorized,
    Unavailable,
    UnknownNamespace,
)
from kvstore.model.hint import HintKind, HintReport, Prefix, Short
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.outcome import BlockRange, Ending, Explanation, Outcome, Reason
from kvstore.model.tokens import BlockTokens

if TYPE_CHECKING:
    from kvstore.client import AsyncClient, Client
    from kvstore.client.pieces import Pieces

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "BlockKey",
    "BlockRange",
    "BlockTokens",
    "Client",
    "Committed",
    "ConfigError",
    "CorruptBlock",
    "Ending",
    "Explanation",
    "FilePlace",
    "Grant",
    "Group",
    "HintKind",
    "HintReport",
    "Incompatible",
    "InvalidRequest",
    "KVStoreError",
    "KeyChain",
    "Match",
    "Namespace",
    "NamespaceId",
    "Outcome",
    "Part",
    "Pieces",
    "Prefix",
    "Reason",
    "SessionEnded",
    "Short",
    "Slot",
    "Span",
    "Unauthorized",
    "Unavailable",
    "UnknownNamespace",
    "checksum",
    "root_key",
]


def __getattr__(name: str) -> Any:
    if name in ("AsyncClient", "Client"):
        from kvstore import client

        return getattr(client, name)
    if name == "Pieces":
        from kvstore.client.pieces import Pieces

        return Pieces
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
