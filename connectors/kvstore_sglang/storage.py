"""SGLang's HiCache storage back end: a daemon of ours is the level below its host memory.

SGLang's threads call it: one that looks up, one that loads, one that saves. Each waits for us, so
each call ends by its deadline, and what is not done by then is a miss. Nothing here raises while
the engine runs: SGLang would take it for a failure of its own.

SGLang keeps KV pages in a first pool (`batch_*_v1`), and what else a model has, such as the states
of Mamba layers or the window of sliding ones, in further pools (`batch_*_v2`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from kvstore.client.lookup_lease import leading
from kvstore.client.pages import Place, Position
from kvstore.client.pieces import Memory
from kvstore_sglang.compat import check_version
from kvstore_sglang.hits import Needs, lengths
from kvstore_sglang.host_pages import HostPages
from kvstore_sglang.mover import Mover
from kvstore_sglang.names import Names, check_config, cuts_of
from kvstore_sglang.settings import parse_settings
from kvstore_sglang.weights import Weights, arguments, values

logger = logging.getLogger(__name__)

KV = PoolName.KV.value

Keys = Sequence[str]
Done = list[bool]


class Storage(HiCacheStorage):  # type: ignore[misc] # SGLang is not checked
    """What SGLang constructs. See `Settings` for what its extra config may say.

    Raises ConfigError for keys that it does not know, Incompatible for an SGLang that it is not
    tested with, and for a model whose weights nothing tells. A daemon that is not there (yet) is no
    error: all is a miss until it is.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        settings = parse_settings(storage_config.extra_config)
        version = check_version(allow_untested=settings.allow_untested)
        check_config(storage_config)
        told = arguments()
        self._weights = Weights(told, settings.weights)
        self._names = Names(storage_config, version, values(told))
        self._pools: dict[str, HostPages] = {}
        self._cuts = cuts_of(storage_config)
        rank = f"{storage_config.tp_rank}/{storage_config.tp_size}"
        self._mover = Mover(settings, f"sglang-{version} rank {rank}")
        self.counters = self._mover.counters

    # ---- pools ---------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises ConfigError, Incompatible for a pool whose pages cannot be had."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(_text(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        pages = self._pools[name] = HostPages(pool, name, self._cuts if name == KV else 1)
        logger.info(
            "pool=%s record_bytes=%d records_a_page=%d in_place=%s",
            *(name, pages.nbytes, pages.cuts, pages.in_place),
        )

    # ---- the first pool ------------------------------------------------------------------------

    def batch_exists(self, keys: Keys, extra_info: Any = None) -> int:
        """Return how many pages from the first on are stored."""
        return leading(self._exist([(KV, keys)])[0])

    def batch_get_v1(self, keys: Keys, host_indices: torch.Tensor, extra_info: Any = None) -> Done:
        """Load pages into the host pool; say which of them are there now."""
        return self._load([(KV, keys, host_indices)])[0]

    def batch_set_v1(self, keys: Keys, host_indices: torch.Tensor, extra_info: Any = None) -> Done:
        return self._save([(KV, keys, host_indices)], extra_info)[0]

    # ---- all pools -----------------------------------------------------------------------------

    def batch_exists_v2(
        self, keys: Keys, pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return how long a prefix may be, as the policy of each pool has it.

        Of a pool whose pages come in groups of blocks nothing is said: it is not loaded from here.
        """
        wanted = [
            each for each in pool_transfers or [] if each.hit_policy != PoolHitPolicy.BLOCK_GROUPS
        ]
        names = [KV, *(_text(each.name) for each in wanted)]
        kv, *others = self._exist([(name, keys) for name in names])
        pages = leading(kv)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer, present in zip(wanted, others, strict=True):
            trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            window = max(1, len(transfer.keys or ())) if trailing else 0
            can = lengths(Needs(window, present), pages)
            if can:
                hits[transfer.name] = can[-1]
            restorable = sorted(set(restorable) & set(can))
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, Done]:
        return self._by_pool(transfers, self._load(_asked(transfers)))

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, Done]:
        return self._by_pool(transfers, self._save(_asked(transfers), extra_info))

    # ---- page by page, without `interface_v1` --------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        found: torch.Tensor | None = self.batch_get([key], [target_location])[0]
        return found

    def batch_get(
        self, keys: Keys, target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Fill flat pages that SGLang gives; return them, None for a miss."""
        targets = list(target_locations or [None] * len(keys))
        places, memory = self._flat(keys, targets)
        good = self._folded(KV, iter(self._mover.load(places, memory)), len(keys))
        return [target if is_good else None for target, is_good in zip(targets, good, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Keys,
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        kept = [None if value is None else value.contiguous() for value in values or ()]
        return all(self._mover.save(*self._flat(keys, kept or [None] * len(keys))))

    # ---- life ----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Delete what engines like this one have stored, in all pools, of this rank's part."""
        weights = self._weights.identity
        if weights is None:
            logger.error("clear=refused reason='the weights are not known (yet)'")
            return
        spaces = [
            namespace
            for pages in self._pools.values()
            if pages.nbytes
            for namespace in self._names.namespaces(pages, weights, self._block_tokens)
        ]
        logger.warning("cleared blocks=%d", self._mover.clear(spaces))

    def flush(self, wait_s: float = 30.0) -> bool:
        """Wait until all that was saved is on disk; False if it is not after `wait_s`. SGLang does
        not call it. Raises Unavailable."""
        return self._mover.flush(wait_s)

    def close(self) -> None:
        self._mover.close()

    # ---- inside --------------------------------------------------------------------------------

    def _exist(self, asked: Sequence[tuple[str, Keys]]) -> list[Done]:
        """Say of each pool which of its pages are stored. All of one without bytes are."""
        places: list[Place | None] = []
        for name, keys in asked:
            places += self._places(name, keys)
        there = iter(self._mover.exist(places) if any(places) else [False] * len(places))
        return [self._folded(name, there, len(keys)) for name, keys in asked]

    def _load(self, asked: Sequence[tuple[str, Keys, Any]]) -> list[Done]:
        """Load pages of some pools, all at once."""
        ready = [self._ready(*each, to_load=True) for each in asked]
        places = [place for some, _ in ready for place in some]
        memory = [each for _, some in ready for each in some]
        good = iter(self._mover.load(places, memory) if any(places) else [False] * len(places))
        done = [[next(good) for _ in some] for some, _ in ready]
        for (name, _, indices), (_, some), result in zip(asked, ready, done, strict=True):
            pages = self._pools.get(name)
            if pages is None or not any(result):
                continue
            try:
                pages.loaded(indices, some, result)
            except (IndexError, ValueError, RuntimeError) as error:
                self.counters.refuse("failed", len(result), f"pages of {name}: {error}")
                result[:] = [False] * len(result)
        return [
            self._folded(name, iter(result), len(keys))
            for (name, keys, _), result in zip(asked, done, strict=True)
        ]

    def _save(self, asked: Sequence[tuple[str, Keys, Any]], extra_info: Any) -> list[Done]:
        ready = [self._ready(*each, to_load=False) for each in asked]
        places = [place for some, _ in ready for place in some]
        memory = [each for _, some in ready for each in some]
        before = list(getattr(extra_info, "prefix_keys", None) or ())
        positions = [
            position
            for (name, _, _), (some, _) in zip(asked, ready, strict=True)
            for position in self._positions(name, some, before)
        ]
        done = self._mover.save(places, memory, positions) if any(places) else []
        good = iter(done or [False] * len(places))
        return [self._folded(name, good, len(keys)) for name, keys, _ in asked]

    def _ready(
        self, name: str, keys: Keys, indices: Any, *, to_load: bool
    ) -> tuple[list[Place | None], Sequence[Memory]]:
        """Return where pages are stored, and their memory; no place for what is not to be moved."""
        pages, why = self._pools.get(name), f"not one page of {name} for each key"
        records = self._records(name, len(keys))
        nothing: tuple[list[Place | None], Sequence[Memory]] = (
            [None] * records,
            [memoryview(b"")] * records,
        )
        if pages is None or not pages.nbytes:
            return nothing
        if not pages.fits(keys, indices):
            self.counters.refuse("malformed", len(keys), why)
            return nothing
        places = self._places(name, keys)
        if not any(places):
            return nothing
        try:
            return places, pages.to_load(indices) if to_load else pages.to_save(indices)
        except (IndexError, ValueError, RuntimeError) as error:
            self.counters.refuse("failed", len(keys), f"pages of {name}: {error}")
            return nothing

    def _flat(
        self, keys: Keys, tensors: Sequence[Any]
    ) -> tuple[list[Place | None], Sequence[Memory]]:
        """Return where flat pages of the first pool are stored, and their memory."""
        pages = self._pools.get(KV)
        places: list[Place | None] = []
        memory: list[Memory] = []
        for key, tensor in zip(keys, tensors, strict=True):
            flat = _bytes_of(tensor)
            if pages is None or flat is None or len(flat) != pages.nbytes * pages.cuts:
                self.counters.refuse("malformed", 1, "no memory of a flat page")
                places += [None] * self._records(KV, 1)
                memory += [memoryview(b"")] * self._records(KV, 1)
            else:
                places += self._places(KV, [key])
                memory += pages.of_flat(flat)
        return places, memory

    def _places(self, name: str, keys: Sequence[str | None]) -> list[Place | None]:
        """Return where pages are stored; nowhere while it is not known whose they are."""
        pages, weights = self._pools.get(name), self._weights.identity
        if pages is None or not pages.nbytes or weights is None:
            if weights is None:
                self.counters.refuse("unnamed", len(keys), "the weights are not known (yet)")
            return [None] * self._records(name, len(keys))
        places = self._names.places(pages, keys, weights, self._block_tokens)
        self.counters.refuse("malformed", places.count(None), "no hash of a page")
        return places

    @property
    def _block_tokens(self) -> int:
        first = self._pools.get(KV)
        return first.page_size if first is not None else 1

    def _records(self, name: str, count: int) -> int:
        """Return how many records so many pages of a pool have."""
        pages = self._pools.get(name)
        return count * (pages.cuts if pages is not None else 1)

    def _folded(self, name: str, records: Iterator[bool], count: int) -> Done:
        """Say of pages what is told of their records. A pool without bytes has all its pages."""
        pages = self._pools.get(name)
        empty = pages is not None and not pages.nbytes
        told = [list(islice(records, self._records(name, 1))) for _ in range(count)]
        return [all(each) or empty for each in told]

    def _positions(self, name: str, places: Sequence[Place | None], before: Keys) -> list[Position]:
        """Return where pages stand, which follow each other. before: hashes of those before them,
        which SGLang gives with `hicache_storage_pass_prefix_keys`."""
        cuts = self._records(name, 1)
        last = self._places(name, before[-1:]) if before else [None] * cuts
        keys = [each.key if each else None for each in (*last, *places)]
        return [Position(len(before) + at // cuts, keys[at]) for at in range(len(places))]

    def _by_pool(self, transfers: Any, done: Sequence[Done]) -> dict[str, Done]:
        found: dict[str, Done] = {}
        for transfer, result in zip(transfers, done, strict=True):
            found.setdefault(transfer.name, []).extend(result)
        return found


def _asked(transfers: Any) -> list[tuple[str, Keys, Any]]:
    return [(_text(each.name), each.keys or [], each.host_indices) for each in transfers]


def _text(name: Any) -> str:
    return str(getattr(name, "value", name))


def _bytes_of(tensor: Any) -> memoryview | None:
    """Return a tensor's own bytes; None if there are none in one piece."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
        return None
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()).cast("B")
