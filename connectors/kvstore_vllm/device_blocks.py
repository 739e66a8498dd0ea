"""The engine's own blocks: those of a request, those handed out, and those that hold lossy KV."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore_vllm.metadata import StepMetadata
from kvstore_vllm.tracked import NULL_BLOCK, Tables


class DeviceBlocks:
    """Looks at a KV cache manager, from the scheduler's thread; before it is bound, at nothing."""

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


class HandedOut:
    """Device blocks that the next step, or a load it starts, may overwrite."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def add(self, tables: Tables, held_blocks: int = 0) -> None:
        """Note the blocks of a request, but for the first `held_blocks`: these have its KV."""
        for table in tables:
            self._blocks.update(table[held_blocks:])

    def take(self) -> list[int]:
        """Return what was noted since the last call, in order."""
        blocks, self._blocks = self._blocks, set()
        return sorted(blocks - {NULL_BLOCK})


class LossyBlocks:
    """Device blocks that were loaded from lossy records, until they are used for something else.

    The engine may keep them in its own prefix cache, for any request.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def follow(self, meta: StepMetadata) -> None:
        """Note what a step overwrites, and what it loads. After its saves have been planned: these
        are of blocks as the last step left them."""
        self._blocks.difference_update(meta.handed_out)
        for order in meta.loads:
            self._blocks.update(order.lossy_blocks)

    def computed(self, blocks: Iterable[int]) -> None:
        """Note that the engine computes blocks itself, because their load failed."""
        self._blocks.difference_update(blocks)


def zeroed_blocks(scheduler_output: Any) -> frozenset[int]:
    """Return the device blocks that a step zeroes: some workers do, before they tell the connector
    of the step."""
    return frozenset(getattr(scheduler_output, "new_block_ids_to_zero", None) or ())
