"""The daemon as a second tier behind vLLM's own offloading to host memory.

    kv_transfer_config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 8589934592,
            "secondary_tiers": [{"type": "kvstore", "target": "unix:/run/kvstore/kvstore.sock",
                                 "plain_text": true}]}}

vLLM copies between the device and a pool of *chunks* in host memory; this tier copies between that
pool and the daemon, which adds caps, eviction, checksums, sharing between engines, and restarts.
It runs in vLLM's scheduler process, whose calls never wait: lookups, stores and loads are done by
threads. A chunk is one block of a namespace; its key is made of vLLM's block hash. Until the files
of the weights are hashed, every lookup is a miss and every store is refused.

vLLM's `reset_prefix_cache(reset_connector=True)`, after the weights were changed in place, is the
only caller of `drain_jobs`. From then on this tier shares nothing with its past.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Literal

import msgspec
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore import AsyncClient, Client
from kvstore.model.block import BlockKey, Committed, Grant, Namespace, Part, Span
from kvstore.model.errors import ConfigError, Incompatible, KVStoreError
from kvstore_vllm.fingerprint import Fingerprints
from kvstore_vllm.metadata import in_epoch
from kvstore_vllm.settings import Seconds
from kvstore_vllm.tier_namespace import tier_namespace, tier_weights

logger = logging.getLogger(__name__)

STORE_JOBS_MAX = 64
_CHUNK_TAG = b"kvstore.vllm.chunk.v1"


class TierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one engine uses the daemon as a tier.

    target, load_deadline_s, save_deadline_s, daemon_uid, allow_untested: as for the connector.
    plain_text: must be true, and says that the engine serves no LoRA adapters, images, sound or
        video. vLLM's keys hold only the names callers give to those, not what they are; and vLLM
        does not tell its tiers whether an engine serves any.
    weights_id: names the weights, and whatever else changes their KV (quantization, overrides of
        the model's configuration, the attention back end): vLLM tells its tiers only where the
        model lies. Without it, the weights in that directory are fingerprinted.
    fidelity: "exact" only: vLLM does not tell its tiers where keys and values lie in a chunk.
    """

    target: Annotated[str, msgspec.Meta(pattern="^unix:.+")]
    plain_text: bool = False
    load_deadline_s: Seconds = 5.0
    save_deadline_s: Seconds = 1.0
    weights_id: str = ""
    daemon_uid: Annotated[int, msgspec.Meta(ge=0)] | None = None
    fidelity: Literal["exact", "ep"] = "exact"
    allow_untested: bool = False


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """One engine's tier. vLLM's scheduler calls its methods; threads, those that wait."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Raise ConfigError or Incompatible, saying what to change, if the tier cannot be used."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        from kvstore_vllm.compat import check_release  # it imports much of vLLM

        self._settings = _parse(options)
        check_release(allow_untested=self._settings.allow_untested)
        self._spec = offloading_spec
        self._fingerprints = Fingerprints(
            {"weights": tier_weights(offloading_spec.config, self._settings.weights_id)}
        )
        self._epoch = ""
        self._namespaces: dict[str, Namespace] = {}  # by epoch
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        self._pool = primary_kv_view.cast("B")
        self._client = Client(
            self._settings.target, name="vllm tier", daemon_uid=self._settings.daemon_uid
        )
        self._client.submit(lambda remote: remote.connect())  # in the background; failing is fine
        self._lookups = _Lookups(self, tier_type)
        # One thread each way: a copy is as fast as memory, and loads do not queue behind stores.
        self._storing = ThreadPoolExecutor(1, thread_name_prefix="kvstore-tier-store")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="kvstore-tier-load")
        self._running: set[Future[JobResult]] = set()
        self._finished: list[JobResult] = []
        self._loads: dict[int, Collection[bytes]] = {}
        self._last: dict[tuple[str, int], tuple[int, BlockKey]] = {}
        self._requests: set[str] = set()
        self._of_the_past: set[str] = set()  # those that may hold KV of an earlier epoch

    # What vLLM's scheduler calls ------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)
        self._requests.discard(req_context.req_id)
        self._of_the_past.discard(req_context.req_id)
        for group in self._chunk_tokens:
            self._last.pop((req_context.req_id, group), None)

    def submit_store(self, job_metadata: TransferJob) -> None:
        is_past = job_metadata.req_context.req_id in self._of_the_past
        runs = list(self._runs(job_metadata)) if self._weights_known and not is_past else []
        if not runs or len(self._running) >= STORE_JOBS_MAX:
            self._finished.append(JobResult(job_metadata.job_id, False))
            return
        self._running.add(self._storing.submit(self._store, job_metadata.job_id, runs))

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys, chunks = list(job_metadata.keys), job_metadata.chunk_ids.tolist()
        self._loads[job_metadata.job_id] = keys
        self._running.add(self._loading.submit(self._load, job_metadata.job_id, keys, chunks))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what has ended; chunks that could not be loaded are misses from now on."""
        done = {job for job in self._running if job.done()}
        self._running -= done
        results, self._finished = [*self._finished, *(job.result() for job in done)], []
        for result in results:
            keys = self._loads.pop(result.job_id, ())
            if not result.success:
                loaded = set(result.successful_keys or ())
                self._lookups.mark_miss([key for key in keys if key not in loaded])
        return results

    def has_pending_work(self) -> bool:
        return bool(self._running or self._finished)

    def drain_jobs(self) -> None:
        """Wait for all jobs: each has deadlines, so this ends. What is stored later is of the
        weights as they are now; requests that began before store nothing any more."""
        wait(self._running)
        self._epoch = uuid.uuid4().hex
        self._namespaces.clear()
        self._last.clear()
        self._of_the_past |= self._requests
        logger.info("reset=cache")

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._storing.shutdown(cancel_futures=True)
        self._loading.shutdown(cancel_futures=True)
        self._pool.release()
        try:
            self._client.close()
        except (KVStoreError, TimeoutError) as error:
            logger.warning("close=incomplete error=%r", error)

    # Keys -----------------------------------------------------------------------------------------

    @property
    def _weights_known(self) -> bool:
        return self._fingerprints.found is not None

    @property
    def _namespace(self) -> Namespace:
        """What the chunks are; only asked once the weights are known. Threads may do it twice."""
        epoch = self._epoch
        found = self._namespaces.get(epoch)
        if found is None:
            assert self._fingerprints.found is not None
            first = tier_namespace(self._spec, self.block_size_bytes, self._fingerprints.found)
            found = self._namespaces[epoch] = in_epoch(first, epoch)
        return found

    def _key(self, key: bytes) -> BlockKey:
        """Return our key of a chunk: vLLM's hash does not say which weights and layout it is of."""
        return BlockKey(hashlib.sha256(_CHUNK_TAG + self._namespace.id + key).digest())

    def _runs(self, job: TransferJob) -> Iterator[_Run]:
        """Cut a job into runs of chunks that follow each other in one prefix."""
        run: _Run | None = None
        for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            group = get_offload_group_idx(key)
            end = job.req_context.get_offload_key_position(key) or self._chunk_tokens[group]
            index = end // self._chunk_tokens[group] - 1
            if run is None or group != run.group or index != run.first + len(run.keys):
                if run is not None:
                    yield run
                last, parent = self._last.get((job.req_context.req_id, group), (-1, None))
                run = _Run(group, index, parent if last == index - 1 else None)
            run.keys.append(self._key(key))
            run.chunks.append(chunk)
            self._last[job.req_context.req_id, group] = index, run.keys[-1]
        if run is not None:
            yield run

    # Threads --------------------------------------------------------------------------------------

    def _store(self, job_id: int, runs: list[_Run]) -> JobResult:
        started = time.perf_counter()
        refused = nbytes = 0
        try:
            for run in runs:
                with self._rows(run.chunks) as rows:
                    done = self._put(run, rows)
                refused += done.refused
                nbytes += done.committed * self.block_size_bytes
        except KVStoreError as error:
            logger.debug("store=failed error=%r", error)
            refused += 1
        except Exception:
            # What a thread raises would end the engine; a chunk that is not stored is a later miss.
            logger.exception("store=failed")
            refused += 1
        return JobResult(job_id, not refused, None, time.perf_counter() - started, nbytes)

    def _load(self, job_id: int, keys: list[bytes], chunks: list[int]) -> JobResult:
        started = time.perf_counter()
        found: list[bool] = []
        try:
            with self._rows(chunks) as rows:
                found = self._get([self._key(key) for key in keys], rows)
        except KVStoreError as error:
            logger.warning("load=failed error=%r", error)
        except Exception:
            logger.exception("load=failed")
        loaded = tuple(key for key, there in zip(keys, found, strict=False) if there)
        seconds, nbytes = time.perf_counter() - started, len(loaded) * self.block_size_bytes
        return JobResult(job_id, len(loaded) == len(keys), loaded or None, seconds, nbytes)

    def stored(self, keys: list[bytes]) -> list[bool]:
        """Return which chunks the daemon has, and have it bring them up from its slower tiers."""
        if not self._weights_known:
            return [False] * len(keys)
        wanted = [self._key(key) for key in keys]
        most = self._client.batch_keys_max
        windows = [wanted[at : at + most] for at in range(0, len(wanted), most)]
        return [found for window in windows for found in self._resident(window)]

    def _resident(self, wanted: list[BlockKey]) -> list[bool]:
        async def acquire(remote: AsyncClient) -> Grant:
            grant = await remote.acquire(
                await remote.register(self._namespace, now=False),
                wanted,
                spans=[Span(Part(0, 0), 0, len(wanted))],
                wait_s=self._settings.load_deadline_s,
            )
            await remote.release(grant.lease_id)
            return grant

        return [slot is not None for slot in self._client.submit(acquire).result().slots]

    def _put(self, run: _Run, rows: list[memoryview]) -> Committed:
        async def put(remote: AsyncClient) -> Committed:
            return await remote.put(
                await remote.register(self._namespace, now=False),
                run.keys,
                rows,
                first_block=run.first,
                parent=run.parent,
                wait_s=self._settings.save_deadline_s,
            )

        return self._client.submit(put).result()

    def _get(self, keys: list[BlockKey], rows: list[memoryview]) -> list[bool]:
        async def get(remote: AsyncClient) -> list[bool]:
            namespace_id = await remote.register(self._namespace, now=False)
            wait_s = self._settings.load_deadline_s
            return await remote.get_into(namespace_id, keys, rows, wait_s=wait_s)

        return self._client.submit(get).result()

    @contextmanager
    def _rows(self, chunks: list[int]) -> Iterator[list[memoryview]]:
        """Lend the bytes of chunks; vLLM cannot unmap its pool while one is held."""
        size = self.block_size_bytes
        rows = [self._pool[chunk * size : (chunk + 1) * size] for chunk in chunks]
        try:
            yield rows
        finally:
            for row in rows:
                with suppress(BufferError):  # an error's traceback holds it, and lets go soon
                    row.release()


