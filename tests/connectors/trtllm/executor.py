"""Plays TensorRT-LLM's executor: its calls, in its order, around a model that is easy to check.

A step, as `PyExecutor._executor_loop` does it: for each new request `get_num_new_matched_tokens`,
blocks are given out, `update_state_after_alloc`; then `build_connector_meta`, the metadata go to
every rank, `start_load_kv`, the layers with `wait_for_layer_load` and `save_kv_layer`,
`wait_for_save`; `request_finished` for those that have ended, and `get_finished`. Blocks of a
request that has ended stay for reuse by prefix until others need them.

The KV of a token is a hash of all tokens up to it, of the layer and of the rank: what is missing,
or of another prompt, is seen at once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvstore.testing.wait import until

LAYERS, KINDS, DIM = 3, 2, 16
BLOCK = 8  # tokens
STEPS_MAX = 400


def llm_args(model: str, **changes: Any) -> SimpleNamespace:
    """Return arguments as an engine has them that the connector serves."""
    cache = {
        "dtype": "auto",
        "enable_block_reuse": True,
        "enable_partial_reuse": False,
        "host_cache_size": 0,
        "max_attention_window": None,
        "tokens_per_block": BLOCK,
    }
    plain = {
        "attn_backend": "TRTLLM",
        "checkpoint_format": None,
        "context_parallel_size": 1,
        "dtype": "auto",
        "enable_attention_dp": False,
        "load_format": "LoadFormat.AUTO",
        "max_beam_width": 1,
        "model": model,
        "pipeline_parallel_size": 1,
        "speculative_config": None,
        "tensor_parallel_size": 1,
    }
    for name, value in changes.items():
        (cache if name in cache or name.startswith("use_kv") else plain)[name] = value
    return SimpleNamespace(**plain, kv_cache_config=SimpleNamespace(**cache))


def model_config(kinds: int = KINDS, **changes: Any) -> dict[str, Any]:
    """Return the config.json of the model: one KV head on each rank, or latent attention."""
    own = (
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
        if kinds == KINDS
        else {"kv_lora_rank": DIM - 4, "qk_rope_head_dim": 4}
    )
    return {"num_hidden_layers": LAYERS, **own, **changes}


def write_config(model: str, kinds: int = KINDS, **changes: Any) -> None:
    Path(model, "config.json").write_text(json.dumps(model_config(kinds, **changes)))


def make_pool(blocks: int, kinds: int = KINDS) -> torch.Tensor:
    """Return a pool of garbage."""
    shape = (blocks, LAYERS, kinds, BLOCK * DIM)
    garbage = np.random.default_rng(1).integers(0, 1 << 16, shape, np.uint16)
    return torch.from_numpy(garbage.view(np.int16)).view(torch.bfloat16)


def kv_of(
    tokens: Sequence[int], begin: int, end: int, rank: int, kinds: int = KINDS
) -> np.ndarray[Any, Any]:
    """Return the KV of tokens [begin, end): (tokens, layers, kinds, DIM)."""
    digest, found = bytes([rank]), []
    for at, token in enumerate(tokens[:end]):
        digest = hashlib.sha256(digest + token.to_bytes(8, "little")).digest()
        if at >= begin:
            random = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:8], "little")))
            found.append(random.integers(0, 1 << 16, (LAYERS, kinds, DIM), np.uint16))
    return np.array(found, np.uint16).reshape(-1, LAYERS, kinds, DIM)


def rows_of(pool: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a pool as (blocks, layers, kinds, tokens, DIM) of 16 bits each."""
    shape = (*pool.shape[:3], BLOCK, DIM)
    rows: np.ndarray[Any, Any] = pool.view(torch.int16).numpy().view(np.uint16).reshape(shape)
    return rows


