"""Prefill here, decode there: which engine has the prefix of a request, or is about to have it.

Both ways of naming it are read: that of vLLM's own peer-to-peer tier and of llm-d's sidecar,

    {"remote_prefiller": {"kv_request_id": "...", "remote_host": "10.0.0.1", "remote_port": 8000}}
    {"remote_kv_source": {...}}

and our own, `{"kvstore": {"source": "<node id, or HOST:PORT>", "blocks": 125}}`. An engine that is
asked to prefill for another one (`remote_decoder`, `do_remote_decode`) answers with both. What is
named is a hint: the daemon asks members of its fleet alone.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvstore.model.member import SOURCE_CHARS_MAX, Origin
from kvstore_vllm.counters import Counters
from kvstore_vllm.hints import FIELD
from kvstore_vllm.settings import Settings
from kvstore_vllm.tracked import Tracked

PREFILLER, SOURCE, DECODER = "remote_prefiller", "remote_kv_source", "remote_decoder"


class Remote(msgspec.Struct, frozen=True):
    """An engine, as requests name it. Other fields are ignored."""

    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=SOURCE_CHARS_MAX - 6)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    @property
    def address(self) -> str:
        return f"{self.remote_host}:{self.remote_port}"


def read_origin(tracked: Tracked, counters: Counters) -> Origin | None:
    """Return who has the prefix of a request, as it says; None: it does not say.

    A prefiller will have all of the prompt. What cannot be read is counted, and ignored.
    """
    hints, params = tracked.hints, tracked.request.kv_transfer_params
    if hints.source:
        return Origin(hints.source, hints.blocks)
    if not isinstance(params, dict):
        return None
    for name, expected in ((PREFILLER, len(tracked.loadable_keys())), (SOURCE, 0)):
        if name not in params:
            continue
        try:
            return Origin(msgspec.convert(params[name], Remote).address, expected)
        except (msgspec.ValidationError, RecursionError):
            counters.add(hints_ignored=1)
            return None
    return None


def load_deadline_s(tracked: Tracked, settings: Settings) -> float:
    """Return how long a request may wait for its blocks."""
    origin = tracked.origin
    if origin is not None and origin.expect_blocks:
        return max(settings.load_deadline_s, settings.handoff_deadline_s)
    return settings.load_deadline_s


def handoff_params(tracked: Tracked, address: str) -> dict[str, Any] | None:
    """Return the `kv_transfer_params` with which another engine goes on with a request; None if it
    is not to.

    address: HOST:PORT of this engine, "" if it was not told.
    """
    params, source = tracked.request.kv_transfer_params, tracked.node or address
    if not _asks_handoff(params) or not source:
        return None
    answer: dict[str, Any] = {FIELD: {"source": source, "blocks": len(tracked.loadable_keys())}}
    if address:
        decoder = params.get(DECODER)
        named = decoder.get("kv_request_id") if isinstance(decoder, dict) else None
        host, _, port = address.rpartition(":")
        answer[PREFILLER] = {
            "kv_request_id": named or tracked.request.request_id,
            "remote_host": host,
            "remote_port": int(port),
        }
    return answer


def _asks_handoff(params: Any) -> bool:
    return isinstance(params, dict) and bool(
        params.get("do_remote_decode") or params.get(DECODER) is not None
    )
