"""The scheduler half, on rank 0: what of a prompt is stored, what is loaded, what is saved.

    get_num_new_matched_tokens .. the longest stored prefix is leased, copied, verified: now it is
                                  ours, and its length is told
    build_connector_meta ........ one StepMetadata per step: loads with their device blocks, saves
                                  of blocks that the step completes, blocks that it may overwrite
    request_finished ............ its blocks are kept until the copies out of them have ended

TensorRT-LLM asks once per request, between two steps, and there is no way to tell it later that a
load failed. So the prefix is in memory of this engine before it is promised (see `staged`), within
two deadlines; everything else is a miss.
"""

from __future__ import annotations

import logging
from typing import Any

from kvstore.client.leased import PrefixLeases, leased_nbytes
from kvstore.model.block import Grant, Namespace
from kvstore.model.errors import Incompatible, InvalidRequest, KVStoreError
from kvstore.model.keys import root_key
from kvstore_trtllm.compat import KvCacheConnectorScheduler
from kvstore_trtllm.counters import Counters
from kvstore_trtllm.engine import engine_of
from kvstore_trtllm.metadata import LoadOrder, SaveOrder, StepMetadata
from kvstore_trtllm.staged import Staged
from kvstore_trtllm.tracked import Promise, Tracked, bypasses, salt_of

logger = logging.getLogger(__name__)


class KVStoreScheduler(KvCacheConnectorScheduler):  # type: ignore[misc] # its base is not checked
    """Decides for one engine, in its executor's thread."""

    def __init__(self, llm_args: Any) -> None:
        """Raise ConfigError or Incompatible, saying what to change, if the cache cannot be used."""
        super().__init__(llm_args)
        self._engine = engine_of(llm_args)
        self.counters = Counters()
        self._leases = PrefixLeases(self._engine.client, self._engine.settings.load_deadline_s)
        self._tracked: dict[int, Tracked] = {}
        self._staged_nbytes = 0  # promised, and not with a step yet
        self._passed_on: list[list[LoadOrder]] = []
        self._off = False  # for good: blocks do not have the tokens that the options say

    # What is stored -------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens are loaded beyond those the engine has, and False: at once."""
        self._forget(request.request_id)
        if self._off:
            return 0, False
        namespace = self._engine.namespace
        if namespace is None:
            self.counters.add(bypassed_unknown_weights=1)
            return 0, False
        if bypasses(request):
            self.counters.add(bypassed_inputs=1)
            return 0, False
        tracked = Tracked(root_key(namespace.id, salt_of(request)), namespace.block_tokens)
        try:
            tracked.extend(request.get_tokens(0))
        except InvalidRequest:  # token ids that no vocabulary has: what that does is not ours
            self.counters.add(bypassed_inputs=1)
            return 0, False
        self._tracked[request.request_id] = tracked
        blocks = self._promise(namespace, tracked, request.request_id, num_computed_tokens)
        return blocks * namespace.block_tokens, False

    def _promise(
        self, namespace: Namespace, tracked: Tracked, request_id: int, computed: int
    ) -> int:
        """Return how many blocks are ours from now on; 0 for whatever goes wrong."""
        first, rest = divmod(computed, namespace.block_tokens)
        keys = tracked.loadable_keys()[: self._engine.client.batch_keys_max]
        room = self._room(namespace)
        keys = keys[: first + room]
        if rest or len(keys) <= first or not self._engine.client.available:
            return 0
        self.counters.add(lookups=1)
        try:
            grant = self._leases.acquire(
                namespace, keys, skip_blocks=first, request_id=f"trtllm-{request_id}"
            )
            if grant is None:
                return 0
            tracked.stored_blocks = grant.hit_blocks
            tracked.promise = self._take(namespace, keys, grant, first)
        except KVStoreError as error:
            logger.info("lookup=failed request=%s error=%r", request_id, error)
            self.counters.add(lookups_failed=1)
            tracked.stored_blocks = 0
            return 0
        self._staged_nbytes += tracked.promise.staged.nbytes
        self.counters.add(loaded_blocks=tracked.promise.blocks)
        return tracked.promise.blocks

    def _room(self, namespace: Namespace) -> int:
        """Return how many blocks may be staged now."""
        group = namespace.groups[0]
        left = (self._engine.settings.staged_mib_max << 20) - self._staged_nbytes
        return max(0, left // (group.record_nbytes * group.shards))

    def _take(self, namespace: Namespace, keys: list[Any], grant: Grant, first: int) -> Promise:
        """Copy what is leased, and verify it. Raises KVStoreError if it may not be used."""
        corrupt: list[Any] = []
        try:
            staged = Staged(leased_nbytes(grant))
            _, corrupt = self._leases.copy(namespace, keys, grant, staged.view, skip_blocks=first)
        finally:
            held = self._leases.release(grant)
        self._leases.confirm(namespace, held, corrupt)
        return Promise(first, grant.hit_blocks - first, staged)

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Nothing to do: the next step's data name the blocks, too."""

    # What a step does -----------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return the orders of this step."""
        namespace = self._engine.namespace
        meta = StepMetadata(namespace=namespace.to_json() if namespace is not None else "")
        scheduled = [*scheduler_output.new_requests, *scheduler_output.cached_requests]
        for data in scheduled:
            tracked = self._tracked.get(data.request_id)
            if tracked is None:
                meta.handed_out += data.new_block_ids
                continue
            meta.handed_out += tracked.follow(data)
            if tracked.miscounted:
                self._refuse_blocks(tracked)
            if tracked.promise is not None:
                meta.loads.append(self._load_order(data.request_id, tracked, tracked.promise))
            order = tracked.save_order(data)
            if order is not None:
                meta.saves.append(SaveOrder(data.request_id, *order))
        # Ranks in other processes open what is staged when they are told of it. They may be a step
        # behind this one.
        self._passed_on = [*self._passed_on[-3:], meta.loads]
        return meta

    def _refuse_blocks(self, tracked: Tracked) -> None:
        """Store and load nothing more: the blocks of a request are not of the size that we know."""
        if tracked.promise is not None:
            # The engine goes on behind tokens that nobody computes. This cannot be a miss any more.
            raise Incompatible(
                f"TensorRT-LLM {self._engine.version} gave {len(tracked.blocks)} blocks to a "
                "request that needs another number of them: set kv_cache_config.tokens_per_block "
                "to what it uses"
            )
        if not self._off:
            self._off = True
            logger.error(
                "blocks=miscounted cache=off reason='a request has %d blocks and needs another "
                "number' do='set kv_cache_config.tokens_per_block to what TensorRT-LLM uses'",
                len(tracked.blocks),
            )

    def _load_order(self, request_id: int, tracked: Tracked, promise: Promise) -> LoadOrder:
        blocks = tracked.blocks[promise.first : promise.first + promise.blocks]
        if len(blocks) != promise.blocks:
            # The engine goes on behind tokens that nobody computes. This cannot be a miss any more.
            raise Incompatible(
                f"TensorRT-LLM {self._engine.version} named {len(tracked.blocks)} blocks of a "
                f"request that was promised {promise.first + promise.blocks}"
            )
        tracked.promise = None
        self._staged_nbytes -= promise.staged.nbytes
        return LoadOrder(request_id, tuple(blocks), promise.staged)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Return whether blocks of the request may still be read: then they are not reused before
        every worker has said that its copies have ended."""
        tracked = self._tracked.get(request.request_id)
        saves = tracked is not None and tracked.saves
        self._forget(request.request_id)
        return saves

    def _forget(self, request_id: int) -> None:
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None and tracked.promise is not None:
            self._staged_nbytes -= tracked.promise.staged.nbytes
