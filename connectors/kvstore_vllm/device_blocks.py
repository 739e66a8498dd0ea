"""The engine's own blocks, as its KV cache manager tells them; before it is known, nothing."""

from __future__ import annotations

from typing import Any

from kvstore_vllm.tracked import Tables


class DeviceBlocks:
    """Looks at a KV cache manager, from the scheduler's thread."""

    def __init__(self) -> None:
        self._manager: Any = None

    def bind(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def local_blocks(self, request: Any, block_tokens: int) -> int:
        """Estimate how many blocks the engine's own prefix cache holds: they need no promotion."""
        manager = self._manager
        if manager is None or getattr(manager, "enable_kv_cache_events", False):
            return 0  # with events on, looking may announce the blocks once more
        _, tokens, *_ = manager.get_computed_blocks(request)
        return int(tokens) // block_tokens

    def tables(self, request: Any) -> Tables | None:
        """Return the block tables of a request, a table a group; None: unknown."""
        if self._manager is None:
            return None
        tables: Tables = self._manager.get_block_ids(request.request_id)
        return tables
