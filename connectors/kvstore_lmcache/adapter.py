"""LMCache inside an engine: a daemon of ours as its remote storage.

    remote_storage_plugins: ["kvstore"]
    extra_config:
      remote_storage_plugin.kvstore.module_path: kvstore_lmcache
      remote_storage_plugin.kvstore.class_name: Adapter
      remote_storage_plugin.kvstore.target: unix:/run/kvstore/kvstore.sock

Settings are those of `Settings`, each behind `remote_storage_plugin.kvstore.`. LMCache calls from
its own event loop and from the engine's threads; the work is done on the loop of a client of ours.
Whoever holds a page holds a reference of it, until no copy touches it any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lmcache.v1.storage_backend.connector import (
    ConnectorAdapter,
    ConnectorContext,
    extract_plugin_type,
)
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

import kvstore
from kvstore import ConfigError, Incompatible
from kvstore.client.page_counters import Counters
from kvstore.client.page_work import Done, Work, start
from kvstore.client.pages import Pages, Place, connect
from kvstore_lmcache.compat import check_version
from kvstore_lmcache.names import Names, Owner
from kvstore_lmcache.settings import Settings, parse_settings
from kvstore_lmcache.weights import ADVICE, Weights

logger = logging.getLogger(__name__)

PLUGIN = "kvstore"
SCHEME = "plugin://"
LOADER_KEYS = ("module_path", "class_name", "url")  # LMCache's own, not settings
MARGIN_S = 1.0  # beyond the deadline of the work itself

Objects = list[Any]  # of LMCache's memory; the connector has a method `list`
Texts = list[str]
Places = list[Place | None]


class Adapter(ConnectorAdapter):  # type: ignore[misc] # LMCache is not checked
    """What LMCache looks for: it takes the plug-ins named `kvstore` and `kvstore.ANYTHING`."""

    def __init__(self) -> None:
        super().__init__(f"{SCHEME}{PLUGIN}")

    def can_parse(self, url: str) -> bool:
        return url.startswith(SCHEME) and extract_plugin_type(url[len(SCHEME) :]) == PLUGIN

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises ConfigError for settings, Incompatible for an LMCache that is not tested: LMCache
        logs them, and caches nothing then, in its own memory neither."""
        return Connector(context, _settings(context))


