"""What vLLM's scheduler calls on a connector, in the order of a step."""

from __future__ import annotations

import logging
from typing import Any

from kvstore_vllm import compat
from kvstore_vllm.metadata import StepMetadata, WorkerFacts
from kvstore_vllm.scheduler import SchedulerSide

logger = logging.getLogger(__name__)


class SchedulerHooks:
    """Delegates to the scheduler side."""

    @property
    def scheduler_side(self) -> SchedulerSide:
        raise NotImplementedError

    def _look_at_weights(self) -> None:
        raise NotImplementedError

    def _learn(self, facts: WorkerFacts) -> bool:
        raise NotImplementedError

    def on_new_request(self, request: Any) -> None:
        self._look_at_weights()
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self.scheduler_side.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        facts = connector_output.kv_connector_worker_meta
        if isinstance(facts, WorkerFacts) and not self._learn(facts):
            logger.error("cache=off reason='the workers hold different kinds of KV'")
        if compat.FAILS_BY_REQUEST:
            self.scheduler_side.loads_failed(connector_output.failed_recving or set())
        else:
            self.scheduler_side.blocks_failed(connector_output.invalid_block_ids)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler_side.request_finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler_side.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.has_pending_saves

    def reset_cache(self) -> bool:
        self.scheduler_side.reset_cache()
        return True
