"""The worker half, on every rank: records into the pool, and out of it.

start_load_kv ... before the model runs: the fence, then what is promised goes into its blocks
wait_for_save ... the model's work is in the stream: saves begin when it is done
get_finished .... which requests' blocks nothing reads any more
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from kvstore.model.block import Namespace
from kvstore.model.errors import Incompatible
from kvstore.model.names import model_name
from kvstore_trtllm import compat
from kvstore_trtllm.compat import KvCacheConnectorWorker
from kvstore_trtllm.counters import Counters
from kvstore_trtllm.engine import engine_of
from kvstore_trtllm.metadata import LoadOrder, StepMetadata
from kvstore_trtllm.namespace import Facts, facts_of
from kvstore_trtllm.pool import Pool
from kvstore_trtllm.saving import Saver
from kvstore_trtllm.staged import Staged

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 2.0
_PROBE_NBYTES = 4096


class KVStoreWorker(KvCacheConnectorWorker):  # type: ignore[misc] # its base is not checked
    """Moves the bytes of one rank, in its executor's thread."""

    def __init__(self, llm_args: Any) -> None:
        """Raise ConfigError or Incompatible, saying what to change, if the cache cannot be used."""
        super().__init__(llm_args)
        self._engine = engine_of(llm_args)
        self.counters = Counters()
        self._rank = compat.rank()
        self._pool: Pool | None = None
        self._saver: Saver | None = None
        self._namespace: Namespace | None = None
        self._told = ""
        self._unsaved: StepMetadata | None = None
        self._finished: set[int] = set()

    # Start and end --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take over the pool. Raises Incompatible if it does not hold all KV of the model, or if
        the ranks cannot be one engine to us."""
        facts = facts_of(
            self._llm_args,
            kv_cache_tensor,
            self._engine.version,
            allow_untested=self._engine.settings.allow_untested,
        )
        if int(getattr(self._llm_args, "tensor_parallel_size", 1) or 1) > 1:
            self._agree(facts)
        self._pool = Pool(kv_cache_tensor)
        if facts.shards > 1 or self._rank == 0:  # what all hold is stored once
            self._saver = Saver(
                self._engine.settings,
                self._engine.client,
                self._pool,
                self._shard(facts),
                self.counters,
            )
        self._engine.facts = facts

    def _shard(self, facts: Facts) -> int:
        return self._rank if facts.shards > 1 else 0

    def _agree(self, facts: Facts) -> None:
        """Raise Incompatible unless all ranks hold the same kind of KV, on one host."""
        probe = Staged(_PROBE_NBYTES)
        mark = os.urandom(16)
        probe.view[: len(mark)] = mark
        told = compat.all_gather((facts, probe.path, mark))
        _, path, expected = told[0]
        seen = compat.all_gather(_reads(path, expected))  # the probes live until all have looked
        if any(other != facts for other, *_ in told):
            raise Incompatible("the ranks of this engine hold different kinds of KV")
        if not all(seen):
            raise Incompatible(
                "a rank of this engine cannot read the memory of rank 0: kvstore needs all ranks "
                "on one host, as one user, in one PID namespace"
            )

    def close(self) -> None:
        """Finish saves, and end. TensorRT-LLM has no call for it; a process that ends need not."""
        if self._saver is not None:
            self._saver.close(CLOSE_WAIT_S)
        self._engine.close()

    # A step ---------------------------------------------------------------------------------------

    def start_load_kv(self, stream: Any) -> None:
        """Copy what was promised into its blocks, before what the stream does next."""
        meta: StepMetadata | None = self._metadata
        self._unsaved = meta
        if meta is None:
            return
        if meta.namespace != self._told:
            self._told = meta.namespace
            # The text leaves out the model's name, which whoever looks at the daemon reads.
            name = model_name(str(self._llm_args.model))
            self._namespace = Namespace.from_json(meta.namespace, name) if meta.namespace else None
        if self._saver is not None:
            self._saver.fence(meta.handed_out)
        for order in meta.loads:
            self._load(order, stream)

    def _load(self, order: LoadOrder, stream: Any) -> None:
        facts, pool = self._engine.facts, self._pool
        if facts is None or pool is None:
            raise Incompatible("TensorRT-LLM loads before it has registered its pool")
        nbytes = len(order.device_blocks) * pool.record_nbytes
        begin = self._shard(facts) * nbytes
        pool.write(order.device_blocks, order.staged.view[begin : begin + nbytes], stream)
        self.counters.add(loaded_blocks=len(order.device_blocks))

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing to wait for: loads are in the stream before the first layer."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing to do: whole blocks are saved when the last layer is done."""

    def wait_for_save(self, stream: Any) -> None:
        """Queue the step's saves, which begin when the stream has come here. Never waits."""
        meta, self._unsaved = self._unsaved, None
        if meta is None or not meta.saves or self._saver is None or self._namespace is None:
            return
        assert self._pool is not None
        self._saver.put(meta.saves, self._namespace, self._pool.mark(stream))

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the finished requests whose blocks nothing reads any more. No load is told: they
        are done when the model runs."""
        self._finished.update(finished_gen_req_ids)
        reading = self._saver.reading if self._saver is not None else set()
        done = sorted(self._finished - reading)
        self._finished &= reading
        return done, []


def _reads(path: str, expected: bytes) -> bool:
    try:
        return bytes(Staged.open(path, _PROBE_NBYTES).view[: len(expected)]) == expected
    except OSError:
        return False
