"""An engine's worker towards LMCache's server: its KV cache, stores, lookups and loads.

It is the client of LMCache's own `lmcache bench server`, with another KV cache for each request,
and with a look at the answer every millisecond: that one looks every 50 ms.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

from kvstore.model.errors import Unavailable
from kvstore_bench.lmcache.loads import Loaded

BLOCK_TOKENS = 16
POLL_S = 0.001
LOOKUP_S = 60.0


class Shape(NamedTuple):
    """Of each request. A chunk has `chunk_tokens` times 256 bytes."""

    chunks: int
    chunk_tokens: int

    @property
    def tokens(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def blocks(self) -> int:
        return self.tokens // BLOCK_TOKENS


class Engine:
    """One worker, whose request `number` has other tokens and other KV than every other one."""

    def __init__(self, url: str, shape: Shape) -> None:
        self._shape = shape
        blocks = shape.blocks + 1
        self._client: Any = ServerBenchClient(
            BenchConfig(
                rpc_url=url,
                http_url="",
                mode="cpu",
                transfer_mode="auto",
                tp_size=1,
                use_mla=False,
                num_tokens=shape.tokens,
                kvcache_shape_spec=f"(2,{blocks},{BLOCK_TOKENS},2,16):float16:2",
                num_blocks=blocks,
                block_size=BLOCK_TOKENS,
            ),
            lambda text: None,
        )
        self._client.start()

    def store(self, number: int) -> None:
        """Store a request. Raises Unavailable if LMCache does not take it."""
        request = self._request(number)
        self._fill(number)
        done = self._client.store(request, 0, request.num_full_tokens)
        self._client.end_session(request)
        if not done.succeeded:
            raise Unavailable(f"LMCache did not store request {number}")

    def load(self, number: int) -> Loaded:
        """Look a request up, load what is found, and compare it with what was stored."""
        request = self._request(number)
        found = self._found(request)
        tokens = found * self._shape.chunk_tokens
        expected: Sequence[str] = ()
        got: Sequence[str] = ()
        if found:
            self._fill(number)
            expected = self._client.compute_checksums(request, 0, tokens)
            self._client.zero_destination(request, 0, tokens)
            if not self._client.retrieve(request, 0, tokens).succeeded:
                found = 0
            got = self._client.compute_checksums(request, 0, tokens)
        self._client.end_session(request)
        wrong = sum(one != other for one, other in zip(expected, got, strict=True)) if found else 0
        return Loaded(found, wrong)

    def lookup_s(self, number: int) -> float:
        """Return how long a lookup takes, whatever it finds."""
        request = self._request(number)
        began = time.perf_counter()
        self._found(request)
        took = time.perf_counter() - began
        self._client.end_session(request)
        return took

    def abandon(self) -> None:
        """End without a word to the server, which is gone."""
        self._client._req_client.close()
        self._client._req_client = None
        self._client.close()

    def close(self) -> None:
        self._client.close()

    def _request(self, number: int) -> Any:
        return self._client.create_request(
            number, f"request-{number}-{time.monotonic_ns()}", "test"
        )

    def _found(self, request: Any) -> int:
        """Return how many chunks LMCache has, in L1 when this returns."""
        client = self._client._req_client
        key = helpers._make_key(
            request.token_ids,
            request.request_id,
            start=0,
            end=request.num_full_tokens,
            world_size=1,
        )
        if not helpers._send_lookup(client, key, tp_size=1):
            raise Unavailable("LMCache does not answer a lookup")
        deadline = time.monotonic() + LOOKUP_S
        while time.monotonic() < deadline:
            hit = helpers._wait_for_result(client.query_prefetch_status(request.request_id))
            if isinstance(hit, int):
                return hit
            time.sleep(POLL_S)
        raise Unavailable("LMCache does not end a lookup")

    def _fill(self, number: int) -> None:
        """Write the KV of a request into the cache: random, and the same each time."""
        draw = torch.Generator().manual_seed(number)
        for layer in self._client._workers[0].kv_caches.values():
            layer.copy_(torch.randn(layer.shape, generator=draw))
