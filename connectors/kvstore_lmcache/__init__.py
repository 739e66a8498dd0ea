"""kvstore below LMCache: `Client` is its server's L2, `Adapter` its remote storage in an engine.

    {"type": "native_plugin", "module_path": "kvstore_lmcache", "class_name": "Client"}

Each is imported on first use, because `Adapter` needs LMCache and torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_lmcache.adapter import Adapter
    from kvstore_lmcache.client import Client

__all__ = ["Adapter", "Client"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from kvstore_lmcache.client import Client

        return Client
    if name == "Adapter":
        from kvstore_lmcache.adapter import Adapter

        return Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
