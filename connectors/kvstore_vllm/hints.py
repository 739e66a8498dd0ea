"""Hints that come with a request to vLLM.

A request carries them in `kv_transfer_params`, under a name of their own, because other connectors
read the same dictionary:

    {"kvstore": {"session_id": "chat-17", "expect_s": 30}}

vLLM shows connectors no HTTP headers: `headers.py` turns those into the same fields.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import msgspec

from kvstore import Client
from kvstore.client.request_hints import HintSender, SessionHints
from kvstore.model.member import SOURCE_CHARS_MAX
from kvstore_vllm.counters import Counters

logger = logging.getLogger(__name__)

FIELD = "kvstore"


class RequestHints(SessionHints, frozen=True, forbid_unknown_fields=True):
    """The hints of a request about its session, and what it wants itself.

    fidelity: "fine": lossy blocks are loaded with their fine parts, or not at all; "base": with
    those that are there.
    source, blocks: who has the prefix, and how long it will be there: see `handoff.py`.
    """

    fidelity: Literal["base", "fine"] = "base"
    source: Annotated[str, msgspec.Meta(max_length=SOURCE_CHARS_MAX)] = ""
    blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0

    @property
    def refined(self) -> bool:
        """Whether the request insists on fine parts."""
        return self.fidelity == "fine"


NO_HINTS = RequestHints()


def read_hints(kv_transfer_params: Any, counters: Counters) -> RequestHints:
    """Return a request's hints. Those that cannot be read are counted, and are none."""
    if not isinstance(kv_transfer_params, dict) or FIELD not in kv_transfer_params:
        return NO_HINTS
    try:
        return msgspec.convert(kv_transfer_params[FIELD], RequestHints)
    except (msgspec.ValidationError, RecursionError) as error:
        logger.debug("hints=ignored reason=%r", str(error))
        counters.add(hints_ignored=1)
        return NO_HINTS


def hint_sender(client: Client, counters: Counters) -> HintSender:
    """Return what sends the hints of finished requests, and counts them. The scheduler's thread
    owns it."""
    names = {"sent": "hints", "failed": "hints_failed"}
    return HintSender(client, lambda what: counters.add(**{names[what]: 1}))
