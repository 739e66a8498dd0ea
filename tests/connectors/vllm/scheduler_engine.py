"""The scheduler side with a client that answers what a test says, and an engine around it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

from kvstore import (
    Grant,
    Group,
    HintKind,
    HintReport,
    KeyChain,
    Namespace,
    Part,
    Slot,
    Span,
    Unavailable,
    root_key,
)
from kvstore_vllm.scheduler import SchedulerSide
from kvstore_vllm.settings import Settings

BLOCK = 4


NAMESPACE = Namespace(
    block_tokens=BLOCK,
    groups=(Group("full", 64), Group("window", 64, window_tokens=6)),
    identity=(("model", "test"),),
)


LOSSY = 40
LOSSY_NAMESPACE = Namespace(
    block_tokens=BLOCK,
    groups=(
        Group("full", 64, varies=True),
        Group("window", 64, window_tokens=6, varies=True),
        Group("full.fine", 20, refines=0, base_nbytes=LOSSY),
        Group("window.fine", 20, window_tokens=6, refines=1, base_nbytes=LOSSY),
    ),
    identity=(("model", "test"),),
    fidelity="ep",
)
"""The first block of a sequence is exact, and larger."""


class FakeClient:
    """Answers lookups like a daemon that holds the first `hit_blocks` blocks of everything.

    coarse: blocks without their fine parts.
    """

    def __init__(self, namespace: Namespace = NAMESPACE) -> None:
        self._namespace = namespace
        self.coarse: set[int] = set()
        self.available = True
        self.announces = False
        self.batch_keys_max = 8192
        self.instance = "daemon-1"
        self.node = ""
        self.hit_blocks = 0
        self.ready_blocks: int | None = None  # of an answer that comes early
        self.leased = True
        self.deadline_s = 30.0
        self.error: Exception | None = None
        self.hold = False  # leave new questions unanswered
        self.asked: list[SimpleNamespace] = []
        self.released: list[int] = []
        self.doubts = 0
        self.hints = self  # `client.hints.expect` and the others are below
        self.hinted: list[tuple] = []
        self._held: list[tuple[Future, object]] = []

    def submit(self, make) -> Future:
        future: Future = Future()
        self._held.append((future, make))
        if not self.hold:
            self.answer()
        return future

    def answer(self) -> None:
        held, self._held = self._held, []
        for future, make in held:
            try:
                future.set_result(asyncio.run(make(self)))
            except Unavailable as error:
                future.set_exception(error)

    async def connect(self) -> None:
        pass

    async def doubt(self) -> None:
        self.doubts += 1

    async def register(self, namespace, *, now):
        assert not now
        return namespace.id

    async def acquire(
        self,
        namespace_id,
        keys,
        *,
        skip_blocks,
        readers,
        wait_s,
        request_id,
        recompute_s_per_block,
        session_id,
        refined,
        origin,
        early,
        tokens=None,
    ):
        self.asked.append(
            SimpleNamespace(
                keys=list(keys),
                skip=skip_blocks,
                readers=readers,
                name=request_id,
                recompute_s_per_block=recompute_s_per_block,
                session_id=session_id,
                refined=refined,
                origin=origin,
                wait_s=wait_s,
                early=early,
                tokens=tokens,
            )
        )
        if self.error is not None:
            raise self.error
        hit = max(skip_blocks, min(self.hit_blocks, len(keys)))
        if not self.leased:
            return Grant(0, 0.0, (), (), hit_blocks=hit, leased=False)
        spans = []
        slots: list[Slot | None] = []
        for index, group in enumerate(self._namespace.groups):
            needed = group.blocks_needed(hit, BLOCK)
            spans.append(Span(Part(index, 0), max(skip_blocks, needed.start), hit))
            for block in range(spans[-1].begin, hit):
                there = group.refines == -1 or (block and block not in self.coarse)
                nbytes = LOSSY if self._namespace.fine and block else group.record_nbytes
                slots.append(Slot(0, 4096 * len(slots), nbytes) if there else None)
        return Grant(
            lease_id=len(self.asked),
            deadline_s=self.deadline_s,
            spans=tuple(spans),
            slots=tuple(slots),
            checksums=tuple(range(len(slots))),
            hit_blocks=hit,
            ready_blocks=self.ready_blocks if early else None,
        )

    async def end_session(self, target):
        return self._hinted("end", target)

    async def expect(self, target, in_s):
        return self._hinted("expect", target, in_s)

    async def pin(self, target, ttl_s, *, bytes_max):
        return self._hinted("pin", target, ttl_s, bytes_max)

    async def demote(self, target):
        return self._hinted("demote", target)

    def _hinted(self, kind, target, *numbers):
        if self.error is not None:
            raise self.error
        self.hinted.append((kind, target.session_id, len(target.keys), *numbers))
        return HintReport(HintKind.END)

    async def release(self, *leases):
        self.released += leases
        return [True] * len(leases)


def make_request(tokens: int, name: str = "r", **fields) -> SimpleNamespace:
    fields = {
        "request_id": name,
        "all_token_ids": list(range(tokens)),
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "status": SimpleNamespace(name="WAITING"),
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "prompt_embeds": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "kv_transfer_params": None,
        **fields,
    }
    return SimpleNamespace(**fields)


class Engine:
    """Calls the hooks in the scheduler's order for one request at a time."""

    def __init__(
        self, namespace: Namespace = NAMESPACE, *, require_salt: bool = False, **options
    ) -> None:
        self.client = FakeClient(namespace)
        settings = Settings("unix:/k", require_salt=require_salt)
        self.side = SchedulerSide(settings, self.client, readers=1, **options)
        self.side.use_namespace(namespace)
        self.manager = SimpleNamespace(tables={}, get_computed_blocks=lambda request: (None, 0, 0))
        self.manager.get_block_ids = self.manager.tables.get
        self.side.bind_kv_cache_manager(self.manager)
        self.zeroed: list[int] = []  # device blocks that each step zeroes
        self._loading: set[str] = set()

    def admit(self, request, tables, external=0):
        """Give a request its device blocks: for a load of so many tokens, else to run in them."""
        self._loading.discard(request.request_id)
        if external:
            self._loading.add(request.request_id)
        blocks = SimpleNamespace(get_block_ids=lambda: tables)
        self.side.update_state_after_alloc(request, blocks, external)

    def step(self, *, new=(), cached=(), resumed=()):
        """Run one step of (request, full block tables or new blocks, tokens scheduled)."""
        for request, tables, _ in (*new, *resumed):
            if request.request_id in self._loading:
                self.admit(request, tables)  # once more, when its load has ended
        cached = (*cached, *resumed)
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id,
                    block_ids=tables,
                    num_computed_tokens=request.num_computed_tokens,
                )
                for request, tables, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request, _, _ in cached],
                new_block_ids=[blocks for _, blocks, _ in cached],
                num_computed_tokens=[request.num_computed_tokens for request, _, _ in cached],
                resumed_req_ids={request.request_id for request, _, _ in resumed},
            ),
            num_scheduled_tokens={r.request_id: count for r, _, count in (*new, *cached)},
            new_block_ids_to_zero=self.zeroed or None,
        )
        meta = self.side.build_meta(output)
        for request, _, count in (*new, *cached):
            request.num_computed_tokens += count
            request.status = SimpleNamespace(name="RUNNING")
        return meta

    def sample(self, request, *tokens: int) -> None:
        request.all_token_ids += tokens
        request.num_tokens += len(tokens)


def keys_of(request, salt: bytes = b"") -> list[bytes]:
    return KeyChain(root_key(NAMESPACE.id, salt), BLOCK).update(request.all_token_ids)


def saved(meta) -> dict[tuple[int, int], int]:
    """Return {(group, block): device block} of all saves in a step."""
    return {
        (span.group, order.first_block + span.begin + i): device_block
        for order in meta.saves
        for span in order.spans
        for i, device_block in enumerate(span.device_blocks)
    }


# ---- asking and offering -------------------------------------------------------------------------


def run_prompt(engine, request, tables):
    engine.side.on_new_request(request)
    engine.side.num_new_matched_tokens(request, 0)
    engine.admit(request, tables)
    return engine.step(new=[(request, tables, request.num_tokens)])
