"""The scheduler side: what to ask the cache, what to offer the engine, what to save.

Everything here runs in the engine's scheduling loop and never keeps it from work: questions go out
through `Client.submit`, and answers are looked at when the scheduler comes by again (see `idle`).

    on_new_request ........... ask (acquire: blocks are promoted while the request queues)
    num_new_matched_tokens ... answer yet? not yet -> None; a lease -> its length; else 0
    update_state_after_alloc . device blocks exist: pair the leased slots with them
    build_meta ............... one StepMetadata per step: loads, saves, blocks handed out
    request_finished ......... the last full blocks go with the next step; hints are sent
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Container
from typing import Any

from kvstore import Client, InvalidRequest
from kvstore.client.prefill_pace import PrefillPace
from kvstore.model.block import Namespace, NamespaceId
from kvstore.model.keys import root_key
from kvstore_vllm.adapters import Adapters
from kvstore_vllm.counters import Counters
from kvstore_vllm.device_blocks import DeviceBlocks, HandedOut, LossyBlocks, zeroed_blocks
from kvstore_vllm.handoff import handoff_params, load_deadline_s, read_origin
from kvstore_vllm.hints import NO_HINTS, hint_sender, read_hints
from kvstore_vllm.idle import IdleWait
from kvstore_vllm.load_orders import load_order
from kvstore_vllm.lookup import Lookup
from kvstore_vllm.metadata import LoadOrder, SaveOrder, StepMetadata, in_epoch
from kvstore_vllm.prefill import Computed, step_of
from kvstore_vllm.settings import Settings
from kvstore_vllm.tracked import Tables, Tracked, told_by_tokens

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Decides for one engine. Not thread safe: the scheduler's thread owns it."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        *,
        readers: int,
        loads: bool = True,
        saves: bool = True,
        drafts: bool = False,
        adapter_settings: str = "",
    ) -> None:
        """readers: workers that each load their shard. drafts: speculative decoding is on.

        adapter_settings: those of the engine that decide what a LoRA adapter's files do.
        """
        self.counters = Counters()
        self.prefill = PrefillPace()
        self._hints = hint_sender(client, self.counters)
        self._settings = settings
        self._client = client
        self._readers = readers
        self._loads_on = loads
        self._saves_on = saves
        # The newest token of a request that drafts may stand where a rejected draft was computed.
        self._unsettled_tokens = 1 if drafts else 0
        self._namespace: Namespace | None = None
        self._namespace_id = NamespaceId(b"")
        self._device_blocks = DeviceBlocks()
        self._lossy = LossyBlocks()
        self._tracked: dict[str, Tracked] = {}
        self._ran: dict[str, Tracked] = {}  # scheduled by the last step, or with a plan left over
        self._finished: list[Tracked] = []
        self._loads: list[LoadOrder] = []
        self._handed_out = HandedOut()
        self._passes_by: dict[str, int] = {}  # local blocks of requests that are not tracked
        self._adapters = Adapters(self.counters, settings=adapter_settings)
        self._idle = IdleWait()
        self._epoch = ""

    def note_computed(self, computed: Computed) -> None:
        """Learn how long a worker took for what it computed."""
        if computed.tokens:
            self.prefill.note(computed.tokens, computed.seconds, computed.depth)
            self.counters.add(computed_tokens=computed.tokens, computed_seconds=computed.seconds)

    def use_namespace(self, namespace: Namespace) -> None:
        """Start to take part: until a namespace is known every request passes by."""
        self._namespace = in_epoch(namespace, self._epoch)
        self._namespace_id = self._namespace.id

    @property
    def takes_part(self) -> bool:
        return self._namespace is not None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._device_blocks.bind(kv_cache_manager)

    # What to ask ----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Track the request and start to promote what the cache may hold of it."""
        lora = request.lora_request
        adapter = b"" if lora is None else self._adapters.identity(lora)
        if adapter is None or self._bypasses(request):
            return
        namespace = self._namespace
        if namespace is None:
            self.counters.add(bypassed_unknown_weights=1)
            return
        told_blocks = told_by_tokens(request, namespace.block_tokens)
        if told_blocks is not None:
            self.counters.add(bypassed_multimodal=1)
            if not told_blocks:
                return
        salt = (request.cache_salt or "").encode(errors="surrogatepass")
        root = root_key(self._namespace_id, salt)
        hints = read_hints(request.kv_transfer_params, self.counters)
        most = self._client.batch_keys_max
        tracked = Tracked(request, root, namespace, hints, adapter=adapter, keys_max=most)
        try:
            tracked.keys()
        except InvalidRequest:  # token ids that no vocabulary has: what it does is vLLM's affair
            self.counters.add(bypassed_inputs=1)
            return
        self._tracked[request.request_id] = tracked
        tracked.origin = read_origin(tracked, self.counters)
        if self._may_load(tracked):
            self._ask(tracked, self._device_blocks.local_blocks(request, self._block_tokens))

    def _bypasses(self, request: Any) -> bool:
        """Whether the tokens do not tell what the KV of `request` is, or a salt is missing."""
        bypasses = request.prompt_embeds is not None or bool(request.resumable)  # rewrites its past
        unsalted = self._settings.require_salt and not request.cache_salt
        self.counters.add(bypassed_inputs=int(bypasses), bypassed_unsalted=int(unsalted))
        return bypasses or unsalted

    def _may_load(self, tracked: Tracked) -> bool:
        reads = not tracked.request.skip_reading_prefix_cache
        return self._loads_on and reads and not tracked.load_failed

    @property
    def _block_tokens(self) -> int:
        assert self._namespace is not None
        return self._namespace.block_tokens

    def _ask(self, tracked: Tracked, local_blocks: int) -> None:
        """Send a lookup for what lies beyond `local_blocks`, unless there cannot be anything."""
        keys = tracked.loadable_keys()[: self._client.batch_keys_max]
        if len(keys) <= local_blocks or not self._client.available:
            return
        assert self._namespace is not None
        self.counters.add(lookups=1)
        depth = (local_blocks + len(keys)) * self._block_tokens / 2
        tracked.lookup = Lookup(
            self._client,
            self._namespace,
            keys,
            skip_blocks=local_blocks,
            readers=self._readers,
            wait_s=load_deadline_s(tracked, self._settings),
            request_id=tracked.request.request_id,
            recompute_s_per_block=self.prefill.s_per_token(depth) * self._block_tokens,
            session_id=tracked.hints.session_id,
            refined=tracked.hints.refined,
            origin=tracked.origin,
            early=not tracked.waits_for_all,
            tokens=tracked.tokens(0, len(keys)) if self._client.announces else None,
        )

    # What to offer --------------------------------------------------------------------------------

    def num_new_matched_tokens(
        self, request: Any, num_local_tokens: int
    ) -> tuple[int | None, bool]:
        """Return (tokens loadable beyond the local ones, True), (0, False), or (None, False).

        None means "ask again": bytes are still coming up. That lasts load_deadline_s at most.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            if self._namespace is not None:
                self._passes_by[request.request_id] = num_local_tokens // self._block_tokens
            return 0, False
        tracked.local_blocks = num_local_tokens // self._block_tokens
        if tracked.gave_up or not self._may_load(tracked):
            return 0, False
        now = time.monotonic()
        if not tracked.asked_until:
            tracked.asked_until = now + load_deadline_s(tracked, self._settings)
        offer = self._offer(tracked)
        if offer is None and self._idle.answered(tracked.lookup, self._tracked.values()):
            offer = self._offer(tracked)
        if offer is None and now < tracked.asked_until:
            return None, False
        if not offer:
            self._give_up(tracked, late=offer is None)
            return 0, False
        tracked.asked_until = 0.0
        if tracked.lookup is not None and not tracked.lookup.offered:
            tracked.lookup.offered = True
            self.counters.add(offered_tokens=offer)
        return offer, True

    def _offer(self, tracked: Tracked) -> int | None:
        """Return the loadable tokens; 0: nothing; None: an answer is on its way."""
        lookup, local_blocks = tracked.lookup, tracked.local_blocks
        if lookup is None:
            return self._ask_again(tracked)
        if not lookup.answered:
            return None
        grant = lookup.grant()
        tracked.node = lookup.node
        if grant is None:
            self.counters.add(lookups_failed=1)
            return 0
        if lookup.usable(local_blocks):
            return max(0, grant.hit_blocks - local_blocks) * self._block_tokens
        if lookup.is_fresh_estimate:
            return None
        # Run out, or only an estimate because too much was leased, or the engine has lost local
        # blocks since: ask again, for what is missing now.
        lookup.abandon()
        return self._ask_again(tracked)

    def _ask_again(self, tracked: Tracked) -> int | None:
        tracked.lookup = None
        self._ask(tracked, tracked.local_blocks)
        return 0 if tracked.lookup is None else None

    def _give_up(self, tracked: Tracked, *, late: bool) -> None:
        """Let the request be computed, and give back what may be leased for it."""
        tracked.gave_up = True
        tracked.asked_until = 0.0
        self.counters.add(lookups_late=int(late))
        if tracked.lookup is not None:
            if late:
                tracked.lookup.doubt()
            tracked.lookup.abandon()
            tracked.lookup = None

    # What to load ---------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note which device blocks the request got, and order the load if one was accepted.

        vLLM calls this once more, without tokens, when the load has ended well.
        """
        tracked = self._tracked.get(request.request_id)
        tables: Tables = blocks.get_block_ids()
        if not any(tables):
            # Some versions of MultiConnector show blocks only to the connector that loads.
            tables = self._device_blocks.tables(request) or tables
        held = tracked.held_blocks if tracked else self._passes_by.get(request.request_id, 0)
        self._handed_out.add(tables, held)
        if tracked is None or tracked.lookup is None:
            return
        if num_external_tokens:
            assert self._namespace is not None
            order = load_order(tracked, tables, num_external_tokens, self._namespace)
            self._loads.append(order)
            tracked.note_loading(order, num_external_tokens)
            tracked.lookup = None  # the lease is the workers' now: each of them releases it
        else:
            self._give_up(tracked, late=False)  # not taken, e.g. another connector's hit was longer

    def loads_failed(self, request_ids: set[str]) -> None:
        """Note requests whose load failed: they are recomputed, as far as `Tracked` says."""
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.note_load_failed()
                self._lossy.computed(tracked.lossy_blocks)

    def blocks_failed(self, device_blocks: set[int]) -> None:
        """The same, by the first device block of each load."""
        loading = ((name, each) for name, each in self._tracked.items() if each.loading)
        self.loads_failed({name for name, each in loading if each.load_begins in device_blocks})

    # What to save ---------------------------------------------------------------------------------

    def build_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return the orders of this step and reset what was collected for it.

        Saves are planned from the block tables as the *last* step left them, before this step's are
        noted: see `tracked`.
        """
        meta = StepMetadata(epoch=self._epoch, step=step_of(scheduler_output))
        zeroed = zeroed_blocks(scheduler_output)
        for tracked in [*self._ran.values(), *self._finished]:
            meta.saves.extend(self._plan(tracked, zeroed))
        self._ran = {key: left for key, left in self._ran.items() if self._left_over(left)}
        self._finished.clear()
        for tracked in self._ran.values():
            tracked.settle()
        self._note_scheduled(scheduler_output)
        meta.loads, self._loads = self._loads, []
        meta.handed_out = self._handed_out.take()
        self._lossy.follow(meta)
        self._idle.next_step(scheduler_output.num_scheduled_tokens)
        return meta

    def _plan(self, tracked: Tracked, zeroed: Container[int]) -> list[SaveOrder]:
        if not self._saves_on:
            return []
        orders = list(
            tracked.plan_saves(
                unsettled_tokens=self._unsettled_tokens,
                held_tables=lambda: self._held_tables(tracked),
                unfit=(self._lossy, zeroed),
                announced=self._client.announces,
            )
        )
        adapter = tracked.request.lora_request
        if orders and adapter is not None and not self._adapters.unchanged(adapter):
            self.counters.add(saves_dropped_changed_adapter=len(orders))
            return []
        return orders

    def _left_over(self, tracked: Tracked) -> bool:
        """Whether a block is computed whose tokens are not final yet (asynchronous scheduling)."""
        return tracked.running and tracked.has_unplanned

    def _held_tables(self, tracked: Tracked) -> Tables | None:
        return self._device_blocks.tables(tracked.request) if tracked.running else None

    def _note_scheduled(self, scheduler_output: Any) -> None:
        """Follow the block tables of the requests in this step."""
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.admit(
                    new.block_ids,
                    computed=new.num_computed_tokens,
                    scheduled=scheduled[new.req_id],
                )
                self._ran[new.req_id] = tracked
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            resumed = request_id in cached.resumed_req_ids
            if new_blocks is not None and not resumed:
                self._handed_out.add(new_blocks)
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tokens = scheduled[request_id]
            if resumed:
                tracked.admit(new_blocks, computed=computed, scheduled=tokens)
            else:
                tracked.advance(new_blocks, computed=computed, scheduled=tokens)
            self._ran[request_id] = tracked

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """Queue the last full blocks of the request, send its hints, and forget it. Returns with
        what another engine goes on with it, if it asked for that."""
        self._idle.ended(request.request_id)
        self._passes_by.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if self._namespace is not None and tracked.hints is not NO_HINTS:
            self._hints.send(tracked.hints, self._namespace, tracked.keys())
        if tracked.lookup is not None:
            tracked.lookup.abandon()
        ran = self._ran.pop(request.request_id, None)
        if not tracked.loading:
            if ran is None:
                tracked.settle()
            self._finished.append(tracked)
        return handoff_params(tracked, self._settings.engine_address) if self._saves_on else None

    @property
    def has_pending_saves(self) -> bool:
        """Whether saves wait for a step to travel with."""
        return bool(self._finished)

    def reset_cache(self) -> None:
        """Share nothing with the past: the weights may have been changed in place.

        Blocks stored before stay in the cache for engines that still run the old weights.
        """
        for tracked in self._tracked.values():
            if tracked.lookup is not None:
                tracked.lookup.abandon()
        for noted in (self._tracked, self._ran, self._finished, self._passes_by):
            noted.clear()
        self._epoch = uuid.uuid4().hex
        if self._namespace is not None:
            self.use_namespace(self._namespace)
        logger.info("reset=cache namespace=%s", self._namespace_id.hex()[:8])

    def leave(self) -> None:
        """Take no part any more."""
        self.reset_cache()
        self._namespace = None
