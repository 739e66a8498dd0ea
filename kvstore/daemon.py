"""Settings -> one running daemon. The only place where parts are put together."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import kvstore
from kvstore.decide.planner import Planner
from kvstore.decide.policy import WriteBudget, policy_by_name
from kvstore.format.codec import codec_by_name
from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES
from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.model.tenant import DEFAULT_TENANT, NO_TENANT_ID, TenantId
from kvstore.move.deletions import Deletions
from kvstore.move.promote import Promotion
from kvstore.move.scrub import Scrub
from kvstore.move.write_behind import WriteBehind
from kvstore.sealing import Root, Sealing, open_root
from kvstore.server import Server
from kvstore.settings import FileSettings, Settings
from kvstore.store.erasure import places_of
from kvstore.store.lanes import Lanes
from kvstore.store.live_settings import LiveSettings
from kvstore.store.staging import staged_nbytes_max
from kvstore.store.store import Store
from kvstore.store.tenants import Tenants, check_left_over
from kvstore.system.dumps import forbid_dumps
from kvstore.system.garbage import bound_collections
from kvstore.system.memory import Fit, check_capacity, prefer_killing_this, read_memory
from kvstore.system.scheduling import run_promptly
from kvstore.system.service_manager import notify
from kvstore.tier.dram import Arena
from kvstore.tier.file import Devices
from kvstore.web.opening import open_page

if TYPE_CHECKING:
    from kvstore.events.service import Events
    from kvstore.move.object_side import Objects
    from kvstore.move.pool_side import Pool
    from kvstore.store.fleet import Fleet  # one without others, the same

logger = logging.getLogger(__name__)


class Node:
    """One daemon: `start`, serve, `stop`. Must be made on the event loop that runs it."""

    def __init__(
        self, settings: Settings, *, path: Path | None = None, overrides: Sequence[str] = ()
    ) -> None:
        """path, overrides: where the settings came from, to be read again."""
        self.settings = settings
        self.metrics = Metrics(version=kvstore.__version__)
        check_left_over(settings)
        root = open_root(settings)
        make, places = partial(wire_store, root=root), partial(places_of, root)
        self.tenants = Tenants(settings, make, self.metrics, places)
        self.config = LiveSettings(settings, self.tenants, path=path, overrides=overrides)
        self.fleet: Fleet | None = None
        self.events: Events | None = None
        self.server = Server(
            self.tenants,
            self.config,
            self.metrics,
            kvstore.__version__,
            partial(open_page, settings),
        )

    async def start(self) -> None:
        """Recover what is stored, then serve. Raises ConfigError; nothing stays behind then."""
        began = time.perf_counter()
        logger.info("node=starting version=%s pid=%d", kvstore.__version__, os.getpid())
        try:
            await self.server.open()
            await check_memory(
                self.settings.dram.capacity_bytes,
                self.settings.pool.host_bytes,
                staged_nbytes_max(self.settings.tenants),
            )
            await self.tenants.start()
            if self.settings.cluster.on:
                await self._join_fleet()
            if self.settings.events.on:
                from kvstore.events.opening import open_events

                store = self.tenants.get(DEFAULT_TENANT).store
                self.events = open_events(self.settings, store, self.metrics)
            await self.server.start()
        except BaseException:
            await self.server.close()
            if self.fleet is not None:
                await self.fleet.close()
            await self._close_events()
            await self.tenants.close(0.0)
            raise
        settings = self.settings
        logger.info(
            "node=serving version=%s pid=%d socket=%s port=%d metrics_port=%d dram_bytes=%d "
            "file_bytes=%d directories=%r object=%r tenants=%d blocks=%d start_s=%.3f",
            kvstore.__version__,
            os.getpid(),
            settings.server.socket_path,
            self.server.port,
            self.server.metrics_port,
            settings.dram.capacity_bytes,
            settings.file.capacity_bytes if settings.file.paths else 0,
            ",".join(settings.file.paths),
            settings.object.url,
            len(settings.tenants),
            sum(each.store.report.stats()["blocks"] for each in self.tenants),
            time.perf_counter() - began,
        )

    async def _join_fleet(self) -> None:
        from kvstore.store.fleet import Fleet

        self.fleet = Fleet(self.settings, self.tenants, self.metrics, kvstore.__version__)
        await self.fleet.start()

    async def _close_events(self) -> None:
        if self.events is not None:
            await self.events.close()

    async def stop(self) -> None:
        """Drain, flush, upload, close: each takes at most `server.drain_s`."""
        drain_s = self.settings.server.drain_s
        logger.info("node=draining drain_s=%g", drain_s)
        lent = asyncio.ensure_future(self.fleet.drain(drain_s)) if self.fleet is not None else None
        if not await self.server.drain(drain_s):
            logger.warning("node=draining calls=cut_off")
        if lent is not None and not await lent:
            logger.warning("node=draining lent=cut_off")
        await self.server.close()
        if self.fleet is not None:
            await self.fleet.close()
        await self._close_events()
        await self.tenants.close(drain_s)
        logger.info("node=stopped")


MEMORY_WAIT_S = 5.0
MEMORY_LOOK_S = 0.25


async def check_memory(capacity_bytes: int, pool_bytes: int = 0, staged_bytes: int = 0) -> None:
    """Raise ConfigError if the arena does not fit beside what the pool takes, with what to type;
    warn if it is tight.

    staged_bytes: what engines of sealed arenas may fill beside it. It is theirs to pay for, and
    most of it is never filled: it is warned of, and nothing is refused for it.

    What would fit but for others is waited for, a little: engines unmap a dead daemon's arena
    only when they have noticed.
    """
    deadline = time.monotonic() + MEMORY_WAIT_S
    memory = await asyncio.to_thread(read_memory)
    judged = memory.judge(capacity_bytes, pool_bytes=pool_bytes)
    while judged.fit is Fit.NOT_NOW and time.monotonic() < deadline:
        await asyncio.sleep(MEMORY_LOOK_S)
        memory = await asyncio.to_thread(read_memory)
        judged = memory.judge(capacity_bytes, pool_bytes=pool_bytes)
    judged = check_capacity(capacity_bytes, memory, pool_bytes=pool_bytes)
    if judged.fit is Fit.TIGHT:
        logger.warning("memory=tight reason=%r do=%r", judged.text, judged.do)
    elif memory.judge(capacity_bytes + staged_bytes, pool_bytes=pool_bytes).fit is not Fit.FITS:
        reason = f"engines may fill {staged_bytes} bytes beside sealed arenas: {judged.text}"
        do = "lower dram.guaranteed of tenants with sealed arenas"
        logger.warning("memory=tight reason=%r do=%r", reason, do)


def wire_store(
    settings: Settings,
    metrics: Metrics,
    *,
    sealed: bool = False,
    root: Root | None = None,
    tenant: TenantId = NO_TENANT_ID,
    turns: Sequence[Executor] = (),
    lanes: Lanes | None = None,
) -> Store:
    """Put the tiers, planner and moves of one tenant together.

    sealed: its arena. root: what is stored of it is encrypted with that. turns: for each directory,
    what runs its I/O beside others'. lanes: what it may move.
    """
    arena = Arena(settings.dram.capacity_bytes, settings.dram.extent_bytes, sealed=sealed)
    sealing = None
    if root is not None:
        sealing = Sealing(root, tenant, accept_plain=settings.security.accept_plain)
        arena.extents.on_extent(lambda handle: arena.extents.by_id[handle.id].mapped.hide())
    file = _file_tier(settings.file, sealing, turns) if settings.file.paths else None
    planner = Planner(
        arena,
        file.frames if file else None,
        now=time.monotonic,
        dram_policy=policy_by_name(settings.dram.eviction_policy, settings.dram.shadow_blocks),
        file_policy=policy_by_name(settings.file.eviction_policy, settings.file.shadow_blocks),
        cost_aware=settings.dram.cost_aware,
        departed_keys_max=settings.limits.departed_keys_max,
        run_nbytes_max=file.space.frame_nbytes_max - PAGE_NBYTES if file else 0,
        write_budget=_write_budget(settings.file),
        write_on_demotion=settings.file.admission == "demotion",
        write_on_second_use=settings.file.admission == "second_use",
        write_fine_parts=settings.file.fidelity == "fine",
        fine_share=settings.dram.fine_share,
    )
    if settings.cluster.on:
        _announce_heads(planner)
    write_behind = WriteBehind(
        planner,
        arena,
        file,
        codec=codec_by_name(settings.file.codec),
        metrics=metrics,
        group_commit_bytes=settings.limits.group_commit_bytes,
    )
    if lanes is not None:
        write_behind.reads.lane = lanes.file_read
        write_behind.recall.turn = lanes.recall_turn
    return Store(
        arena=arena,
        write_behind=write_behind,
        planner=planner,
        limits=settings.limits,
        metrics=metrics,
        scrub=_scrub(settings.file, planner, write_behind, metrics) if file else None,
        objects=_objects(settings, planner, arena, metrics, sealing=sealing, lanes=lanes),
        pool=_pool(settings, planner, arena, file, metrics),
    )


def _announce_heads(planner: Planner) -> None:
    from kvstore.decide.heads import Heads

    planner.index.heads = Heads()


def _scrub(
    settings: FileSettings, planner: Planner, write_behind: WriteBehind, metrics: Metrics
) -> Scrub:
    return Scrub(
        planner,
        write_behind,
        nbytes_per_s=settings.scrub_bytes,
        every_s=settings.scrub_every_s,
        metrics=metrics,
        now=time.monotonic,
    )


def _objects(
    settings: Settings,
    planner: Planner,
    arena: Arena,
    metrics: Metrics,
    *,
    sealing: Sealing | None,
    lanes: Lanes | None,
) -> Callable[[Promotion, Deletions], Objects] | None:
    """Return what makes the object tier of the node, None if it has none. Raises ConfigError."""
    if not settings.object.url:
        return None
    from kvstore.move.object_side import Objects
    from kvstore.tier.object import ObjectTier

    tier = ObjectTier(
        settings.object, metrics, sealing=sealing, lane=lanes.object if lanes else None
    )
    return lambda promotion, deletions: Objects(
        tier,
        planner,
        promotion,
        arena,
        codec=codec_by_name(settings.file.codec),
        metrics=metrics,
        deletions=deletions,
        fine=settings.object.fidelity == "fine",
        now=time.monotonic,
    )


def _pool(
    settings: Settings, planner: Planner, arena: Arena, file: Devices | None, metrics: Metrics
) -> Callable[[Deletions], Pool] | None:
    """Return what makes the node's side of a pool, None if there is none. Raises ConfigError."""
    if not settings.pool.on:
        return None
    from kvstore.move.pool_side import Pool
    from kvstore.tier.pool import PoolTier

    if importlib.util.find_spec("mooncake") is None:  # its own process imports it, not this one
        raise ConfigError("pool.url needs Mooncake: pip install 'kvstore-tiers[pool]'")
    tier = PoolTier(settings.pool, metrics, time.monotonic)
    return lambda deletions: Pool(
        tier,
        planner,
        arena,
        deletions=deletions,
        metrics=metrics,
        file=file,
        now=time.monotonic,
    )


