"""Both sides of the connector and its pages, with the test as the engine around them.

A hybrid model of two groups: one of full attention, and one with a window.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from kvstore import BlockKey, Client, Group, KeyChain, Namespace, Part, root_key
from kvstore.testing.wait import until
from kvstore_vllm.metadata import StepMetadata
from kvstore_vllm.pages import Pages
from kvstore_vllm.scheduler import SchedulerSide
from kvstore_vllm.settings import Settings
from kvstore_vllm.shards import Shards
from kvstore_vllm.worker import WorkerSide
from tests.connectors.vllm.cpu_layers import engine_layers
from tests.connectors.vllm.scheduler_engine import make_request

TOKENS, HEAD, WINDOW = 16, 64, 40
BLOCKS = 10
"""Of the prompt; the last of it is left to compute."""
WINDOW_BLOCKS = 3
"""What a resume needs of the group with a window."""
_DEVICE_BLOCKS = 250
_COMPUTED, _LOADED = 1, 101  # where the prompt is computed, and where it is loaded to
_WINDOW_AT = 50  # the same of the group with a window, behind these


OpenPages = Callable[[Any, Any, Client, str], Pages]


def _in_host_memory(layers: Any, packings: Any, client: Client, fidelity: str) -> Pages:
    from kvstore_vllm.opening import open_pages

    return open_pages(layers, _DEVICE_BLOCKS, record="l3", fidelity=fidelity, packings=packings)


class LossyEngine:
    """One engine that computes, saves and loads one prompt."""

    def __init__(
        self,
        target: str,
        fidelity: str = "ep",
        dtype: torch.dtype = torch.bfloat16,
        opened: OpenPages = _in_host_memory,
    ) -> None:
        """opened: what opens the pages of groups of layers, each of which is packed in some way."""
        from kvstore_vllm.namespace import fine_groups

        self.client = Client(target)
        made = [
            engine_layers(dtype, TOKENS, HEAD, count=2, blocks=_DEVICE_BLOCKS) for _ in range(2)
        ]
        self.layers, packings = [list(each) for each in zip(*made, strict=True)]
        pages = opened(self.layers, packings, self.client, fidelity)
        groups = tuple(
            Group(f"{index}", nbytes, window_tokens=WINDOW * index, varies=True)
            for index, nbytes in enumerate(pages.record_nbytes)
        )
        self.namespace = Namespace(
            TOKENS,
            groups + fine_groups(groups, pages.lossy),
            (("model", "m"), ("record", pages.form)),
            fidelity=fidelity,
        )
        settings = Settings(target)
        self.scheduler = SchedulerSide(settings, self.client, readers=1)
        self.scheduler.use_namespace(self.namespace)
        self.worker = WorkerSide(
            settings, self.client, pages, self.namespace, shards=Shards(0), writes=True
        )
        self.counts = self.worker.counters.totals
        self.encoded: list[int] = []  # device blocks, in the order in which they were encoded
        encode = pages.encode

        def noted(group: int, blocks: Any, *rest: Any) -> Any:
            self.encoded += blocks
            return encode(group, blocks, *rest)

        pages.encode = noted  # type: ignore[method-assign]
        (self.raw_nbytes,) = set(pages.raw_nbytes)
        self._requests = 0

    def __enter__(self) -> LossyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()
        self.client.close()

    @property
    def keys(self) -> list[BlockKey]:
        tokens = self._request("base").all_token_ids
        return KeyChain(root_key(self.namespace.id), TOKENS).update(tokens)

    def compute(
        self, fidelity: str = "base", *, cached: int = 0, where_loaded: bool = False
    ) -> int:
        """Compute the prompt without a load, and save it; return what the cache offered.

        cached: so many of its blocks are there from a request before. where_loaded: in the blocks
        that `load` loads into.
        """
        request = self._request(fidelity)
        offered = self._ask(request, cached)
        first = _LOADED if where_loaded else _COMPUTED
        blocks = range(first, first + BLOCKS)
        tables = [*blocks], [_WINDOW_AT + block for block in blocks]
        self.scheduler.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: tables), 0
        )
        self._step(request, tables, cached)
        self.scheduler.request_finished(request)
        self._step()
        assert self.worker.saver.drain(10)
        return offered

    def load(self, blocks: int = BLOCKS, fidelity: str = "base") -> bool:
        """Load so many blocks, which have to be on offer; return whether that went well.

        If it did, the request computes the rest of the prompt, in blocks that it does not save.
        """
        request = self._request(fidelity)
        assert self._ask(request) == blocks
        first = max(0, blocks - WINDOW_BLOCKS)
        loaded = [*range(_LOADED, _LOADED + blocks)]
        tables = loaded, [0] * first + [_WINDOW_AT + block for block in loaded[first:]]
        for layer in (layer for group in self.layers for layer in group):
            layer[_LOADED:] = 0
        allocated = SimpleNamespace(get_block_ids=lambda: tables)
        self.scheduler.update_state_after_alloc(request, allocated, blocks * TOKENS)
        self._step()
        until(lambda: not self.worker.loader.pending)
        done, failed = self.worker.loader.take()
        assert done | failed == {request.request_id}
        self.scheduler.loads_failed(failed)
        if done:
            self.scheduler.update_state_after_alloc(request, allocated, 0)
            self._step(request, tables, blocks)
        self.scheduler.request_finished(request)
        return bool(done)

    def errors(self, group: int = 0) -> list[float]:
        """Return how far each loaded block lies from the one that was computed."""
        first = max(0, BLOCKS - WINDOW_BLOCKS) if group else 0
        return [self._error(group, block) for block in range(first, BLOCKS)]

    def _error(self, group: int, block: int) -> float:
        was, now = (at + block + _WINDOW_AT * group for at in (_COMPUTED, _LOADED))
        return max(
            float((layer[now].float() - layer[was].float()).square().mean().sqrt())
            for layer in self.layers[group]
        )

    def damage_fine_part(self, block: int, *, by_another: bool = False) -> None:
        """Write to the fine part of a block of the full-attention group, as any process may.

        by_another: the whole fine part of the next block, in place of a flipped bit.
        """
        grant = self.client.acquire(self.client.register(self.namespace), self.keys)
        at = 0
        for part, begin, end in grant.spans:
            if part == Part(2, 0):
                slot, following = grant.slots[at + block - begin : at + block - begin + 2]
                assert slot is not None
                assert following is not None
                if by_another:
                    self.client.view(slot)[:] = bytes(self.client.view(following))
                else:
                    self.client.view(slot)[500] ^= 1
            at += end - begin
        assert self.client.release(grant.lease_id) == [True]

    def _request(self, fidelity: str) -> SimpleNamespace:
        self._requests += 1
        return make_request(
            BLOCKS * TOKENS + 1,
            name=f"r{self._requests}",
            kv_transfer_params={"kvstore": {"fidelity": fidelity}},
        )

    def _ask(self, request: SimpleNamespace, cached: int = 0) -> int:
        self.scheduler.on_new_request(request)
        offers: list[int] = []

        def answered() -> bool:
            offer, _ = self.scheduler.num_new_matched_tokens(request, cached * TOKENS)
            offers.extend([] if offer is None else [offer])
            return bool(offers)

        until(answered)
        return offers[0] // TOKENS

    def _step(
        self, request: SimpleNamespace | None = None, tables: object = (), cached: int = 0
    ) -> StepMetadata:
        """Run a step: of the prompt behind so many blocks, or of nothing."""
        names = [] if request is None else [request.request_id]
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=tables, num_computed_tokens=cached * TOKENS)
                for name in names
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens=dict.fromkeys(names, (BLOCKS - cached) * TOKENS + 1),
        )
        meta = self.scheduler.build_meta(output)
        self.worker.begin_step(meta)
        self.worker.start_loads(meta)
        if request is not None:
            request.num_computed_tokens = request.num_tokens
        return meta
