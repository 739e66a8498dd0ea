"""How many weights a token is multiplied by: of the layers, embeddings and output left out.

Prefill computes the output for the last token only, and embeddings are looked up. Norms and biases
do not count at this accuracy. Layers that keep a state instead of KV have shapes of many kinds;
their mixing weights are taken as 4 x hidden^2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.plan.layers import Kind, LayerKind, whole

# Two matrices instead of a gate, up and down.
_UNGATED = frozenset(
    (
        *("gpt2", "gpt_neox", "gpt_bigcode", "gptj", "opt", "bloom", "falcon", "mpt", "phi"),
        *("starcoder2", "nemotron", "nemotron_h"),
    )
)
STATE_SQUARES = 4


def active_weights(config: Mapping[str, Any], kinds: Sequence[LayerKind], attention: int) -> int:
    """Return the weights used for one token. attention: of one layer's attention."""
    hidden = whole(config, "hidden_size", "n_embd", "d_model")
    sizes = {Kind.FULL: attention, Kind.WINDOW: attention, Kind.STATE: STATE_SQUARES * hidden**2}
    own_layers = Kind.NONE in (kind.kind for kind in kinds) and _has_mlp_layers(config)
    total = 0
    for number, each in enumerate(kinds):
        total += sizes.get(each.kind, 0)
        if each.kind is Kind.NONE and not own_layers:
            total += attention  # it attends to what another layer keeps
        if each.kind is Kind.NONE or not own_layers:
            total += _mlp(config, number, hidden)
    return total


def _has_mlp_layers(config: Mapping[str, Any]) -> bool:
    """Say whether MLPs are layers of their own, as in Nemotron-H."""
    names = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()
    return any(name in ("mlp", "moe", "-", "E") for name in names)


def _mlp(config: Mapping[str, Any], layer: int, hidden: int) -> int:
    matrices = 2 if config.get("model_type") in _UNGATED else 3
    wide = whole(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    if not _is_sparse(config, layer):
        return matrices * hidden * whole(config, "intermediate_size_mlp", default=wide)
    width = whole(config, "moe_intermediate_size", "expert_ffn_hidden_size", default=wide)
    used = whole(config, "num_experts_per_tok", "num_experts_per_token", "top_k_experts", default=1)
    shared = whole(config, "n_shared_experts", "num_shared_experts", default=0) * width
    shared = whole(config, "shared_expert_intermediate_size", default=shared)
    if config.get("model_type") == "llama4_text":
        shared = wide
    return matrices * hidden * (used * width + shared)


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Say whether a layer has experts."""
    experts = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    if not any((config.get(name) or 0) > 1 for name in experts):
        return False
    if kinds := config.get("mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    if layer < whole(config, "first_k_dense_replace", default=0):
        return False
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    if period := config.get("expert_layer_period"):
        return bool(layer % period == config.get("expert_layer_offset", 0))
    every = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    return (layer + 1) % int(every) == 0
