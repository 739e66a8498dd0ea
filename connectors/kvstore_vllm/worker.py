"""The worker side: joins pages, saves and loads, and gives vLLM's hooks their order in a step.

begin_step ... before anything of this step is overwritten: queue saves, pass the fence; from here
               on the model computes
start_loads .. after the fence, so a load never lands in blocks that are still being saved; before
               or after the model, as this version of vLLM has it
results ...... at the end of the step
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore import Client
from kvstore.model.block import Namespace
from kvstore_vllm.counters import Counters
from kvstore_vllm.loading import Loader
from kvstore_vllm.metadata import StepMetadata, in_epoch
from kvstore_vllm.prefill import StepClock
from kvstore_vllm.saving import Saver
from kvstore_vllm.settings import Settings
from kvstore_vllm.shards import Shards

if TYPE_CHECKING:
    from kvstore_vllm.pages import Pages

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 2.0
SLEEP_WAIT_S = 10.0
"""Longer than a save may wait for the daemon: a copy itself takes milliseconds."""
IDLE_WAIT_S = 0.010
"""Of a step without work, for a load: one of 10 MB from DRAM takes 8 ms on two cores. An empty step
in between takes the interpreter's lock from the threads that load. A request that comes meanwhile
is seen as much later."""


class WorkerSide:
    """Moves the bytes of one worker. vLLM's worker thread owns it."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        pages: Pages,
        namespace: Namespace | None,
        *,
        shards: Shards,
        writes: bool,
    ) -> None:
        """namespace: None until `use_namespace` tells it; saves ordered before that are dropped.
        shards: what it holds of each block; its pages have a group for each shard of each of the
        engine's. writes: False for a worker whose KV another one holds too and saves."""
        self.counters = Counters()
        self._told = namespace
        self._namespace = namespace
        self._epoch = ""
        self._writes = writes
        self._pages = pages
        self._bounced_nbytes = 0
        self.saver = Saver(settings, client, pages, shards=shards, counters=self.counters)
        self.loader = Loader(client, pages, shards=shards, counters=self.counters)
        self.clock = StepClock(pages.event)

    def use_namespace(self, namespace: Namespace) -> None:
        """Learn what the KV is, once the weights are known."""
        self._told = namespace
        self._namespace = in_epoch(namespace, self._epoch)

    def begin_step(self, meta: StepMetadata) -> None:
        if meta.epoch != self._epoch:
            self._epoch = meta.epoch
            if self._told is not None:
                self._namespace = in_epoch(self._told, meta.epoch)
        if self._writes and self._namespace is not None:
            self.saver.put(meta.saves, self._namespace)
        elif self._namespace is None:
            self.counters.add(saves_dropped_unknown_weights=len(meta.saves))
        self.saver.fence(meta.handed_out)
        self.clock.begin(meta.step)

    def start_loads(self, meta: StepMetadata) -> None:
        for order in meta.loads:
            self.loader.put(order)

    def results(self, *, computed: bool) -> tuple[set[str], set[str]]:
        """Return the requests (loaded, failed) since the last step.

        computed: whether the step ran the model. If not, the engine is about to spin until a load
        has ended; a short wait here leaves the processor to it.
        """
        bounced, before = self._pages.bounced_nbytes, self._bounced_nbytes
        if bounced > before:
            self.counters.add(bounced_bytes=bounced - before)
            self._bounced_nbytes = bounced
        if computed:
            self.clock.end()
        elif self.loader.pending:
            self.loader.wait(IDLE_WAIT_S)
        return self.loader.take()

    def take_failed_blocks(self) -> set[int]:
        """Return the first device block of each failed load since the last call."""
        return self.loader.take_failed_blocks()

    def stop_reading(self) -> None:
        """Give up saves that have not copied their blocks yet, and wait until no copy is under way.

        Loads have ended before: the engine waits for them.
        """
        if not self.saver.give_up(SLEEP_WAIT_S):
            logger.error("sleep=unsafe reason='a save still reads its blocks'")

    def close(self) -> None:
        self.saver.close(CLOSE_WAIT_S)
        self.loader.close(CLOSE_WAIT_S)
        self._pages.close()
