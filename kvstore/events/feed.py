"""The event loop's side: what changed in the index, and the tokens that engines send.

A call costs an append. It looks at most ten times a second, a thousand blocks at a turn, and hands
arrays of bytes to the publisher's thread. What cannot be handed over stays where it is, and is told
later.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.decide.changed import Changed, prefix_groups
from kvstore.decide.index import Index
from kvstore.decide.planner import SessionId
from kvstore.events.book import Told
from kvstore.events.publisher import BATCH_S, Publisher, Seen, Tokens, Topics
from kvstore.metrics import Metrics
from kvstore.model.block import KEY_NBYTES, BlockKey, Namespace, NamespaceId
from kvstore.model.tokens import TOKEN_NBYTES
from kvstore.store.sessions import Sessions

STEP_BLOCKS = 1024
AGAIN_S = 0.05  # where the publisher takes no more
SESSIONS_MAX = 4096
SPACES_MAX = 1024
TOPICS_MAX = 256
TOLD_NBYTES_MAX = 1 << 20  # of tokens that are handed over with what changed
_from_bytes = int.from_bytes


class _Space(NamedTuple):
    """What is asked of a namespace for each block. needed: its prefix groups."""

    spec: Namespace
    model: str
    block_tokens: int
    needed: int


class _Told(NamedTuple):
    """What `Feed.tokens` was told."""

    namespace_id: NamespaceId
    lora_name: str
    stored: bool
    keys: bytes
    tokens: bytes
    parent: BlockKey | None


class Feed:
    """Made before anything is stored; `start` when there is a publisher.

    model: of which blocks are told; "" is all. engines: whether topics are those of engines.
    recalling: whether what was found on disk is still being indexed.
    """

    def __init__(
        self,
        index: Index,
        sessions: Sessions,
        metrics: Metrics,
        *,
        model: str,
        engines: bool,
        recalling: Callable[[], bool],
    ) -> None:
        self._index = index
        self._sessions = sessions
        self._metrics = metrics
        self._model = model
        self._engines = engines
        self._recalling = recalling
        self._publisher: Publisher | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = 0.0
        self._looking: Iterator[tuple[BlockKey, NamespaceId]] = iter(())
        self._finding = self._more_to_find = True  # what is seen may have been found on disk
        self._spaces: dict[NamespaceId, _Space] = {}
        self._models: OrderedDict[SessionId, set[str]] = OrderedDict()  # of engines
        self._topics: frozenset[tuple[str, str]] = frozenset()
        self._told: list[_Told] = []
        self._told_nbytes = 0
        self.changed = Changed()

    def start(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._loop = asyncio.get_running_loop()
        self.changed.on_change = self._soon
        self._index.changed = self.changed
        if self._engines:
            self._sessions.on_engines.append(self._tell_topics)
            self._looking = self._index.walks.named()  # another life may have announced it
            self._more_to_find = self._recalling()
            self._soon()

    def close(self) -> None:
        self.changed.on_change = lambda: None
        self._index.changed = None
        self._publisher = None
        self._told.clear()
        if self._timer is not None:
            self._timer.cancel()

    # ---- what changed ------------------------------------------------------------------------

    def _soon(self) -> None:
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_at(self._looked_at + BATCH_S, self._look)

    def _look(self) -> None:
        """Hand over a step of what changed; the rest has its turn after others."""
        loop, publisher = self._loop, self._publisher
        assert loop is not None
        self._timer = None
        if publisher is None:
            return
        self._hand_tokens_over(publisher)
        noted = list(islice(self._looking, STEP_BLOCKS))
        if not noted:
            self._looked_at = loop.time()
            self._looking = self.changed.take()
            self._finding = self._finding and self._more_to_find
            self._more_to_find = self._recalling()
            noted = list(islice(self._looking, STEP_BLOCKS))
        refused = self._hand_over(publisher, noted)
        if len(noted) == STEP_BLOCKS:
            self._timer = loop.call_later(AGAIN_S if refused else 0, self._look)
            return
        publisher.wake_up()
        if len(self.changed):
            self._soon()

    def _hand_over(
        self, publisher: Publisher, noted: Sequence[tuple[BlockKey, NamespaceId]]
    ) -> bool:
        """Post where blocks are; says whether some did not fit, which are noted again."""
        spaces: dict[NamespaceId, list[BlockKey]] = {}
        for key, namespace_id in noted:
            spaces.setdefault(namespace_id, []).append(key)
        refused = False
        for namespace_id, keys in spaces.items():
            space = self._space(namespace_id)
            if space is None:
                continue
            seen = Seen(
                namespace_id,
                space.model,
                space.block_tokens,
                b"".join(keys),
                self._index.places(namespace_id, keys, space.needed),
                self._engines and self._finding,
            )
            if not publisher.post(seen):
                self._metrics.event_drops.labels("queue").inc()
                refused = True
                for key in keys:
                    self.changed.note(key, namespace_id)
        return refused

    def _space(self, namespace_id: NamespaceId) -> _Space | None:
        """Return a namespace that is announced; None for another."""
        spec = self._index.namespaces.spec(namespace_id)
        if spec is None:
            return None
        known = self._spaces.get(namespace_id)
        if known is None or known.spec is not spec:
            if len(self._spaces) > SPACES_MAX:
                self._spaces.clear()
            known = _Space(spec, spec.title, spec.block_tokens, prefix_groups(spec))
            self._spaces[namespace_id] = known
        return known if self._model in ("", known.model) else None

    def ask(self, namespace_id: NamespaceId, keys: bytes) -> None:
        """Look where blocks are that were stored before their tokens came. Any thread may call."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ask, namespace_id, keys)

    def _ask(self, namespace_id: NamespaceId, keys: bytes) -> None:
        if self._publisher is not None:
            for at in range(0, len(keys), KEY_NBYTES):
                self.changed.note(BlockKey(keys[at : at + KEY_NBYTES]), namespace_id)

    # ---- tokens ------------------------------------------------------------------------------

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
        """See `kvstore.store.announcing`."""
        if self._publisher is None:
            return
        self._told.append(_Told(namespace_id, lora_name, stored, keys, tokens, parent))
        self._told_nbytes += len(keys) + len(tokens)
        if self._told_nbytes > TOLD_NBYTES_MAX:
            self._hand_tokens_over(self._publisher)
        if stored:
            self._soon()  # nothing else may come that has them handed over
        if self._engines and (space := self._space(namespace_id)) is not None:
            self._note_engine(session, space.model)

    def _hand_tokens_over(self, publisher: Publisher) -> None:
        """Post the tokens that came, those that are learned together at once."""
        together: dict[tuple[NamespaceId, str, bool], list[_Told]] = {}
        for each in self._told:
            together.setdefault((each.namespace_id, each.lora_name, each.stored), []).append(each)
        self._told, self._told_nbytes = [], 0
        for (namespace_id, lora_name, stored), some in together.items():
            space = self._space(namespace_id)
            if space is None:
                continue
            told = [_told(each, space.block_tokens) for each in some]
            what = Tokens(namespace_id, space.model, space.block_tokens, told, lora_name, stored)
            if not publisher.post(what):
                self._metrics.event_drops.labels("queue").inc()

    # ---- topics of engines -------------------------------------------------------------------

    def _note_engine(self, session: SessionId, model: str) -> None:
        models = self._models.setdefault(session, set())
        if model not in models and len(models) < TOPICS_MAX:
            models.add(model)
            while len(self._models) > SESSIONS_MAX:
                self._models.popitem(last=False)
            self._tell_topics()

    def _tell_topics(self) -> None:
        """Tell which engines of which models are here now. A name with @ would be another topic."""
        topics: set[tuple[str, str]] = set()
        for session, models in list(self._models.items()):
            engines = self._sessions.engines_of(session)
            if engines is None:
                del self._models[session]
                continue
            for engine in engines:
                for model in models:
                    if "@" in engine or "@" in model:
                        self._metrics.event_drops.labels("name").inc()
                    elif len(topics) < TOPICS_MAX:
                        topics.add((f"kv@{engine}@{model}", model))
        if self._publisher is not None and topics != self._topics:
            self._topics = frozenset(topics)
            self._publisher.post(Topics(self._topics), wake=True)


def _told(what: _Told, block_tokens: int) -> Told:
    """Return as many blocks as there are both keys and tokens of."""
    block_nbytes = TOKEN_NBYTES * block_tokens
    count = min(len(what.keys) // KEY_NBYTES, len(what.tokens) // block_nbytes)
    return Told(
        what.keys[: count * KEY_NBYTES],
        what.tokens[: count * block_nbytes],
        _from_bytes(what.parent[:8], "little") if what.parent else 0,
    )
