"""What tests do inside the workers of an engine. vLLM calls these with its worker, by keywords.

Workers may be processes of their own: what is held or reached shows in files.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.testing.wait import until

GATE_S = 60.0


def ours(connector: Any) -> Any:
    """Return the connector, or the one of ours among the children of a MultiConnector, or None."""
    children = getattr(connector, "_connectors", [connector])
    return next((child for child in children if type(child).__name__ == "KVStoreConnector"), None)


def side() -> Any:
    """Return this process's worker half of the connector, or None if another one is used."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = ours(get_kv_transfer_group())
    return connector.worker_side if connector is not None else None


def await_weights(_: Any) -> None:
    """Wait until this worker knows its weights: until then the cache takes no part."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = ours(get_kv_transfer_group())
    if connector is not None:
        until(lambda: knows(connector), GATE_S)


def knows(connector: Any) -> bool:
    connector._look_at_weights()
    return connector._pending is None


def pid(_: Any) -> int:
    return os.getpid()


def counters(_: Any) -> dict[str, float]:
    return dict(side().counters.totals)


def namespace(_: Any) -> str:
    return str(side()._namespace.to_json())


def saved(_: Any, *, wait_s: float = 10.0) -> bool:
    """Wait until every save that was ordered is done."""
    return bool(side().saver.drain(wait_s))


def hold_loads(_: Any, *, gate: str) -> None:
    """Make the next load touch file `gate`.rank before it copies, and wait until `gate` exists."""
    loader = side().loader
    _hold(loader._pages, "write", Path(gate), loader._shards.first)


def hold_saves(_: Any, *, gate: str) -> None:
    """The same for the next save."""
    saver = side().saver
    name = "encode" if saver._pages.coded else "read"
    _hold(saver._pages, name, Path(gate), saver._shards.first)


def _hold(pages: Any, name: str, gate: Path, shard: int) -> None:
    copy = getattr(pages, name)

    def held(*arguments: Any) -> Any:
        setattr(pages, name, copy)
        Path(f"{gate}.{shard}").touch()
        until(gate.exists, GATE_S)
        return copy(*arguments)

    setattr(pages, name, held)


def save_only(_: Any, *, shard: int, blocks: int | None) -> None:
    """Make the worker of `shard` lose all but the first blocks of each save; None: lose nothing."""
    saver = side().saver
    vars(saver).pop("put", None)
    if blocks is None or saver._shards.first != shard:
        return
    put = saver.put

    def cut(orders: Any, *rest: Any) -> None:
        kept = [_cut(order, blocks) for order in orders]
        put([order for order in kept if order.spans], *rest)

    saver.put = cut


def _cut(order: Any, blocks: int) -> Any:
    spans = [
        replace(span, device_blocks=span.device_blocks[: blocks - span.begin])
        for span in order.spans
        if span.begin < blocks
    ]
    return replace(order, spans=tuple(spans))
