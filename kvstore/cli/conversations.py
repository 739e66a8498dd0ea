"""The conversations that a daemon knows, as `kvstore status` shows them."""

from __future__ import annotations

from typing import Any

from kvstore.client import Client
from kvstore.model.errors import KVStoreError
from kvstore.model.words import SHORT_CHARS, duration, printable
from kvstore.rpc.v1 import kvstore_pb2 as pb

SHOWN, ASKED = 5, 1000


def conversations_of(client: Client) -> pb.ConversationsReply:
    """Return the newest ones; none where there are none to ask for: the socket
    is the operator's, or the daemon is older."""
    try:
        return client.admin.conversations(limit=ASKED)
    except KVStoreError:
        return pb.ConversationsReply()


def conversations_json(known: pb.ConversationsReply) -> dict[str, Any]:
    items = [
        {
            "session_id": item.session_id,
            "namespace": item.namespace_id.hex(),
            "blocks": item.blocks,
            "last_key": item.last_key.hex(),
            "age_s": item.age_s,
            "ended": item.ended,
            "expected_in_s": item.expected_in_s,
            "pinned_s": item.pinned_s,
            "pin_bytes_max": item.pin_bytes_max,
        }
        for item in known.items
    ]
    return {"conversations": items, "known_conversations": known.known}


def conversation_lines(known: pb.ConversationsReply) -> list[str]:
    """Return how many there are, and what hints have said of the newest."""
    if not known.known:
        return []
    hinted = [each for each in known.items if each.ended or each.expected_in_s or each.pinned_s]
    lines = [f"chats {known.known} conversations known, {len(hinted)} of the newest with hints"]
    for each in hinted[:SHOWN]:
        expected = f"expected in {duration(each.expected_in_s)}" if each.expected_in_s else ""
        pinned = f"pinned for {duration(each.pinned_s)}" if each.pinned_s else ""
        what = ", ".join(filter(None, ("ended" * each.ended, expected, pinned)))
        name = each.session_id or f"prefix to {each.last_key.hex()[:SHORT_CHARS]}"
        lines.append(f"      {printable(name)}: {each.blocks} blocks, {what}")
    return lines
