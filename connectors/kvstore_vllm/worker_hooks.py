"""What vLLM's workers call on a connector, in the order of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvstore_vllm import compat
from kvstore_vllm.metadata import StepMetadata
from kvstore_vllm.worker import WorkerSide


class WorkerHooks:
    """Delegates to the worker side."""

    _computed = True  # whether the step computes anything

    @property
    def worker_side(self) -> WorkerSide:
        raise NotImplementedError

    def _look_at_weights(self) -> None:
        raise NotImplementedError

    if TYPE_CHECKING:  # at run time it is the one of vLLM's base, which comes later in the order

        def _get_connector_metadata(self) -> Any: ...

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """The first hook of every step, with or without tokens, before any block is overwritten."""
        self._look_at_weights()
        self.worker_side.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._computed = (
            getattr(forward_context, "attn_metadata", None) is not None or "request_ids" in kwargs
        )
        self.worker_side.start_loads(self._get_connector_metadata())

    def unregister_kv_caches(self) -> None:
        """The blocks are about to be unmapped, for sleep mode: let nothing read them any more."""
        self.worker_side.stop_reading()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: whole blocks are saved at the start of the next step."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: the fence of a later step protects what is still being copied."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return compat.transfer_results(*self.worker_side.results(computed=self._computed))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """The same where failed loads are reported by block."""
        loaded, failed = self.worker_side.results(computed=self._computed)
        return None, loaded | failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks = self.worker_side.take_failed_blocks()
        return set() if compat.FAILS_BY_REQUEST else blocks
