"""What makes one model's KV bytes not interchangeable with another's, and which models we serve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore import Group, Incompatible, Namespace
from kvstore.model.names import model_name
from kvstore_transformers.compat import in_forward

_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers stored in one record, with their KV of one token: tensors (1, heads, 1, head size)."""

    window_tokens: int
    layers: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def record_nbytes(self, block_tokens: int) -> int:
        return int(block_tokens * sum(each.nbytes for each in (*self.keys, *self.values)))

    def fits(self, layers: Sequence[Any]) -> bool:
        """Whether a cache's layers hold KV of this kind: not so if computed under autocast, say."""
        kinds = zip(self.layers, self.keys, self.values, strict=True)
        return all(
            _kind(layers[index].keys) == _kind(keys)
            and _kind(layers[index].values) == _kind(values)
            for index, keys, values in kinds
        )


class Fine(NamedTuple):
    """Fine parts of a group's lossy records: bytes of each, and of the base that has one."""

    nbytes: int
    base_nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The KV of a model: its groups of layers; and the model's device and dtype."""

    groups: tuple[LayerGroup, ...]
    device: torch.device
    dtype: torch.dtype


def check_supported(model: Any) -> None:
    """Raise Incompatible, naming the reason, for a model whose KV cannot be kept as it is now."""
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise Incompatible("adapters change the KV; merge the adapter into the model first")
    if model.training:
        raise Incompatible("the model is in training mode; call model.eval() first")
    if (name := _hooked_by(model)) is not None:
        raise Incompatible(
            f"a forward hook of {name} may change the KV; remove the hooks, or use model.generate"
        )


def check_unchanged(model: Any, layout: Layout) -> None:
    """Raise Incompatible if `model` would not go on from the KV that it was found to keep."""
    check_supported(model)
    if (model.dtype, model.device) != (layout.dtype, layout.device):
        raise Incompatible("the model was converted or moved meanwhile; make a new Prefixes")


def find_layout(model: Any) -> Layout:
    """Return how `model` keeps its KV, found by computing one token.

    Raises Incompatible for a model that keeps something else than keys and values of tokens.
    """
    check_supported(model)
    if model.config.is_encoder_decoder or model.config.get_text_config() is not model.config:
        raise Incompatible("kvstore serves decoders of text alone: a key names tokens, not images")
    if getattr(model.config, "use_bidirectional_attention", False):
        raise Incompatible("this model's KV depends on later tokens, too")
    rope = json.dumps(model.config.to_dict(), default=str)
    if "longrope" in rope or '"dynamic"' in rope:
        raise Incompatible("this model's positions depend on the length of the whole text")
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise Incompatible(f"kvstore does not support {type(layer).__name__} yet")
    with torch.inference_mode():
        token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        model(input_ids=token, **in_forward(model, cache), use_cache=True)
    devices = {layer.keys.device for layer in cache.layers}
    if len(devices) != 1:
        raise Incompatible("kvstore does not support models spread over several devices yet")
    if devices != {model.device}:
        raise Incompatible("this model's KV is on another device than the model")
    return Layout(tuple(_groups(cache.layers)), model.device, model.dtype)


def build_namespace(
    model: Any,
    layout: Layout,
    block_tokens: int,
    weights: str,
    *,
    coded: str = "",
    record_nbytes: Sequence[int] = (),
    fine: Sequence[Fine] = (),
) -> Namespace:
    """Describe the KV of `model`. weights: their fingerprint or name, "" if not known yet.

    coded: the form of records, and their shapes; record_nbytes: the most of each group's. Without
    them, records are as the model keeps them. fine: of each group, if records are lossy.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _VOLATILE}
    layers = [
        (group.window_tokens, index, str(part.dtype), tuple(part.shape))
        for group in layout.groups
        for index, *kv in zip(group.layers, group.keys, group.values, strict=True)
        for part in kv
    ]
    identity = {
        "engine": "transformers",
        "model": _digest(config),
        "weights": weights,
        "kv_dtype": "/".join(sorted({dtype for _, _, dtype, _ in layers})),
        "page": "K HNC, V HNC per layer",
        "backends": str(model.config._attn_implementation),
        "layers": _digest(layers),
    }
    if coded:
        identity["record"] = coded
    sizes = record_nbytes or [group.record_nbytes(block_tokens) for group in layout.groups]
    base = [
        Group(f"{index}", nbytes, group.window_tokens, varies=bool(coded))
        for index, (group, nbytes) in enumerate(zip(layout.groups, sizes, strict=True))
    ]
    refining = [
        Group(
            f"{index}.fine",
            nbytes,
            base[index].window_tokens,
            refines=index,
            base_nbytes=base_nbytes,
        )
        for index, (nbytes, base_nbytes) in enumerate(fine)
    ]
    return Namespace(
        block_tokens=block_tokens,
        groups=(*base, *refining),
        identity=tuple(sorted(identity.items())),
        fidelity="ep" if fine else "exact",
        name=model_name(model.config.name_or_path),
    )


def with_weights(namespace: Namespace, fingerprint: str) -> Namespace:
    """Return `namespace` with weights that are known."""
    identity = {**dict(namespace.identity), "weights": fingerprint}
    return replace(namespace, identity=tuple(sorted(identity.items())))


def _hooked_by(model: Any) -> str | None:
    """Return the Python module that has put a forward hook into the model; None: no hooks.

    Hooks of transformers itself do not count: they record outputs. It leaves them in the model.
    """
    modules = [model]
    while modules:
        module = modules.pop()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            name = str(getattr(hook, "__module__", ""))
            if not name.startswith("transformers."):
                return name or "an unknown module"
        modules += module.children()
    return None


def _kind(kv: Tensor) -> tuple[Any, ...]:
    return kv.dtype, kv.device, kv.shape[0], kv.shape[1], kv.shape[3]


def _groups(layers: Sequence[Any]) -> Iterator[LayerGroup]:
    """Yield the groups: full attention, then one per window size."""
    windows = [int(getattr(layer, "sliding_window", 0)) for layer in layers]
    for window in sorted(set(windows)):
        indexes = tuple(index for index, each in enumerate(windows) if each == window)
        keys = tuple(layers[index].keys for index in indexes)
        values = tuple(layers[index].values for index in indexes)
        yield LayerGroup(window, indexes, keys, values)


def _digest(value: Mapping[str, object] | Sequence[object]) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
