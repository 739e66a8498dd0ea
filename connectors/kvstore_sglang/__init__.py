"""kvstore below SGLang's HiCache: `Storage` is its storage back end, loaded by name.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "kvstore", "module_path": "kvstore_sglang", "class_name": "Storage",
      "interface_v1": 1, "target": "unix:/run/kvstore/kvstore.sock"}'

It is imported on first use, because it needs SGLang and torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_sglang.storage import Storage

__all__ = ["Storage"]


def __getattr__(name: str) -> Any:
    if name == "Storage":
        from kvstore_sglang.storage import Storage

        return Storage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
