"""What the scheduler tells the workers with every step: plain values, and memory that is shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.model.block import BlockKey
from kvstore_trtllm.staged import Staged


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Verified records for consecutive blocks: those of one shard follow each other.

    device_blocks: where each goes, in the pool of every rank. staged: all shards' records.
    """

    request_id: int
    device_blocks: tuple[int, ...]
    staged: Staged


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Blocks of one prefix that are complete when this step's forward pass is.

    keys: of these blocks. first_block, parent: where in the prefix they are.
    """

    request_id: int
    keys: tuple[BlockKey, ...]
    first_block: int
    parent: BlockKey | None
    device_blocks: tuple[int, ...]


@dataclass(slots=True)
class StepMetadata:
    """One step. namespace: its canonical text, "" as long as the weights are not known.

    handed_out: device blocks that this step may overwrite.
    """

    namespace: str = ""
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    handed_out: list[int] = field(default_factory=list)