class Rank:
    """The worker of one rank, its pool, and its share of the model."""

    def __init__(self, worker: Any, rank: int, blocks: int, kinds: int = KINDS) -> None:
        self.worker, self.rank, self.kinds = worker, rank, kinds
        self.pool = make_pool(blocks, kinds)
        self.rows = rows_of(self.pool)
        worker.register_kv_caches(self.pool)

    def forward(self, meta: object, work: Sequence[tuple[list[int], list[int], int, int]]) -> None:
        """One step. work: of each request its tokens, its blocks, and [begin, end) to compute."""
        self.worker.bind_connector_meta(meta)
        self.worker.start_load_kv(None)
        computed = [kv_of(tokens, *span, self.of, self.kinds) for tokens, _, *span in work]
        for layer in range(LAYERS):
            self.worker.wait_for_layer_load(layer, None)
            for kv, (_, blocks, begin, end) in zip(computed, work, strict=True):
                for at in range(begin, end):
                    self.rows[blocks[at // BLOCK], layer, :, at % BLOCK] = kv[at - begin, layer]
            self.worker.save_kv_layer(layer, None)
        self.worker.wait_for_save(None)

    @property
    def of(self) -> int:
        """Whose KV it is: latent attention has one for all."""
        return self.rank if self.kinds == KINDS else 0

    def check(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Raise AssertionError unless the pool has the KV of all tokens."""
        expected = kv_of(tokens, 0, len(tokens), self.of, self.kinds)
        for at, kv in enumerate(expected):
            found = self.rows[blocks[at // BLOCK], :, :, at % BLOCK]
            assert np.array_equal(found, kv), f"token {at} of {len(tokens)}"


@dataclass(eq=False)
class Request:
    """As much of an LlmRequest as connectors look at."""

    request_id: int
    tokens: list[int]
    answer: int
    extra: dict[str, Any] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    external: int = 0
    told_tokens: int = 0
    told_blocks: int = 0
    prompt: int = 0

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["extra"][name]
        except KeyError:
            raise AttributeError(name) from None


class Executor:
    """Runs requests one step after the other, on all ranks.

    forward: has the other ranks do what rank 0 does. finished: what `get_finished` of all says.
    """

    def __init__(
        self,
        scheduler: Any,
        rank: Rank,
        *,
        chunk: int = 24,
        forward: Callable[[object, Any], object] = lambda meta, work: meta,
        finished: Callable[[list[int], list[int]], list[int]] = lambda asked, own: own,
    ) -> None:
        self.scheduler, self.rank, self.chunk = scheduler, rank, chunk
        self._forward, self._finished = forward, finished
        self._free = OrderedDict.fromkeys(range(rank.pool.shape[0]))
        self._uses: Counter[int] = Counter()
        self._cached: dict[tuple[int, ...], int] = {}  # by all tokens up to the block's end
        self._held: dict[int, list[int]] = {}  # of requests that are still saved
        self._new_held: list[int] = []
        self._count = 0
        self.metas: list[Any] = []

    def run(self, *prompts: Sequence[int], answer: int = 1, **extra: Any) -> list[Request]:
        """Run prompts together until each has `answer` tokens more; check all their KV."""
        requests = [self.submit(prompt, answer, **extra) for prompt in prompts]
        active = list(requests)
        for _ in range(STEPS_MAX):
            self.step(active)
            for each in [each for each in active if len(each.tokens) >= each.prompt + each.answer]:
                self.check(each)
                self.finish(each)
                active.remove(each)
            self.poll()
            if not active:
                return requests
        raise AssertionError("the requests do not end")

    def submit(self, prompt: Sequence[int], answer: int, **extra: Any) -> Request:
        self._count += 1
        return Request(self._count, list(prompt), answer, extra, prompt=len(prompt))

    def step(self, active: Sequence[Request]) -> None:
        """Compute a chunk of each prompt, or one token more."""
        new = [each for each in active if not each.blocks]
        for each in new:
            self._admit(each)
        lengths = {each: min(self.chunk, len(each.tokens) - each.computed) for each in active}
        output = SimpleNamespace(
            new_requests=[self._data(each, lengths[each]) for each in active if each in new],
            cached_requests=[self._data(each, lengths[each]) for each in active if each not in new],
        )
        meta = self.scheduler.build_connector_meta(output)
        self.metas.append(meta)
        work = [
            (each.tokens, each.blocks, each.computed, each.computed + lengths[each])
            for each in active
        ]
        self.rank.forward(self._forward(meta, work), work)
        for each in active:
            each.computed += lengths[each]
            if each.computed == len(each.tokens):
                each.tokens.append(each.tokens[-1] % 97 + each.computed % 7)
                if each.computed // BLOCK >= len(each.blocks):
                    each.blocks += self._take(1)

    def _admit(self, request: Request) -> None:
        """Give out blocks, as C++ does it: what is cached here, what comes, what is computed."""
        local = []
        for end in range(BLOCK, len(request.tokens), BLOCK):
            block = self._cached.get(tuple(request.tokens[:end]))
            if block is None:
                break
            local.append(block)
        for block in local:
            self._free.pop(block, None)
            self._uses[block] += 1
        computed = len(local) * BLOCK
        told = self.scheduler.get_num_new_matched_tokens(request, computed)
        request.external, is_async = told
        assert not is_async
        assert request.external % BLOCK == 0
        assert computed + request.external < len(request.tokens)
        request.computed = computed + request.external
        wanted = -(-len(request.tokens) // BLOCK) - len(local)
        request.blocks = local + self._take(wanted)
        self.scheduler.update_state_after_alloc(request, list(request.blocks))

    def _data(self, request: Request, scheduled: int) -> SimpleNamespace:
        """Return a RequestData; the first leaves out what comes from outside."""
        first = not request.told_blocks
        data = SimpleNamespace(
            request_id=request.request_id,
            new_tokens=request.tokens[request.told_tokens :],
            new_block_ids=request.blocks[request.told_blocks :],
            computed_position=request.computed - (request.external if first else 0),
            num_scheduled_tokens=scheduled,
        )
        request.told_tokens, request.told_blocks = len(request.tokens), len(request.blocks)
        return data

    def _take(self, count: int) -> list[int]:
        """Return blocks, those first that nobody has used for long."""
        until(lambda: self._has_free(count))
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        self._cached = {key: block for key, block in self._cached.items() if block not in taken}
        for block in taken:
            self._uses[block] += 1
            self.rank.rows[block] = 0xDEAD  # nothing of it may be used any more
        return taken

    def _has_free(self, count: int) -> bool:
        if len(self._free) < count:
            self.poll()  # blocks of finished requests are kept until they are saved
        return len(self._free) >= count

    def check(self, request: Request) -> None:
        self.rank.check(request.tokens[: request.computed], request.blocks)

    def finish(self, request: Request) -> None:
        for end in range(BLOCK, request.computed + 1, BLOCK):
            self._cached.setdefault(tuple(request.tokens[:end]), request.blocks[end // BLOCK - 1])
        if self.scheduler.request_finished(request, list(request.blocks)):
            self._held[request.request_id] = request.blocks
            self._new_held.append(request.request_id)
        else:
            self._release(request.blocks)

    def poll(self) -> None:
        """Ask which requests are saved, and release their blocks."""
        asked, self._new_held = self._new_held, []
        own, loaded = self.rank.worker.get_finished(asked, [])
        assert loaded == []
        for request_id in self._finished(asked, own):
            self._release(self._held.pop(request_id))

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free[block] = None

    @property
    def held(self) -> int:
        """How many requests' blocks wait for saves."""
        return len(self._held)

    def forget(self) -> None:
        """Drop the engine's own prefix cache, as a restart does."""
        self._cached.clear()
