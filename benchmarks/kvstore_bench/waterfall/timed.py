"""Our connector, which also writes down when vLLM calls it. Runs in the engine's processes.

vLLM imports it by `kv_connector_module_path`. Marks go to the file that MARKS_FILE names, a line
each: the name and the clock that all processes of a host share. One request runs at a time.
"""

from __future__ import annotations

import os
import time
from typing import Any

from kvstore_vllm.connector import KVStoreConnector

MARKS_FILE = "KVSTORE_BENCH_MARKS"


class TimedConnector(KVStoreConnector):
    """Marks the moments that `stages.STAGES` lie between."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        path = os.environ[MARKS_FILE]
        self._marks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _mark(self, name: str) -> None:
        os.write(self._marks, f"{name} {time.monotonic():.7f}\n".encode())

    def on_new_request(self, request: Any) -> None:
        self._mark("asked")
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is not None:
            self._mark("offered")
        return found

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if kv_connector_metadata.step.tokens:
            self._mark("computing")
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        if self._get_connector_metadata().loads:
            self._mark("ordered")
        super().start_load_kv(forward_context, **options)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._get_connector_metadata().step.tokens:
            self._mark("computed")

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        found = super().get_transfer_results(finished_req_ids)
        if any(found if isinstance(found, tuple) else (found.finished_recving,)):
            self._mark("loaded")
        return found

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        found = super().get_finished(finished_req_ids)
        if found[1]:
            self._mark("loaded")
        return found
