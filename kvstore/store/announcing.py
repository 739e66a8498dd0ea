"""What a store tells whoever announces its blocks to routers."""

from __future__ import annotations

from typing import Protocol

from kvstore.decide.planner import SessionId
from kvstore.model.block import BlockKey, NamespaceId


class Announcer(Protocol):
    """Takes the tokens of blocks. It never waits, and refuses nothing: what it cannot take is not
    announced."""

    def tokens(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: bytes,
        *,
        parent: BlockKey | None,
        tokens: bytes,
        lora_name: str,
        stored: bool,
    ) -> None:
        """Take the tokens of the first blocks: u32, little-endian, as many as there are whole
        blocks of them, and keys.

        keys: of consecutive blocks, back to back. stored: some of the blocks may have been stored
        before.
        """
        ...
