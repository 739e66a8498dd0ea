"""The class vLLM loads: it checks that the cache may run at all, then only delegates.

    kv_transfer_config = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": "unix:/run/kvstore/kvstore.sock"}}

vLLM makes one instance in its scheduler and one in every worker; each has one half.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvstore import Client
from kvstore.model.block import Namespace
from kvstore.model.errors import ConfigError, Incompatible, KVStoreError
from kvstore.model.names import model_name
from kvstore_vllm import compat
from kvstore_vllm.agreement import all_workers, told_by_stages
from kvstore_vllm.metadata import StepMetadata, WorkerFacts
from kvstore_vllm.namespace import (
    PendingNamespace,
    build_namespace,
    check_supported,
    has_heads,
    weights_sources,
)
from kvstore_vllm.opening import open_pages
from kvstore_vllm.packings import backend_of, packings_of
from kvstore_vllm.pages import Pages
from kvstore_vllm.scheduler import SchedulerSide
from kvstore_vllm.scheduler_hooks import SchedulerHooks
from kvstore_vllm.settings import Settings, parse_settings
from kvstore_vllm.shards import Shards, held_shards
from kvstore_vllm.stages import Stage, groups_of
from kvstore_vllm.stats import KVStorePromMetrics, KVStoreStats
from kvstore_vllm.tiles import ask_for_tiles
from kvstore_vllm.worker import WorkerSide
from kvstore_vllm.worker_hooks import WorkerHooks

logger = logging.getLogger(__name__)

KVConnectorMetadata.register(StepMetadata)
KVConnectorHandshakeMetadata.register(WorkerFacts)
KVConnectorWorkerMetadata.register(WorkerFacts)


class KVStoreConnector(SchedulerHooks, WorkerHooks, KVConnectorBase_V1, compat.HybridSupport):  # type: ignore[misc]
    """A KV connector that loads asynchronously, saves behind the engine, and never fails it."""

    _cache_hit_source = compat.cache_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raise ConfigError or Incompatible, saying what to change, if the cache cannot be used.

        A daemon that is down is no error: the engine starts, and misses until it is back.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        _require_recompute(transfer)
        self._settings = parse_settings(transfer.kv_connector_extra_config)
        compat.check_release(allow_untested=self._settings.allow_untested)
        compat.check_version(kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        compat.check_head_shards(self._settings.head_shards)
        compat.check_sleep_mode(vllm_config.model_config)
        self._client = _client(self._settings, vllm_config, role)
        self._pending: PendingNamespace | None = None
        self._handshake: WorkerFacts | None = None
        self._facts: WorkerFacts | None = None
        self._agreed: str | None = None  # the namespace of all so far; "": they differ
        self._told: WorkerFacts | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._settings,
                self._client,
                readers=vllm_config.parallel_config.world_size,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                drafts=vllm_config.speculative_config is not None,
                adapter_settings=_adapter_settings(vllm_config),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a later miss, nothing more."""
        return False

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None, "this is a scheduler's connector, or has no KV cache yet"
        return self._worker

    # Start and end --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the worker's KV cache. Its namespace is known when its weights are.

        Raises Incompatible if nothing on this machine tells the weights.
        """
        ask_for_tiles()
        held = [group for group in self._kv_cache_config.kv_cache_groups if group.layer_names]
        sources = weights_sources(self._vllm_config, self._settings.weights_id)
        shards, writes = self._held_shards()
        modules = self._vllm_config.compilation_config.static_forward_context
        pages = open_pages(
            [[kv_caches[name] for name in group.layer_names] for group in held],
            self._kv_cache_config.num_blocks,
            self._client.extents,
            record=self._settings.record,
            fidelity=self._settings.fidelity,
            shards=shards.count,
            agree=all_workers if self._vllm_config.parallel_config.world_size > 1 else bool,
            packings=packings_of(modules, held) if compat.STANDARD_LAYOUTS else (),
        )
        stages, shards = self._stages(pages, list(kv_caches), shards)
        unnamed = build_namespace(
            self._vllm_config,
            self._kv_cache_config,
            stages=stages,
            salted=self._settings.require_salt,
            head_shards=self._head_shards,
        )
        self._worker = WorkerSide(
            self._settings, self._client, pages, None, shards=shards, writes=writes
        )
        self._handshake = WorkerFacts(unnamed.to_json())
        self._pending = PendingNamespace(unnamed, sources)
        self._look_at_weights()

    @property
    def _head_shards(self) -> int:
        """How many shards of its heads a block has whatever the degree of tensor parallelism; 0:
        that is not asked for, or nothing is cut by heads."""
        return self._settings.head_shards if has_heads(self._kv_cache_config) else 0

    def _held_shards(self) -> tuple[Shards, bool]:
        """Return what this worker holds of a block, and whether it is the one that saves it."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        replicas = compat.kv_tp_replicas(self._kv_cache_config)
        workers = self._vllm_config.parallel_config.tensor_parallel_size // replicas
        rank, replica = divmod(get_tensor_model_parallel_rank(), replicas)
        return held_shards(rank, workers, self._head_shards), replica == 0

    def _stages(
        self, pages: Pages, layers: Sequence[str], shards: Shards
    ) -> tuple[list[Stage], Shards]:
        """Return what the workers of each pipeline stage hold, and `shards` as this one holds them.

        Raises Incompatible if that does not fit together.
        """
        mine = Stage(
            layers=tuple(tuple(g.layer_names) for g in self._kv_cache_config.kv_cache_groups),
            record_nbytes=tuple(pages.record_nbytes[:: shards.count]),
            backends=tuple(_backends(self._vllm_config, layers)),
            coded=pages.form,
            lossy=tuple(pages.lossy[:: shards.count]),
        )
        if self._vllm_config.parallel_config.pipeline_parallel_size == 1:
            return [mine], shards
        from vllm.distributed.parallel_state import get_pp_group

        stages = [Stage.from_json(told) for told in told_by_stages(mine.to_json())]
        groups = groups_of(stages, get_pp_group().rank_in_group)
        return stages, replace(shards, tables=mine.tables, groups=groups)

    def _look_at_weights(self) -> None:
        """Take part from the moment at which the weights are known."""
        namespace = self._pending.poll() if self._pending is not None else None
        if namespace is None:
            return
        self._pending = None
        if self._scheduler is not None:
            self._agree(namespace.to_json())
            return
        self.worker_side.use_namespace(namespace)
        self._facts = WorkerFacts(namespace.to_json())
        logger.info(
            "namespace=%s block_tokens=%d record_nbytes=%s",
            namespace.id.hex()[:8],
            namespace.block_tokens,
            [group.record_nbytes for group in namespace.groups],
        )

    def get_handshake_metadata(self) -> WorkerFacts | None:
        return self._handshake

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Learn from the workers what the KV is but for the weights, and find out about those.

        Raises Incompatible if the workers do not agree.
        """
        facts = [fact for fact in metadata.values() if isinstance(fact, WorkerFacts)]
        told = reduce(WorkerFacts.aggregate, facts).namespace if facts else None
        if told == "":
            raise Incompatible("the workers of this engine hold different kinds of KV")
        if told is None:
            return
        try:
            sources = weights_sources(self._vllm_config, self._settings.weights_id)
        except Incompatible as error:  # only the workers' hosts have the files: a step will tell
            logger.info("weights=elsewhere reason=%r", str(error))
            return
        self._pending = PendingNamespace(Namespace.from_json(told), sources)
        self._look_at_weights()

    def build_connector_worker_meta(self) -> WorkerFacts | None:
        """Tell the whole namespace with the first step that knows it: a MultiConnector passes on
        the handshake of only one of its connectors, which may not be this one."""
        if self._worker is None:
            return None
        self._look_at_weights()
        computed = self._worker.clock.take()
        stages = self._vllm_config.parallel_config.pipeline_parallel_size  # one after another
        facts = self._facts if self._told is None else None
        self._told = self._facts
        if facts is None and not computed.tokens:
            return None
        computed = computed._replace(seconds=computed.seconds * stages)
        return WorkerFacts(facts.namespace if facts else None, computed)

    def _learn(self, facts: WorkerFacts) -> bool:
        """Take part from now on. False if the workers do not agree, now or with what was told."""
        self.scheduler_side.note_computed(facts.computed)
        return facts.namespace is None or self._agree(facts.namespace)

    def _agree(self, told: str) -> bool:
        """Take part if everybody holds the same KV so far, else never again.

        Each worker tells when it knows its weights, so two that differ may tell in different steps.
        """
        if self._agreed is None and told:
            self._agreed = told
            # What workers tell is the text of the namespace, which leaves out the model's name.
            name = model_name(self._vllm_config.model_config.model)
            self.scheduler_side.use_namespace(Namespace.from_json(told, name))
        elif told != self._agreed:
            self._agreed, self._pending = "", None
            self.scheduler_side.leave()
        return bool(self._agreed)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind_kv_cache_manager(kv_cache_manager)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        try:
            self._client.close()
        except (KVStoreError, TimeoutError) as error:
            logger.warning("close=incomplete error=%r", error)

    # Metrics --------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        side = self._scheduler or self._worker
        if side is None:
            return None
        client = self._client
        side.counters.note_breaker(available=client.available, trips=client.breaker_trips)
        since = side.counters.take()
        return KVStoreStats(data=since) if since else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        return KVStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStorePromMetrics:
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _require_recompute(transfer: Any) -> None:
    """Refuse to run where vLLM would fail a request because a cached block could not be loaded."""
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kvstore needs kv_load_failure_policy=recompute, else a block that cannot be loaded (a "
            "daemon restart is enough) ends the request with an error instead of being computed; "
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )


def _adapter_settings(vllm_config: Any) -> str:
    """Return the settings that decide what the files of a LoRA adapter do to the KV."""
    lora = getattr(vllm_config, "lora_config", None)
    if lora is None:
        return ""
    names = (
        "lora_dtype",
        "target_modules",
        "fully_sharded_loras",
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
    )
    return json.dumps({name: getattr(lora, name, None) for name in names}, default=str)


def _client(settings: Settings, vllm_config: Any, role: KVConnectorRole) -> Client:
    """Return a client of the session that all parts of this engine share.

    engine_id is random per engine unless the user names it, and vLLM appends data-parallel ranks.
    """
    engine_id = vllm_config.kv_transfer_config.engine_id
    token = hashlib.sha256(f"kvstore-vllm {engine_id}".encode()).hexdigest()
    client = Client(
        settings.target,
        token=token,
        name=f"vllm {role.name.lower()}",
        daemon_uid=settings.daemon_uid,
        engines=(settings.engine_address,) if settings.engine_address else (),
    )
    client.submit(lambda remote: remote.connect())  # in the background; failing is fine
    return client


def _backends(vllm_config: Any, layer_names: Sequence[str]) -> list[str]:
    """Return the attention back ends of the layers, with their CPU instruction sets."""
    layers = vllm_config.compilation_config.static_forward_context
    found = set()
    for name in layer_names:
        layer = layers.get(name)
        found.add(f"{backend_of(layer)}/{getattr(layer, 'isa', '')}")
    return sorted(found)
