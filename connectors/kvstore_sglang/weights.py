"""What tells the weights of one SGLang, and whether they are still those.

SGLang names a model by its path. What is stored under is a digest of the files there: of the model,
of a draft model, of the scales of an FP8 cache. Where files do not tell all, the user has to.

Weights that are exchanged in a running engine are told by no file: from then on it stores and loads
nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvstore import Incompatible
from kvstore.settings import default_digest_memory
from kvstore.system.file_digests import FileDigests
from kvstore.system.fingerprints import Fingerprints, Source
from kvstore.system.model_files import model_path, weights_files

logger = logging.getLogger(__name__)

ADVICE = 'name them in --hicache-storage-backend-extra-config, e.g. "weights": "my-model-v3"'
READ_FROM_FILES = (
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "gguf",
    "instanttensor",
    "layered",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "safetensors",
    "sharded_state",
)
"""Load formats that read the files of the model's folder as they are, and nothing else."""
FROM_ELSEWHERE = (
    "custom_weight_loader",
    "modelopt_checkpoint_restore_path",
    "checkpoint_engine_wait_weights_before_ready",
    "delete_ckpt_after_loading",
    "decrypted_config_file",
    "decrypted_draft_config_file",
    "rl_quant_profile",
)
"""Arguments of SGLang's with which the model is not just what its folder says."""
VALUES = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "qsa_indexer_dtype",
    "modelopt_quant",
    "json_model_override_args",
    "model_loader_extra_config",
    "model_impl",
    "context_length",
)
"""Arguments that decide how KV is computed from the same weights, or kept."""
DRAFT_VALUES = (
    "speculative_algorithm",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
)
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"


class Arguments(NamedTuple):
    """What SGLang's process was started with, as far as it tells."""

    model: Any
    draft: Any
    lora: Any
    serving: Any
    modelscope: bool


def arguments() -> Arguments | None:
    """Return SGLang's arguments; None outside its processes."""
    from sglang.srt import runtime_context as context
    from sglang.srt.environ import envs

    try:
        return Arguments(
            context.get_model(),
            context.get_spec(),
            context.get_lora(),
            context.get_serving(),
            bool(envs.SGLANG_USE_MODELSCOPE.get()),
        )
    except ValueError:  # "not published"
        return None


def values(told: Arguments | None) -> dict[str, str]:
    """Return what decides the KV beside the weights, as fields of an identity."""
    if told is None:
        return {}
    named = {name: getattr(told.model, name, None) for name in VALUES}
    named.update({name: getattr(told.draft, name, None) for name in DRAFT_VALUES})
    return {name: str(value) for name, value in named.items() if value is not None}


def sources(told: Arguments | None, named: str) -> dict[str, Source]:
    """Return what tells the weights, by their names in the identity. named: by the user.

    Raises Incompatible, saying what to type, if the files on this machine do not tell them.
    """
    if named:
        return {"weights": f"named {named}"}
    if told is None:
        raise Incompatible(f"SGLang does not say here which model it runs: {ADVICE}")
    model = told.model
    if getattr(told.lora, "enable_lora", False) or getattr(told.lora, "lora_paths", None):
        raise Incompatible(
            f"SGLang names adapters (LoRA) by name and path, not by their weights: {ADVICE}, and "
            "another name when an adapter changes"
        )
    elsewhere = [name for name in FROM_ELSEWHERE if getattr(model, name, None)]
    if elsewhere:
        option = elsewhere[0].replace("_", "-")
        raise Incompatible(f"with --{option} the weights are not what the files say: {ADVICE}")
    mode = getattr(model, "weight_cache_mode", "off")
    if mode != "off":
        raise Incompatible(
            f"with --weight-cache-mode {mode} the weights may be older than the files: {ADVICE}, "
            "and another name when the weights change"
        )
    found: dict[str, Source] = {
        "weights": _files(told, model.model_path, model.revision, str(model.load_format))
    }
    draft = getattr(told.draft, "speculative_draft_model_path", None)
    if draft and draft != model.model_path:
        revision = getattr(told.draft, "speculative_draft_model_revision", None)
        load_format = getattr(told.draft, "speculative_draft_load_format", None)
        found["draft_weights"] = _files(
            told, draft, revision, str(load_format or model.load_format)
        )
    scales = getattr(model, "quantization_param_path", None)
    if scales:
        found["kv_scales"] = [Path(scales)]
    return found


def _files(told: Arguments, name: str, revision: str | None, load_format: str) -> list[Path]:
    if load_format not in READ_FROM_FILES:
        raise Incompatible(f"what --load-format {load_format} loads is told by no file: {ADVICE}")
    path = model_path(
        name,
        revision=revision,
        folder=getattr(told.model, "download_dir", None),
        advice=ADVICE,
        hub=not told.modelscope,
    )
    return weights_files(path, advice=ADVICE)


class Weights:
    """The weights of one engine: `identity` when they are known, and as long as they stay."""

    def __init__(self, told: Arguments | None, named: str) -> None:
        """Begin to hash what is not known. Raises Incompatible."""
        self._told = told
        self._version = _version(told)
        self._updates = updates_so_far()
        self._changed = False
        try:
            self._prints = Fingerprints(sources(told, named), FileDigests(default_digest_memory()))
        except OSError as error:
            raise Incompatible(f"cannot read the weights ({error}): {ADVICE}") from error

    @property
    def identity(self) -> Mapping[str, str] | None:
        """Fields of an identity; None: not known yet, or not any more."""
        if not self._changed and (
            updates_so_far() != self._updates or _version(self._told) != self._version
        ):
            self._changed = True
            logger.error(
                "weights=exchanged cache=off reason='the weights of this engine were updated while "
                "it ran: what it computes now is stored under no name' do='restart it'"
            )
        return None if self._changed else self._prints.found


def _version(told: Arguments | None) -> str:
    if told is None:
        return ""
    return f"{getattr(told.serving, 'weight_version', '')} {getattr(told.model, 'model_path', '')}"


_updates = 0
_lock = threading.Lock()


def updates_so_far() -> int:
    """Return how often this process has exchanged the weights of its engine.

    SGLang tells its storage nothing of that. But every way to exchange weights is timed by one
    method of its scheduler, and that is watched, in processes that have one.
    """
    _watch(sys.modules.get(UPDATER))
    return _updates


def _watch(module: Any) -> None:
    manager = getattr(module, "SchedulerWeightUpdaterManager", None)
    timed = getattr(manager, "_observe_weight_load", None)
    if manager is None or timed is None or hasattr(timed, "kvstore_watches"):
        return

    def counted(self: Any, source: str) -> Any:
        global _updates  # noqa: PLW0603 - one engine, one process
        with _lock:
            _updates += 1
        return timed(self, source)

    counted.kvstore_watches = True  # type: ignore[attr-defined]
    manager._observe_weight_load = counted