class _Run:
    """Chunks that follow each other: the first is chunk `first` of its prefix, after `parent`."""

    def __init__(self, group: int, first: int, parent: BlockKey | None) -> None:
        self.group = group
        self.first = first
        self.parent = parent
        self.keys: list[BlockKey] = []
        self.chunks: list[int] = []


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's thread for lookups; a batch that raises is a miss."""

    def __init__(self, tier: KVStoreTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> list[bool]:
        return self._tier.stored(keys)


def _parse(options: dict[str, Any]) -> TierSettings:
    try:
        settings = msgspec.convert(options, TierSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"secondary tier kvstore: {error}; known keys: "
            + ", ".join(TierSettings.__struct_fields__)
            + '; e.g. {"type": "kvstore", "target": "unix:/run/kvstore/kvstore.sock", '
            '"plain_text": true}'
        ) from error
    _check_plain_text(settings)
    if settings.fidelity == "ep":
        raise ConfigError(
            'secondary tier kvstore: "fidelity": "ep" is not possible, because vLLM does not tell '
            "its tiers where keys and values lie in a chunk; leave it out, or use KVStoreConnector"
        )
    return settings


def _check_plain_text(settings: TierSettings) -> None:
    if not settings.plain_text:
        raise Incompatible(
            "secondary tier kvstore: the keys that vLLM gives its tiers hold the names of LoRA "
            "adapters and images, not their bytes, so a changed one would get the KV of the old; "
            'if this engine serves neither, add "plain_text": true to the tier, else use '
            "KVStoreConnector"
        )
