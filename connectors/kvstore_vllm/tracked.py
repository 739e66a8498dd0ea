"""One request as the scheduler side sees it: its keys, its device blocks, what is still to save.

Which blocks may be saved, and when, is the delicate part. At the start of step k the worker copies
blocks that steps before k completed, before step k overwrites anything. So a block must be planned
in the step right after the one that completed it: its content is then certain, even if the
scheduler has just given it to somebody else (the worker makes that step wait for the copy). A block
planned later counts only if the request still holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from kvstore.client.caller import KEYS_MAX
from kvstore.model.block import BlockKey, Namespace
from kvstore.model.keys import KeyChain, encode_extras
from kvstore.model.member import Origin
from kvstore.model.tokens import BlockTokens
from kvstore_vllm.hints import NO_HINTS, RequestHints
from kvstore_vllm.lookup import Lookup
from kvstore_vllm.metadata import LoadOrder, SaveOrder, SaveSpan, engine_groups

Tables = Sequence[Sequence[int]]
"""Per KV cache group the device block of each block of a request; 0 is vLLM's null block."""

NULL_BLOCK = 0
ORDER_BLOCKS_MAX = 128


class Tracked:
    """A request the cache takes part in."""

    def __init__(
        self,
        request: Any,
        root: BlockKey,
        namespace: Namespace,
        hints: RequestHints = NO_HINTS,
        *,
        adapter: bytes = b"",
        keys_max: int = KEYS_MAX,
    ) -> None:
        """adapter: tells the LoRA adapter that the request runs with. keys_max: how many blocks a
        lookup may ask for, and an order save."""
        block_tokens, groups = namespace.block_tokens, engine_groups(namespace)
        self.request = request
        self.hints = hints
        self.origin: Origin | None = None  # who has its prefix, as it says
        self.node = ""  # the id of the daemon that was asked, if that is of a fleet
        self.lookup: Lookup | None = None
        self.asked_until = 0.0  # when the scheduler stops waiting for an answer; 0: not asked yet
        self.load_failed = False
        self.waits_for_all = False  # of its blocks to be there, before any is loaded
        self.gave_up = False
        self.loading = False
        self.load_begins = NULL_BLOCK  # the first device block that the load writes
        self.lossy_blocks: Sequence[int] = ()  # device blocks that it fills from lossy records
        self.local_blocks = 0  # held by the engine itself when it last asked
        self._loaded_blocks = 0  # behind these, filled by its load
        self._block_tokens = block_tokens
        self._groups = groups
        self._chain = KeyChain(root, block_tokens)
        self._extras_of = block_extras(adapter)
        self._blocks_max = told_by_tokens(request, block_tokens)
        self._tables: list[list[int]] = [[] for _ in groups]
        self._computed_tokens = 0  # by all steps so far, the one in flight included
        self._reused_blocks = 0  # of these, there before it was scheduled
        self._settled_blocks = 0  # of these, complete before the last step
        self._planned_blocks = 0
        self._stored = [range(0) for _ in groups]
        self._preemptions = 0
        self._came_until = 0.0  # when what is loaded was to have come; 0: it was all there
        resume_blocks = (request.num_prompt_tokens - 1) // block_tokens
        if self._blocks_max is not None:
            resume_blocks = min(resume_blocks, self._blocks_max)
        self._order_blocks = min(ORDER_BLOCKS_MAX, keys_max)
        self._saved_from = [
            group.blocks_needed(resume_blocks, block_tokens).start if group.window_tokens else 0
            for group in groups
        ]
        # A longer prompt hits up to where lookups end, if the window there is stored as well.
        last_asked = min(resume_blocks, keys_max)
        self._saved_before = [group.blocks_needed(last_asked, block_tokens) for group in groups]

    def keys(self) -> list[BlockKey]:
        """Return the keys of all full blocks of final tokens; only new blocks are hashed."""
        tokens = self.request.all_token_ids
        if self._blocks_max is not None:
            tokens = tokens[: self._blocks_max * self._block_tokens]
        return self._chain.update(tokens, self._extras_of)

    def loadable_keys(self) -> list[BlockKey]:
        """Return the keys a load may use: at least one token is left to compute."""
        return self.keys()[: (self.request.num_tokens - 1) // self._block_tokens]

    def tokens(self, begin: int, end: int) -> BlockTokens | None:
        """Return the tokens of the blocks [begin, end), for routers; None if nobody may know them.

        A salt makes a prompt private, and no router matches by it.
        """
        request, size = self.request, self._block_tokens
        if request.cache_salt:
            return None
        adapter = request.lora_request
        name = adapter.lora_name if adapter is not None else ""
        return BlockTokens.of(request.all_token_ids[begin * size : end * size], name)

    def note_stored(self, first_block: int, hit_blocks: int) -> None:
        """Remember that the cache holds blocks [first_block, hit_blocks): they need no save."""
        for index, group in enumerate(self._groups):
            needed = group.blocks_needed(hit_blocks, self._block_tokens)
            self._stored[index] = range(max(first_block, needed.start), hit_blocks)

    def note_loading(self, order: LoadOrder, num_tokens: int) -> None:
        """Note that what is leased is loaded into device blocks of the request."""
        self.loading, self.load_begins = True, order.first_block
        self._loaded_blocks = num_tokens // self._block_tokens
        self.lossy_blocks = order.lossy_blocks
        self._came_until = 0.0 if order.ready_blocks is None else order.give_up_at

    def note_load_failed(self) -> None:
        """Expect nothing from the cache any more: what is computed now is saved.

        But if it was loaded while it still came, what has come of it is asked for once, within the
        same time: the rest may have been slower than computing, or wrong.
        """
        self.load_failed, self.loading = not self._came_until, False
        if self._came_until:
            self.waits_for_all, self.asked_until = True, self._came_until
        self._stored = [range(0) for _ in self._groups]

    def admit(self, tables: Tables, *, computed: int, scheduled: int) -> None:
        """Note that the request was scheduled with a full new block table."""
        self._tables = [list(table) for table in tables]
        self._computed_tokens = computed + scheduled
        self._reused_blocks = computed // self._block_tokens
        self._settled_blocks = 0
        self._preemptions = self.request.num_preemptions
        self.loading = False
        self.gave_up = False

    def advance(self, new_blocks: Tables | None, *, computed: int, scheduled: int) -> None:
        """Note that the request was scheduled again, with blocks appended to its table."""
        self.settle()
        for table, blocks in zip(self._tables, new_blocks or (), strict=False):
            table.extend(blocks)
        self._computed_tokens = computed + scheduled

    def settle(self) -> None:
        """Note that a step passes: from now on blocks complete so far may have been freed."""
        self._settled_blocks = self._computed_tokens // self._block_tokens

    @property
    def held_blocks(self) -> int:
        """How many of its first device blocks hold its KV, before it runs: no step writes them."""
        return self.local_blocks + (self._loaded_blocks if self.loading else 0)

    @property
    def running(self) -> bool:
        """Whether the request holds device blocks of its own progress."""
        return bool(self.request.status.name == "RUNNING")

    @property
    def has_unplanned(self) -> bool:
        """Whether some computed block still waits for its tokens to become final."""
        return self._planned_blocks < self._told(self._computed_tokens // self._block_tokens)

    def _told(self, blocks: int) -> int:
        return blocks if self._blocks_max is None else min(blocks, self._blocks_max)

    def complete_blocks(self, unsettled_tokens: int) -> int:
        """Return how many blocks are computed from final tokens, and told by them.

        unsettled_tokens: last known tokens whose KV may still be that of a rejected draft.
        """
        request = self.request
        tokens = min(self._computed_tokens, request.num_tokens - unsettled_tokens)
        if request.num_preemptions == self._preemptions:
            tokens = min(tokens, request.num_computed_tokens)
        return self._told(int(tokens) // self._block_tokens)

    def plan_saves(
        self,
        *,
        unsettled_tokens: int,
        held_tables: Callable[[], Tables | None],
        unfit: Sequence[Container[int]] = (),
        announced: bool = False,
    ) -> Iterator[SaveOrder]:
        """Yield orders for the blocks completed since the last plan.

        held_tables: returns the block tables the request holds now, None if it holds none; asked
        only for blocks that are planned late. unfit: device blocks that must not be stored: those
        that hold lossy records as they were loaded, for whatever request, and would lose once more;
        and those that are overwritten before they could be read. announced: the daemon wants the
        tokens.
        """
        complete = self.complete_blocks(unsettled_tokens)
        begin, self._planned_blocks = self._planned_blocks, max(self._planned_blocks, complete)
        if begin >= complete:
            return
        keys = self.keys()
        held: Tables | None = None
        if begin < self._settled_blocks:
            held = held_tables()
        for first in range(begin, complete, self._order_blocks):
            last = min(first + self._order_blocks, complete)
            runs = [
                self._runs(index, first, last, held, unfit) for index in range(len(self._groups))
            ]
            # Nearly always one run per group; an order names each group once at most.
            for nth in zip_longest(*runs):
                found = [(i, run) for i, run in enumerate(nth) if run is not None]
                yield self._order(keys, found, announced=announced)

    def _order(
        self,
        keys: Sequence[BlockKey],
        runs: Sequence[tuple[int, tuple[int, list[int]]]],
        *,
        announced: bool,
    ) -> SaveOrder:
        first = min(begin for _, (begin, _) in runs)
        last = max(begin + len(blocks) for _, (begin, blocks) in runs)
        return SaveOrder(
            keys=tuple(keys[first:last]),
            first_block=first,
            parent=keys[first - 1] if first else None,
            spans=tuple(
                SaveSpan(group, begin - first, tuple(blocks)) for group, (begin, blocks) in runs
            ),
            session_id=self.hints.session_id,
            refined=self.hints.refined,
            tokens=self.tokens(first, last) if announced else None,
            reused=first < self._reused_blocks,
        )

    def _runs(
        self,
        index: int,
        first: int,
        last: int,
        held: Tables | None,
        unfit: Sequence[Container[int]],
    ) -> list[tuple[int, list[int]]]:
        """Return the consecutive blocks of one group in [first, last) that are worth saving."""
        runs: list[tuple[int, list[int]]] = []
        for block in range(first, last):
            if block < self._saved_from[index] and block not in self._saved_before[index]:
                continue
            device_block = self._device_block(index, block, held)
            if device_block == NULL_BLOCK or block in self._stored[index]:
                continue
            if any(device_block in blocks for blocks in unfit):
                continue
            if runs and runs[-1][0] + len(runs[-1][1]) == block:
                runs[-1][1].append(device_block)
            else:
                runs.append((block, [device_block]))
        return runs

    def _device_block(self, index: int, block: int, held: Tables | None) -> int:
        """Return where the KV of `block` still is for certain, else the null block."""
        table = self._tables[index]
        if block >= len(table):
            return NULL_BLOCK
        if block < self._settled_blocks:
            now = held[index] if held is not None else ()
            if block >= len(now) or now[block] != table[block]:
                return NULL_BLOCK
        return table[block]


def block_extras(adapter: bytes) -> Callable[[int], bytes] | None:
    """Return what else the KV of a block depends on, by block index; None if on nothing."""
    if not adapter:
        return None
    extras = encode_extras([("lora", adapter)])
    return lambda block: extras


def told_by_tokens(request: Any, block_tokens: int) -> int | None:
    """Return how many of a request's first blocks its tokens tell; None if all of them.

    An image, sound or video stands behind placeholder tokens. What vLLM tells of it here is an
    identifier that callers may choose, of the same form as a hash. Its bytes may be missing, and
    vLLM's own caches go by the identifier. So the blocks that it reaches, and all after it, have
    no key; those before it do not depend on it.
    """
    starts = [feature.mm_position.offset for feature in request.mm_features]
    return min(starts) // block_tokens if starts else None
