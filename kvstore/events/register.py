"""Tells an indexer of a stream, by HTTP: the form of Dynamo's standalone indexer."""

from __future__ import annotations

import http.client
import json
from typing import NamedTuple
from urllib.parse import urlsplit

from kvstore.model.errors import InvalidRequest, Unavailable

REGISTER_S = 10.0
ANSWER_NBYTES_MAX = 1 << 20


class Registration(NamedTuple):
    """Whose stream it is. instance: the engine's id at the indexer. dp_rank: not the engine's."""

    instance: int
    model: str
    block_size: int
    dp_rank: int
    publish: str
    replay: str = ""


def register(url: str, what: Registration) -> str:
    """Register at an indexer; returns what it answered. Raises InvalidRequest or Unavailable."""
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise InvalidRequest(f"{url[:200]!r} is not the address of an indexer: http://HOST:8090")
    if "@" in what.model:
        raise InvalidRequest(f"{what.model[:200]!r}: a model that routers know has no @")
    body = {
        "instance_id": what.instance,
        "endpoint": what.publish,
        **({"replay_endpoint": what.replay} if what.replay else {}),
        "model_name": what.model,
        "block_size": what.block_size,
        "dp_rank": what.dp_rank,
    }
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(where.hostname, where.port, timeout=REGISTER_S)
        try:
            path = where.path.rstrip("/") + "/register"
            headers = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps(body).encode(), headers)
            answer = connection.getresponse()
            said = answer.read(ANSWER_NBYTES_MAX).decode(errors="replace").strip()
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unavailable(f"no indexer answers at {url}: {error}", reason="indexer") from error
    if answer.status >= 300:
        raise InvalidRequest(f"the indexer refused it ({answer.status}): {said[:500]}")
    return said
