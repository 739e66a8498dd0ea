"""Token ids of blocks, for routers: they match prompts by tokens, not by our keys."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.model.errors import InvalidRequest

TOKEN_NBYTES = 4
TOKENS_NBYTES_MAX = 2 << 20  # of one call: half a million tokens
LORA_NAME_CHARS_MAX = 256


class BlockTokens(NamedTuple):
    """The tokens of consecutive blocks. packed: u32, little-endian. lora_name: as routers know the
    adapter; "" without one. Not for requests with a cache salt: those prompts are private."""

    packed: bytes
    lora_name: str = ""

    @classmethod
    def of(cls, tokens: Sequence[int], lora_name: str = "") -> BlockTokens:
        """Pack token ids. Raises InvalidRequest for one outside u32."""
        try:
            return cls(struct.pack(f"<{len(tokens)}I", *tokens), lora_name)
        except struct.error as error:
            raise InvalidRequest("a token id is not an integer in 0..2**32-1") from error

    def first(self, blocks: int, block_tokens: int) -> BlockTokens:
        """Return those of the first blocks, of as many as one call takes."""
        block_nbytes = TOKEN_NBYTES * block_tokens
        nbytes = min(blocks, TOKENS_NBYTES_MAX // block_nbytes) * block_nbytes
        return self if len(self.packed) <= nbytes else self._replace(packed=self.packed[:nbytes])

    def part(self, begin: int, end: int, blocks: int) -> BlockTokens:
        """Return those of the blocks [begin, end) of so many."""
        block_nbytes = len(self.packed) // blocks
        return self._replace(packed=self.packed[begin * block_nbytes : end * block_nbytes])


def check_tokens(tokens: BlockTokens, blocks: int, block_tokens: int) -> None:
    """Raise InvalidRequest unless they are those of at most so many whole blocks."""
    block_nbytes = TOKEN_NBYTES * block_tokens
    count, rest = divmod(len(tokens.packed), block_nbytes)
    if rest or count > blocks or len(tokens.packed) > TOKENS_NBYTES_MAX:
        raise InvalidRequest(
            f"{len(tokens.packed)} bytes of tokens for {blocks} blocks: send {block_nbytes} bytes "
            f"for each block, from the first one on, and at most {TOKENS_NBYTES_MAX}"
        )
    if len(tokens.lora_name) > LORA_NAME_CHARS_MAX:
        raise InvalidRequest(f"a LoRA name has at most {LORA_NAME_CHARS_MAX} characters")