def _write_budget(settings: FileSettings) -> WriteBudget | None:
    nbytes = settings.write_bytes_per_day
    return WriteBudget(nbytes, time.monotonic) if nbytes else None


def _file_tier(
    settings: FileSettings, sealing: Sealing | None, turns: Sequence[Executor]
) -> Devices:
    return Devices(
        [Path(path) for path in settings.paths],
        capacity_bytes=settings.capacity_bytes,
        free_bytes_min=settings.free_bytes_min,
        hang_s=settings.hang_s,
        segment_nbytes=settings.segment_bytes,
        direct=settings.direct,
        threads=settings.threads,
        sealing=sealing,
        turns=turns,
    )


# Codec and disk threads hash and copy: the event loop, which answers everybody, asks them for the
# interpreter after this long instead of Python's 5 ms.
SWITCH_INTERVAL_S = 0.0005


async def _reload(node: Node) -> None:
    """Take what changed in the file. One that is wrong changes nothing, and stops nobody."""
    try:
        done = await node.config.reload()
    except KVStoreError as error:
        logger.error("config=not_reloaded reason=%r", str(error))
        changed, outcome = [], "failed"
    else:
        logger.info("config=reloaded changed=%d pending=%r", len(done.changed), done.pending)
        changed, outcome = [each.key for each in done.changed], "ok"
    if node.server.audit is not None:
        node.server.audit.event("reload", what="config", outcome=outcome, changed=changed)


async def serve(
    settings: Settings,
    *,
    path: Path | None = None,
    overrides: Sequence[str] = (),
    started: Callable[[Node], None] = lambda node: None,
) -> None:
    """Run a daemon until SIGTERM or SIGINT; a second signal stops it at once.

    SIGHUP makes it read `path` again, with `overrides` on top. started: is told when it serves.
    """
    bound_collections()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    run_promptly()
    prefer_killing_this()
    if settings.security.encrypts:
        forbid_dumps()
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    node = Node(settings, path=path, overrides=overrides)
    reloading: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(_reload(node))
        reloading.add(task)
        task.add_done_callback(reloading.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    await node.start()
    notify("READY=1")
    started(node)
    await told.wait()
    notify("STOPPING=1")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    await node.stop()
