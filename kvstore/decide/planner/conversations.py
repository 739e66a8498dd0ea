"""Which blocks a conversation has, by the name its client gave it: of the newest ones.

Clients call it a session; here that word is taken by engine instances. A name is only good for
hints, so whoever guesses one costs its owner hits at most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.model.block import KEY_NBYTES, BlockKey, NamespaceId, split_keys

CONVERSATIONS_MAX = 1 << 16
KEYS_MAX = 1 << 20  # of all conversations together: 32 MiB


@dataclass(slots=True)
class Conversation:
    """What is known of one. joined: its blocks' keys, back to back, from the start. seen_at: when
    it asked, put or was hinted last, on the store's clock.

    ended, expected_at, pinned_until, pin_bytes: what hints have said of it, and what therefore
    holds for the blocks it still puts, too; times on the store's clock.
    """

    namespace_id: NamespaceId
    joined: bytes = b""
    ended: bool = False
    expected_at: float = 0.0
    pinned_until: float = 0.0
    pin_bytes: int = 0
    seen_at: float = 0.0

    @property
    def blocks(self) -> int:
        return len(self.joined) // KEY_NBYTES

    @property
    def keys(self) -> list[BlockKey]:
        return split_keys(self.joined, keys_max=KEYS_MAX)


class Conversations:
    """The newest ones by name."""

    def __init__(
        self,
        *,
        conversations_max: int = CONVERSATIONS_MAX,
        keys_max: int = KEYS_MAX,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._now = now
        self._conversations_max = conversations_max
        self._nbytes_max = keys_max * KEY_NBYTES
        self._nbytes = 0
        self._by_name: OrderedDict[str, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Conversation | None:
        return self._by_name.get(name)

    def newest(
        self, start: str, namespace_id: NamespaceId | None, most: int
    ) -> list[tuple[str, Conversation]]:
        """Return conversations whose name starts so, of a namespace or of all, newest first."""
        found = (
            each
            for each in reversed(self._by_name.items())
            if each[0].startswith(start) and namespace_id in (None, each[1].namespace_id)
        )
        return list(islice(found, most))

    def know(self, name: str, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Conversation:
        """Learn which blocks a conversation has."""
        conversation = self._take(name, namespace_id)
        self._put(name, conversation, b"".join(keys))
        return conversation

    def asked(self, name: str, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        """Note that a request of a conversation asked for a prefix: it goes on."""
        conversation = self.know(name, namespace_id, keys)
        conversation.ended = False
        conversation.expected_at = 0.0

    def grew(
        self,
        name: str,
        namespace_id: NamespaceId,
        first_block: int,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
    ) -> None:
        """Note that a conversation puts blocks. What does not go on from its own is left out."""
        conversation = self._take(name, namespace_id)
        at = first_block * KEY_NBYTES
        before = conversation.joined[:at]
        if len(before) == at and before[-KEY_NBYTES:] == (parent or b""):
            after = conversation.joined[at:]
            new = b"".join(keys)
            # Blocks may be put again, or in another order than they follow each other.
            self._put(name, conversation, before + (after if after.startswith(new) else new))
        else:
            self._put(name, conversation, conversation.joined)

    def _take(self, name: str, namespace_id: NamespaceId) -> Conversation:
        conversation = self._by_name.pop(name, None)
        if conversation is not None:
            self._nbytes -= len(conversation.joined)
            if conversation.namespace_id == namespace_id:
                return conversation
        return Conversation(namespace_id)

    def _put(self, name: str, conversation: Conversation, joined: bytes) -> None:
        """Make a conversation the newest, as long as there is room for it."""
        conversation.joined = joined[: self._nbytes_max]
        conversation.seen_at = self._now()
        self._by_name[name] = conversation
        self._nbytes += len(conversation.joined)
        while self._nbytes > self._nbytes_max or len(self._by_name) > self._conversations_max:
            _, oldest = self._by_name.popitem(last=False)
            self._nbytes -= len(oldest.joined)
