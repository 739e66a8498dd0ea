"""What the connector tells vLLM, and the engines it refuses to serve."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest

from kvstore import ConfigError, Group, Incompatible, Namespace, Unauthorized
from kvstore.system.engine_versions import ALLOW
from kvstore.testing.daemon import Daemon
from kvstore_vllm.metadata import LossySizes
from kvstore_vllm.prefill import Computed
from kvstore_vllm.stages import Stage

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def vllm():
    """The modules under test; importing them takes a while and warns about each other."""
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm")
        import torch
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import base
        from vllm.v1 import kv_cache_interface

        from kvstore_vllm import compat, connector, namespace, plugin

    return SimpleNamespace(
        torch=torch,
        KVTransferConfig=KVTransferConfig,
        factory=KVConnectorFactory,
        base=base,
        kv=kv_cache_interface,
        compat=compat,
        connector=connector,
        namespace=namespace,
        plugin=plugin,
    )


def transfer_config(vllm, **changes):
    fields = {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": "unix:/nowhere/kvstore.sock"},
        **changes,
    }
    return vllm.KVTransferConfig(**fields)


def engine_config(vllm, **changes) -> SimpleNamespace:
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 1,
        "world_size": 1,
    }
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "_name_or_path": "/x"}),
        quantization=None,
        model="/nowhere",
        dtype="torch.bfloat16",
        max_model_len=4096,
        seed=0,
    )
    return SimpleNamespace(
        kv_transfer_config=transfer_config(vllm),
        parallel_config=SimpleNamespace(**{**parallel, **changes}),
        cache_config=SimpleNamespace(
            calculate_kv_scales=False, cache_dtype="auto", enable_prefix_caching=True
        ),
        model_config=model,
        load_config=SimpleNamespace(
            load_format="dummy", model_loader_extra_config={}, download_dir=None
        ),
        speculative_config=None,
    )


def cache_config(vllm, *specs, **changes):
    groups = [vllm.kv.KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    if "hash_block_size" in vllm.kv.KVCacheConfig.__dataclass_fields__:
        changes["hash_block_size"] = 32
    return vllm.kv.KVCacheConfig(
        num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups, **changes
    )


def full(vllm, **changes):
    fields = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": vllm.torch.bfloat16}
    return vllm.kv.FullAttentionSpec(**{**fields, **changes})


def window(vllm, tokens: int, **changes):
    return vllm.kv.SlidingWindowSpec(
        block_size=32,
        num_kv_heads=2,
        head_size=64,
        dtype=vllm.torch.bfloat16,
        sliding_window=tokens,
        **changes,
    )


def test_without_the_recompute_policy_it_does_not_start_and_says_what_to_type(vllm):
    config = engine_config(vllm)
    config.kv_transfer_config = transfer_config(vllm, kv_load_failure_policy="fail")
    role = vllm.base.KVConnectorRole.SCHEDULER
    with pytest.raises(ConfigError, match='"kv_load_failure_policy": "recompute"'):
        vllm.connector.KVStoreConnector(config, role, cache_config(vllm, full(vllm)))


def test_it_starts_while_the_daemon_is_away(vllm):
    role = vllm.base.KVConnectorRole.SCHEDULER
    connector = vllm.connector.KVStoreConnector(
        engine_config(vllm), role, cache_config(vllm, full(vllm))
    )
    assert not connector.requires_kv_delivery
    assert vllm.base.supports_hma(connector) == vllm.compat.FAILS_BY_REQUEST
    assert not connector.has_pending_push_work()
    connector.shutdown()


def test_where_loads_fail_by_block_several_groups_are_refused(vllm, monkeypatch):
    monkeypatch.setattr(vllm.compat, "FAILS_BY_REQUEST", False)
    vllm.compat.check_version(cache_config(vllm, full(vllm)))
    with pytest.raises(Incompatible, match=r"vLLM 0\.30 or newer"):
        vllm.compat.check_version(cache_config(vllm, full(vllm), window(vllm, 512)))


def test_a_vllm_too_old_is_refused_with_the_version_that_is_needed(vllm, monkeypatch):
    monkeypatch.setattr(vllm.compat.base, "KVConnectorBase_V1", object)
    with pytest.raises(Incompatible, match=r"vLLM 0\.28 or newer"):
        vllm.compat.check_version(cache_config(vllm, full(vllm)))


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0+cu130", "0.27.1", "dev"])
def test_a_vllm_that_is_not_known_is_refused_unless_it_is_to_be_tried(vllm, monkeypatch, version):
    monkeypatch.delenv(ALLOW, raising=False)
    monkeypatch.setattr(vllm.compat.vllm, "__version__", version)
    with pytest.raises(Incompatible, match=r"0\.28, 0\.30, 0\.32, 0\.33; .*\"allow_untested\""):
        make_connector(vllm, "SCHEDULER")
    connector = make_connector(vllm, "SCHEDULER", allow_untested=True)
    assert connector.scheduler_side
    connector.shutdown()


@pytest.mark.parametrize("version", ["0.28.0", "0.29.1", "0.32.0+cpu", "0.33.2"])
def test_a_vllm_that_is_known_is_taken(vllm, monkeypatch, version):
    monkeypatch.delenv(ALLOW, raising=False)
    monkeypatch.setattr(vllm.compat.vllm, "__version__", version)
    make_connector(vllm, "SCHEDULER").shutdown()


def test_the_short_name_is_registered_once(vllm):
    vllm.plugin.register()
    vllm.plugin.register()
    found = vllm.factory.get_connector_class(transfer_config(vllm))
    assert found is vllm.connector.KVStoreConnector


def test_metadata_is_of_the_kinds_vllm_expects(vllm):
    assert issubclass(vllm.connector.StepMetadata, vllm.base.KVConnectorMetadata)
    assert issubclass(vllm.connector.WorkerFacts, vllm.base.KVConnectorHandshakeMetadata)


def test_a_worker_finds_the_metadata_that_vllm_has_bound(vllm):
    connector = make_connector(vllm, "WORKER")
    metadata = vllm.connector.StepMetadata()
    connector.bind_connector_metadata(metadata)
    assert connector._get_connector_metadata() is metadata


def test_a_namespace_whose_handshake_another_connector_hid_comes_with_the_first_step(vllm):
    connector = make_connector(vllm, "SCHEDULER")
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    assert not connector.scheduler_side.takes_part
    facts = vllm.connector.WorkerFacts(build(vllm).to_json())
    step = SimpleNamespace(
        kv_connector_worker_meta=facts.aggregate(facts), failed_recving=None, invalid_block_ids=()
    )
    connector.update_connector_output(step)
    assert connector.scheduler_side.takes_part
    took = vllm.connector.WorkerFacts(None, Computed(500, 0, 0.5))
    assert facts.aggregate(took).aggregate(took).namespace == facts.namespace
    step.kv_connector_worker_meta = took.aggregate(took)
    connector.update_connector_output(step)
    assert connector.scheduler_side.prefill.s_per_token() == 0.001
    other = vllm.connector.WorkerFacts(build(vllm, backends=["other"]).to_json())
    with pytest.raises(Incompatible, match="different kinds of KV"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): facts, (0, 1): other})
    connector.shutdown()


def test_the_scheduler_tells_the_name_of_the_model_as_workers_do(vllm):
    """It nearly always registers first, and whoever looks at the daemon reads that name."""
    by_step, by_handshake = (make_connector(vllm, "SCHEDULER") for _ in range(2))
    facts = vllm.connector.WorkerFacts(build(vllm).to_json())
    by_step.update_connector_output(step_of(facts))
    by_handshake.set_xfer_handshake_metadata_pp_aware({(0, 0): facts})
    names = {each.scheduler_side._namespace.name for each in (by_step, by_handshake)}
    assert names == {build(vllm).name} == {"nowhere"}
    by_step.shutdown()
    by_handshake.shutdown()


def test_workers_that_differ_in_different_steps_end_the_cache(vllm):
    connector = make_connector(vllm, "SCHEDULER")
    one, other = (
        vllm.connector.WorkerFacts(build(vllm, backends=[name]).to_json()) for name in ("a", "b")
    )
    for facts, part in [(one, True), (one, True), (other, False), (one, False)]:
        connector.update_connector_output(step_of(facts))
        assert connector.scheduler_side.takes_part == part
    connector.shutdown()


def make_connector(vllm, role: str, *, sleeps: bool = False, **extra):
    config = engine_config(vllm)
    config.model_config.enable_sleep_mode = sleeps
    config.kv_transfer_config.kv_connector_extra_config.update(extra)
    config.compilation_config = SimpleNamespace(static_forward_context={})
    return vllm.connector.KVStoreConnector(
        config, vllm.base.KVConnectorRole[role], cache_config(vllm, full(vllm))
    )


@pytest.fixture
def prints(vllm, monkeypatch):
    """Fingerprints that become known when the test says so."""
    prints = SimpleNamespace(found=None)
    monkeypatch.setattr(vllm.namespace, "Fingerprints", lambda sources: prints)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", lambda: 0)
    return prints


def step_of(facts) -> SimpleNamespace:
    return SimpleNamespace(
        kv_connector_worker_meta=facts, failed_recving=None, invalid_block_ids=()
    )


PLAIN = SimpleNamespace(lora_request=None, prompt_embeds=None, resumable=False, mm_features=[])


@pytest.mark.parametrize("handshake", [True, False])
def test_an_engine_serves_before_its_weights_are_known_and_takes_part_after(
    vllm, prints, handshake
):
    """Both halves find out by themselves; where the handshake is hidden, a step tells."""
    worker, scheduler = make_connector(vllm, "WORKER"), make_connector(vllm, "SCHEDULER")
    worker.register_kv_caches({"layer.0": vllm.torch.zeros(10, 2, 32, 128)})
    if handshake:
        told = {(0, 0): worker.get_handshake_metadata()}
        scheduler.set_xfer_handshake_metadata_pp_aware(told)
    assert worker.build_connector_worker_meta() is None
    scheduler.on_new_request(PLAIN)
    assert not scheduler.scheduler_side.takes_part
    assert scheduler.scheduler_side.counters.totals["bypassed_unknown_weights"] == 1
    scheduler.reset_cache()  # the weights in memory are not those of the files any more
    epoch = scheduler.scheduler_side._epoch
    worker.handle_preemptions(vllm.connector.StepMetadata(epoch=epoch))
    prints.found = {"weights": "a digest"}
    facts = worker.build_connector_worker_meta()
    assert worker.build_connector_worker_meta() is None, "it is told once"
    if handshake:
        scheduler._look_at_weights()
    else:
        scheduler.update_connector_output(step_of(facts))
    ours, theirs = scheduler.scheduler_side._namespace, worker.worker_side._namespace
    assert ours == theirs
    identity = dict(ours.identity)
    assert (identity["weights"], identity["epoch"]) == ("a digest", epoch)
    worker.shutdown()
    scheduler.shutdown()


def test_attention_it_knows_is_accepted(vllm):
    specs = full(vllm), window(vllm, 512)
    vllm.namespace.check_supported(engine_config(vllm), cache_config(vllm, *specs))


@pytest.mark.parametrize(
    "name",
    ["decode_context_parallel_size", "prefill_context_parallel_size"],
)
def test_unsupported_parallelism_is_refused(vllm, name):
    with pytest.raises(Incompatible, match="parallelism"):
        vllm.namespace.check_supported(
            engine_config(vllm, **{name: 2}), cache_config(vllm, full(vllm))
        )


def test_sleep_mode_is_refused_where_vllm_does_not_say_when_it_begins(vllm, monkeypatch):
    """A save would read blocks that are not mapped any more."""
    base = type("KVConnectorBase_V1", (), {"requires_kv_delivery": True})
    monkeypatch.setattr(vllm.compat.base, "KVConnectorBase_V1", base)
    vllm.compat.check_sleep_mode(SimpleNamespace(enable_sleep_mode=False))
    vllm.compat.check_sleep_mode(SimpleNamespace())
    asleep = SimpleNamespace(enable_sleep_mode=True)
    with pytest.raises(Incompatible, match=r"vLLM 0\.33 or newer, or drop --enable-sleep-mode"):
        vllm.compat.check_sleep_mode(asleep)
    with pytest.raises(Incompatible, match="unmaps the KV cache to sleep"):
        make_connector(vllm, "WORKER", sleeps=True)
    unmapped_when_told = SimpleNamespace(enable_sleep_mode=False, enable_cumem_allocator=True)
    with pytest.raises(Incompatible, match=r"newer, or drop --enable-cumem-allocator$"):
        vllm.compat.check_sleep_mode(unmapped_when_told)
    base.unregister_kv_caches = lambda self: None
    vllm.compat.check_sleep_mode(asleep)
    vllm.compat.check_sleep_mode(unmapped_when_told)


def test_scales_that_differ_between_engines_are_refused(vllm):
    config = engine_config(vllm)
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(Incompatible, match="scales calculated at run time differ"):
        vllm.namespace.check_supported(config, cache_config(vllm, full(vllm)))


def test_scales_of_each_token_are_stored_with_their_block_or_refused(vllm):
    """The back end that computes them says how many bytes of a block are its content."""
    mode = vllm.kv.KVQuantMode.INT8_PER_TOKEN_HEAD
    config = engine_config(vllm)
    with pytest.raises(Incompatible, match="not in its blocks"):
        vllm.namespace.check_supported(
            config, cache_config(vllm, full(vllm, dtype=vllm.torch.int8, kv_quant_mode=mode))
        )
    if not vllm.compat.STANDARD_LAYOUTS:
        pytest.skip("this vLLM does not say it")
    content = 2 * 64 + 2 * 4
    inside = full(vllm, dtype=vllm.torch.int8, kv_quant_mode=mode, state_content_bytes=content)
    assert inside.page_size_bytes == 32 * 2 * content
    vllm.namespace.check_supported(config, cache_config(vllm, inside))


def test_an_engine_that_cannot_go_on_from_a_prefix_is_refused(vllm):
    config = engine_config(vllm)
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(Incompatible, match="cannot go on from a stored prefix"):
        vllm.namespace.check_supported(config, cache_config(vllm, full(vllm)))


def test_unsupported_attention_is_refused_by_name(vllm):
    chunked = vllm.kv.ChunkedLocalAttentionSpec(
        block_size=32,
        num_kv_heads=2,
        head_size=64,
        dtype=vllm.torch.bfloat16,
        attention_chunk_size=64,
    )
    mamba = vllm.kv.MambaSpec(block_size=32, shapes=((8,),), dtypes=(vllm.torch.float32,))
    for specs, named in [
        ((full(vllm), chunked), "ChunkedLocalAttentionSpec"),
        ((full(vllm), mamba), "Mamba layers, which keep a state"),
        ((full(vllm), full(vllm, block_size=64)), "block size"),
        ((full(vllm, non_causal=True),), "FullAttentionSpec"),
    ]:
        with pytest.raises(Incompatible, match=named):
            vllm.namespace.check_supported(engine_config(vllm), cache_config(vllm, *specs))


def build(
    vllm,
    config=None,
    *specs,
    backends=("CPU_ATTN/vec",),
    coded="",
    lossy=(),
    salted=False,
    head_shards=0,
    stages=(),
    **changes,
) -> Namespace:
    specs = specs or (full(vllm), window(vllm, 512, extra_retained_tokens=2))
    config = config or engine_config(vllm)
    kv_cache = cache_config(vllm, *specs, **changes)
    stage = Stage(
        layers=tuple(tuple(group.layer_names) for group in kv_cache.kv_cache_groups),
        record_nbytes=(8192,) * len(specs),
        backends=tuple(backends),
        coded=coded,
        lossy=tuple(lossy),
    )
    unnamed = vllm.namespace.build_namespace(
        config,
        kv_cache,
        stages=stages or [stage],
        salted=salted,
        head_shards=head_shards,
    )
    named = vllm.namespace.PendingNamespace(unnamed, vllm.namespace.weights_sources(config)).poll()
    assert named is not None, "a model of dummy weights is known at once"
    return named


def test_the_namespace_has_a_group_for_each_kind_of_attention(vllm):
    config = engine_config(vllm, tensor_parallel_size=4)
    assert build(vllm, config).groups == (
        Group("0", 8192, window_tokens=0, shards=4),
        Group("1", 8192, window_tokens=514, shards=4),
    )
    if "kv_tp_replicas" in vllm.kv.KVCacheConfig.__dataclass_fields__:
        assert {group.shards for group in build(vllm, config, kv_tp_replicas=4).groups} == {1}


def test_with_head_shards_every_degree_of_tensor_parallelism_has_one_namespace(vllm):
    degrees = [engine_config(vllm, tensor_parallel_size=degree) for degree in (1, 2, 4)]
    shared = {build(vllm, config, head_shards=4).id for config in degrees}
    own = {build(vllm, config).id for config in degrees}
    assert (len(shared), len(own), shared & own) == (1, 3, set())
    assert [group.shards for group in build(vllm, head_shards=4).groups] == [4, 4]
    assert build(vllm, head_shards=2).id not in shared


def test_what_all_workers_hold_is_the_same_for_every_degree(vllm):
    if "kv_tp_replicas" not in vllm.kv.KVCacheConfig.__dataclass_fields__:
        pytest.skip("this vLLM does not tell what its workers hold alike")
    degrees = [
        build(vllm, engine_config(vllm, tensor_parallel_size=degree), kv_tp_replicas=degree)
        for degree in (1, 2, 8)
    ]
    assert len({namespace.id for namespace in degrees}) == 1


def test_latent_attention_has_no_heads_to_cut(vllm):
    latent = vllm.kv.MLAAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=576, dtype=vllm.torch.bfloat16
    )
    assert vllm.namespace.has_heads(cache_config(vllm, full(vllm)))
    assert not vllm.namespace.has_heads(cache_config(vllm, latent))


def test_each_stage_of_a_pipeline_has_groups_of_its_own(vllm):
    def staged(*layers: tuple[int, int], coded=("", ""), **changes):
        """Of each stage so many layers of both groups."""
        stages = [
            Stage(
                layers=tuple(
                    tuple(f"{group}.{stage}.{at}" for at in range(count))
                    for group, count in enumerate(counts)
                ),
                record_nbytes=tuple(4096 * count for count in counts if count),
                backends=("CPU_ATTN/vec",),
                coded=form,
                lossy=tuple(LossySizes(3000, 2000) for count in counts if count and form),
            )
            for stage, (counts, form) in enumerate(zip(layers, coded, strict=True))
        ]
        return build(vllm, stages=stages, **changes)

    even, uneven = staged((2, 1), (2, 1)), staged((1, 0), (3, 2))
    assert even.groups == (
        Group("0@0", 8192),
        Group("0@1", 8192),
        Group("1@0", 4096, window_tokens=514),
        Group("1@1", 4096, window_tokens=514),
    )
    assert [group.name for group in uneven.groups] == ["0@0", "0@1", "1@1"]
    assert [dict(each.identity)["pipeline"] for each in (even, uneven)] == ["3+3", "1+5"]
    assert len({build(vllm).id, even.id, uneven.id}) == 3
    lossy = staged((2, 1), (2, 1), coded=("ep/1 12", "ep/1 34"))
    assert dict(lossy.identity)["record"] == "ep/1 12 | ep/1 34"
    fine = [group for group in lossy.groups if group.refines != -1]
    assert [(group.name, group.refines) for group in fine] == [(f"{i}.fine", i) for i in range(4)]


def test_a_stage_without_a_kv_cache_is_refused(vllm):
    config = cache_config(vllm, full(vllm))
    config.kv_cache_groups[0].layer_names.clear()
    with pytest.raises(Incompatible, match="fewer pipeline stages"):
        vllm.namespace.check_supported(engine_config(vllm, pipeline_parallel_size=9), config)


def test_a_prompt_of_a_pipeline_takes_the_time_of_all_its_stages(vllm, prints):
    worker = make_connector(vllm, "WORKER")
    worker.register_kv_caches({"layer.0": vllm.torch.zeros(10, 2, 32, 128)})
    worker._vllm_config.parallel_config.pipeline_parallel_size = 2
    worker.worker_side.clock.take = lambda: Computed(1000, 0, 0.25)
    assert worker.build_connector_worker_meta().computed.seconds == 0.5
    worker.shutdown()


def test_engines_that_require_a_salt_share_nothing_with_others(vllm):
    assert build(vllm, salted=True).salted
    assert build(vllm, salted=True).id != build(vllm).id


def test_a_lossy_namespace_has_fine_parts_behind_all_groups(vllm):
    config = engine_config(vllm, tensor_parallel_size=4)
    coded, sizes = "ep/1 K5V4+K3V4 12", [LossySizes(3000, 2000), LossySizes(4000, 2500)]
    namespace = build(vllm, config, coded=coded, lossy=sizes)
    assert namespace.fidelity == "ep"
    assert namespace.groups == (
        Group("0", 8192, shards=4, varies=True),
        Group("1", 8192, window_tokens=514, shards=4, varies=True),
        Group("0.fine", 2000, shards=4, refines=0, base_nbytes=3000),
        Group("1.fine", 2500, window_tokens=514, shards=4, refines=1, base_nbytes=4000),
    )
    assert dict(namespace.identity)["record"] == coded
    assert build(vllm, config).fidelity == build(vllm, config, coded="l3/1 12").fidelity == "exact"


def test_the_namespace_changes_with_whatever_changes_the_bytes(vllm):
    seen = {build(vllm).id, build(vllm, backends=["CPU_ATTN/amx"]).id}
    for path, value in [
        ("model_config.seed", 1),
        ("model_config.dtype", "torch.float32"),
        ("model_config.quantization", "fp8"),
        ("cache_config.cache_dtype", "fp8"),
        ("parallel_config.tensor_parallel_size", 2),
        ("load_config.model_loader_extra_config", {"pattern": "other-*"}),
        ("model_config.hf_config", SimpleNamespace(to_dict=lambda: {"hidden_size": 9})),
    ]:
        config = engine_config(vllm)
        owner, name = path.split(".")
        setattr(getattr(config, owner), name, value)
        seen.add(build(vllm, config).id)
    assert len(seen) == 9


def test_weights_that_are_quantized_at_the_start_are_told_apart(vllm):
    """One name of a quantization stands for many: `--quantization-config` tells which."""
    known = pytest.importorskip("vllm.config.quantization")
    args = known.resolve_quantization_config

    def built(quantization, fields, *, drafts=False):
        config = engine_config(vllm)
        model = config.model_config
        model.quantization_config = quantization and args(quantization, fields)
        if drafts:
            draft = SimpleNamespace(**{**vars(model), "model": "/draft"})
            model.quantization_config = None
            config.speculative_config = SimpleNamespace(draft_model_config=draft)
        return build(vllm, config).id

    assert built(None, None) == build(vllm).id, "what is stored today stays readable"
    kinds = [
        (None, None),
        ("online", {"linear": "fp8_per_tensor"}),
        ("online", {"linear": "mxfp8"}),
        ("online", {"linear": {"weight": "mxfp8", "activation": "fp8_per_token"}}),
        ("fp8_per_tensor", None),
        ("fp8_per_tensor", {"ignore": ["re:.*self_attn.*"]}),
    ]
    if "targets" in known.QuantizationConfigArgs.__dataclass_fields__:  # not before vLLM 0.30
        kinds.append(("online", {"targets": {"re:.*mlp.*": "mxfp8"}}))
    for drafts in (False, True):
        assert len({built(*kind, drafts=drafts) for kind in kinds}) == len(kinds)
    again = {"linear": {"activation": "fp8_per_token", "weight": "mxfp8"}}
    assert built("online", again) == built(*kinds[3])


def test_a_file_that_tells_the_quantization_is_a_part_of_the_weights(vllm, tmp_path):
    config, file = engine_config(vllm), tmp_path / "torchao.json"
    sources = vllm.namespace.weights_sources
    config.model_config.hf_overrides = lambda hf_config: hf_config
    assert sources(config) == {"weights": "dummy seed 0"}
    config.model_config.hf_overrides = {"quantization_config_file": str(file)}
    with pytest.raises(Incompatible, match=r"cannot read .*torchao\.json.*--hf-overrides"):
        sources(config)
    file.write_text("{}")
    assert sources(config) == {"weights": "dummy seed 0", "quantization_file": [file]}
    named = {"weights": "my-model-v3", "quantization_file": [file]}
    assert sources(config, "my-model-v3") == named, "a name of the weights does not name it"
    config.model_config.hf_overrides = {"hidden_size": 8}
    assert build(vllm, config) == build(vllm)


def test_the_namespace_does_not_change_with_where_the_model_lies(vllm):
    config = engine_config(vllm)
    config.model_config.model = "/elsewhere"
    config.model_config.hf_config = SimpleNamespace(
        to_dict=lambda: {"hidden_size": 8, "_name_or_path": "/y", "transformers_version": "9"}
    )
    assert build(vllm, config) == build(vllm)
    assert build(vllm, config).id == build(vllm).id
    assert build(vllm, config).title == "elsewhere"


def test_weights_are_told_by_the_files_that_were_loaded_or_not_at_all(vllm, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    sources = vllm.namespace.weights_sources
    config = engine_config(vllm)
    config.model_config.model, config.model_config.revision = str(tmp_path), None
    config.load_config.load_format, config.load_config.download_dir = "auto", None
    assert sources(config) == {"weights": [tmp_path / "model.safetensors"]}
    draft = SimpleNamespace(**{**vars(config.model_config), "model": str(tmp_path / "draft")})
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft/draft.bin").write_bytes(b"weights")
    assert sources(config)["draft_weights"] == [tmp_path / "draft/draft.bin"]
    config.speculative_config = None
    config.load_config.load_format = "tensorizer"
    with pytest.raises(Incompatible, match=r"tensorizer.*weights_id"):
        sources(config)
    assert sources(config, "my-model-v3") == {"weights": "my-model-v3"}
    config.load_config.load_format = "auto"
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"text_model_id": "a/b"})
    with pytest.raises(Incompatible, match=r"text_model_id.*weights_id"):
        sources(config)


def test_a_model_is_looked_for_where_vllm_was_told_to_download_it(vllm, tmp_path):
    revision = tmp_path / "models--own--model/snapshots/0123"
    revision.mkdir(parents=True)
    (revision / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "models--own--model/refs").mkdir()
    (tmp_path / "models--own--model/refs/main").write_text("0123")
    config = engine_config(vllm)
    config.model_config.model, config.model_config.revision = "own/model", None
    config.load_config.load_format = "auto"
    with pytest.raises(Incompatible, match=r"cannot find the weights.*weights_id"):
        vllm.namespace.weights_sources(config)
    config.load_config.download_dir = str(tmp_path)
    found = vllm.namespace.weights_sources(config)
    assert found == {"weights": [revision / "model.safetensors"]}


def test_positions_that_scale_with_the_models_length_are_told_apart(vllm):
    seen = set()
    for rope, length in [
        ("default", 4096),
        ("default", 8192),
        ("longrope", 4096),
        ("longrope", 8192),
    ]:
        config = engine_config(vllm)
        scaled = {"rope_scaling": {"rope_type": rope}}
        config.model_config.hf_config = SimpleNamespace(to_dict=lambda scaled=scaled: scaled)
        config.model_config.max_model_len = length
        seen.add(build(vllm, config).id)
    assert len(seen) == 3


def test_a_record_does_not_show_kernel_blocks(vllm):
    """A block of the KV cache manager may consist of several of the attention kernel."""
    from kvstore_vllm.opening import open_pages

    torch = vllm.torch
    whole = torch.arange(6 * 2 * 8 * 4, dtype=torch.float32).view(6, 2, 8, 4)
    split = whole.view(6, 2, 2, 4, 4).transpose(1, 2).reshape(12, 2, 4, 4)
    records = []
    for layer in (whole, split):
        pages = open_pages([[layer]], 6)
        record = bytearray(pages.record_nbytes[0])
        pages.read(0, [3], [memoryview(record)], None)
        records.append(bytes(record))
    assert records[0] == records[1] == whole[3].numpy().tobytes()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_daemon_of_another_user_is_used_only_if_the_settings_say_so(vllm):
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="engine"))
    role = vllm.base.KVConnectorRole.WORKER
    with Daemon(file=False) as daemon:
        os.chown(daemon.start().socket, 65534, 65534)
        settings = vllm.connector.parse_settings({"target": daemon.target})
        with (
            vllm.connector._client(settings, config, role) as client,
            pytest.raises(Unauthorized, match="daemon_uid=65534"),
        ):
            client.connect()
        settings = vllm.connector.parse_settings({"target": daemon.target, "daemon_uid": 65534})
        with vllm.connector._client(settings, config, role) as client:
            client.connect()
            assert client.local
