"""Ask a daemon that was started again for everything, and hold it against the journal."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from kvstore import Client
from kvstore.model.block import BlockKey, NamespaceId, Part
from tests.torture import parts
from tests.torture.journal import Journal
from tests.torture.spaces import NAMESPACES, PARTS, SPACES, Item
from tests.torture.traffic import name_of

BATCH_KEYS = 64
WAIT_S = 10.0
ASKS = 2  # the second time of what was a miss the first time


def check(client: Client, journal: Journal, hear: Callable[[], None]) -> list[str]:
    """Return the promises that were broken, as "kind: words".

    hear: takes the daemon's evictions into the journal.
    """
    for namespace in NAMESPACES:
        client.register(namespace)
    stored = [
        Item(NamespaceId(found.namespace_id), BlockKey(found.key), part)
        for found in client.admin.scan()
        for part in PARTS[NamespaceId(found.namespace_id)]
    ]
    broken = [
        f"{_kind(journal, item)}: {item.key[:4].hex()} is stored"
        for item in stored
        if item.part == Part(0, 0) and not _block_may_exist(journal, item)
    ]
    missing: Iterable[Item] = dict.fromkeys([*stored, *journal.owed()])
    for _ in range(ASKS):
        missing = _ask(client, journal, missing, broken)
        hear()
        missing = [item for item in missing if journal.is_owed(item)]
    return broken + [f"lost: {name_of(item)}" for item in missing]


def _block_may_exist(journal: Journal, item: Item) -> bool:
    return any(journal.may_exist(item._replace(part=part)) for part in PARTS[item.namespace_id])


def _kind(journal: Journal, item: Item) -> str:
    return "foreign" if journal.was_put_by_others(item) else "resurrected"


def _ask(client: Client, journal: Journal, items: Iterable[Item], broken: list[str]) -> list[Item]:
    """Get items, judge what comes, and return those that were a miss."""
    missing = []
    for batch in _batches(items):
        asked_at = time.monotonic()
        first = batch[0]
        keys = [item.key for item in batch]
        namespace = SPACES[first.namespace_id]
        records = parts.get(client, namespace, keys, first.part, WAIT_S)
        for item, record in zip(batch, records, strict=True):
            if record is None:
                missing.append(item)
            elif found := journal.judge(item, record, asked_at):
                broken.append(f"{found}: {name_of(item)}")
    return missing


def _batches(items: Iterable[Item]) -> list[Sequence[Item]]:
    by_part: defaultdict[tuple[NamespaceId, Part], list[Item]] = defaultdict(list)
    for item in items:
        by_part[item.namespace_id, item.part].append(item)
    return [
        group[at : at + BATCH_KEYS]
        for group in by_part.values()
        for at in range(0, len(group), BATCH_KEYS)
    ]