class Connector(RemoteConnector):  # type: ignore[misc]
    """The pages of one worker of an engine.

    Where nothing tells what they are of, the log says what to set, and all is a miss: LMCache
    turns its own memory off, too, where it has no connector.
    """

    def __init__(self, context: ConnectorContext, settings: Settings) -> None:
        config, metadata = context.config, context.metadata
        if config is None or metadata is None:
            raise ConfigError("LMCache gave no config or no metadata: class_name must be Adapter")
        if config.use_layerwise:
            raise ConfigError("use_layerwise is not supported: set it to false")
        if config.remote_serde not in (None, "naive"):
            raise ConfigError(f"remote_serde={config.remote_serde} is not supported: set naive")
        version = check_version(allow_untested=settings.allow_untested)
        super().__init__(config, metadata)
        self.counters = Counters()
        self._memory = context.local_cpu_backend
        self._settings = settings
        self._weights: Weights | str | None = None
        self._unnamed = "the weights are not known (yet)"
        try:
            _check_dtypes(self.meta_dtypes, settings)
            self._weights = _weights_of(metadata.model_name, settings)
        except Incompatible as error:
            self._unnamed = str(error)
            logger.error("cache=off reason=%r", self._unnamed)
        self._names = Names(settings, version)
        self._pages = Pages(settings.limits, self.counters)
        self._owner: Owner = (
            ("page", f"{self.meta_fmt.name} {self.meta_shapes} {self.meta_dtypes}"),
        )
        self._client = kvstore.Client(
            settings.target or None,
            name=f"lmcache-{version} worker {metadata.worker_id}",
            daemon_uid=settings.daemon_uid,
        )
        self._client.submit(connect)

    # ---- what LMCache calls on its loop --------------------------------------------------------

    async def exists(self, key: Any) -> bool:
        return (await self.batched_async_contains("", [key])) == 1

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> Objects:
        """Return a page of LMCache's memory for each key, None for a miss."""
        pages = self._allocate(len(keys)) if self._client.available else []
        if not pages:
            self.counters.refuse("away", len(keys), "no daemon, or no memory for what it has")
            return [None] * len(keys)
        places = self._places(keys[: len(pages)])
        views = [_bytes(page) for page in pages]
        future = self._submit(len(views), lambda remote: self._pages.load(remote, places, views))
        try:
            loaded = await asyncio.shield(asyncio.wrap_future(future))
        except BaseException:  # LMCache gave up; the pages are free when nothing fills them
            future.add_done_callback(lambda _: _drop(pages))
            raise
        _drop([page for page, there in zip(pages, loaded, strict=True) if not there])
        found = [page if there else None for page, there in zip(pages, loaded, strict=True)]
        return found + [None] * (len(keys) - len(found))

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Store full pages. The caller keeps its references; ours last as long as the copy."""
        full = [obj.get_size() == self.full_chunk_size_bytes for obj in memory_objs]
        self.counters.refuse("partial", full.count(False), "only full chunks are stored")
        places = self._places([key for key, is_full in zip(keys, full, strict=True) if is_full])
        pages = [obj for obj, is_full in zip(memory_objs, full, strict=True) if is_full]
        if not pages:
            return
        for page in pages:
            page.ref_count_up()
        views = [_bytes(page) for page in pages]
        future = self._submit(len(views), lambda remote: self._pages.save(remote, places, views))
        future.add_done_callback(lambda _: _drop(pages))
        await asyncio.shield(asyncio.wrap_future(future))

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        """Return how many keys from the first on are stored."""
        places = self._places(keys)
        future = self._submit(len(keys), lambda remote: self._pages.exist(remote, places))
        found = await asyncio.wrap_future(future)
        return _prefix(found)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> Objects:
        """Return the pages from the first key on, up to the first that is a miss."""
        pages = await self.batched_get(keys)
        hit = _prefix([page is not None for page in pages])
        _drop([page for page in pages[hit:] if page is not None])
        return pages[:hit]

    async def list(self) -> Texts:
        """Nothing: a daemon keeps digests of LMCache's keys, which do not tell their text."""
        return []

    async def close(self) -> None:
        logger.info("closed %s", self.counters.as_dict())
        await asyncio.to_thread(self._client.close)

    # ---- what it calls from other threads ------------------------------------------------------

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        places = self._places(keys)
        future = self._submit(len(keys), lambda remote: self._pages.exist(remote, places))
        return _prefix(self._outcome(future, self._settings.lookup_deadline_s))

    def remove_sync(self, key: Any) -> bool:
        places = self._places([key])
        future = self._submit(1, lambda remote: self._pages.delete(remote, places))
        return self._outcome(future, self._settings.save_deadline_s) == [True]

    # ---- inside --------------------------------------------------------------------------------

    def _places(self, keys: Sequence[Any]) -> Places:
        """Name pages by all that LMCache says of them; tags are a request's own."""
        told = self._weights
        weights = told.identity if isinstance(told, Weights) else told
        if weights is None:
            self.counters.refuse("unnamed", len(keys), self._unnamed)
            return [None] * len(keys)
        return [
            self._names.place(
                (
                    ("model", key.model_name),
                    ("worker", f"{key.worker_id} of {key.world_size}"),
                    ("dtype", str(key.dtype)),
                    *self._owner,
                ),
                weights,
                key.chunk_hash_hex,
                *(part for tag in key.tags or () for part in (str(tag[0]), str(tag[1]))),
            )
            for key in keys
        ]

    def _submit(self, keys: int, work: Work) -> Future[Done]:
        """Start work on `keys` pages; if it fails, all of it is a miss."""
        return start(self._client, self.counters, keys, work)

    def _outcome(self, future: Future[Done], deadline_s: float) -> Done:
        """Wait for work from a thread of the engine's; what is not done in time is a miss."""
        try:
            return future.result(deadline_s + MARGIN_S)
        except TimeoutError:
            return []

    def _allocate(self, count: int) -> Objects:
        """Return pages of LMCache's memory, as many of `count` as there is room for."""
        pages: Objects = []
        for _ in range(count):
            page = self._memory.allocate(
                self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False
            )
            if page is None:
                break
            pages.append(page)
        return pages


def _settings(context: ConnectorContext) -> Settings:
    """Read what LMCache's extra_config says of this plug-in. Raises ConfigError."""
    prefix = f"remote_storage_plugin.{context.plugin_name or PLUGIN}."
    extra = (context.config.extra_config if context.config else None) or {}
    given = {
        name.removeprefix(prefix): value for name, value in extra.items() if name.startswith(prefix)
    }
    for name in LOADER_KEYS:
        given.pop(name, None)
    return parse_settings(given, f"extra_config {prefix}*")


def _weights_of(model: str, settings: Settings) -> Weights | str:
    """Return what tells the weights that this engine has loaded. Raises Incompatible."""
    if settings.weights_id:
        return settings.weights_id
    path = Path(model).absolute()
    try:
        named = str(path) if path.exists() else model
    except OSError as error:
        raise Incompatible(f"cannot read {model!r} ({error!r}): {ADVICE}") from error
    return Weights(named, watched=False)


def _check_dtypes(dtypes: Sequence[Any], settings: Settings) -> None:
    """Raise Incompatible for KV of which LMCache tells its bytes, and not what they mean."""
    if not settings.kv_dtype and any(str(dtype) == "torch.uint8" for dtype in dtypes):
        raise Incompatible(
            "LMCache says that KV is kept in bytes (torch.uint8), which may be FP8 or others: set "
            '"kv_dtype" to the engine\'s --kv-cache-dtype, e.g. "fp8_e4m3"'
        )


def _bytes(page: Any) -> memoryview:
    return memoryview(page.byte_array).cast("B")


def _drop(pages: Sequence[Any]) -> None:
    for page in pages:
        page.ref_count_down()


def _prefix(found: Sequence[bool]) -> int:
    """Return how many are true from the first on."""
    return next((at for at, each in enumerate(found) if not each), len(found))
