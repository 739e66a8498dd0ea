"""kvstore for llama.cpp: prompts that start from the longest stored prefix.

The cache is imported on first use: it needs llama-cpp-python, the rest does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_llamacpp.cache import KVStoreCache

__all__ = ["KVStoreCache"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreCache":
        from kvstore_llamacpp.cache import KVStoreCache

        return KVStoreCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
