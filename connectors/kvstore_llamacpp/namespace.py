"""Which sequence states are interchangeable: the namespace of one `Llama`.

It says every byte of the GGUF, what of the context's parameters the KV depends on, the layout of
the state, and the build of llama.cpp, byte by byte: another build may keep or compute KV otherwise.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import llama_cpp

from kvstore import Group, Incompatible, InvalidRequest, Namespace
from kvstore.model.names import model_name
from kvstore.settings import default_digest_memory
from kvstore.system.file_digests import FileDigests
from kvstore.system.fingerprints import Fingerprints, Source, file_and_splits
from kvstore_llamacpp.context import Context, StateFailed
from kvstore_llamacpp.state import FORM, CacheLayout, UnknownState, read_state

logger = logging.getLogger(__name__)

SNAPSHOT_FORM = "llama.cpp snapshot 1"
LAST_BLOCK = 2  # a window that reaches back one token: only the last block of a prefix is needed
_CHUNKED_WINDOWS = ("llama4",)
_PARAMETERS = (
    "attention_type",
    "flash_attn_type",
    "pooling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "rope_scaling_type",
    "type_k",
    "type_v",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_ext_factor",
    "yarn_orig_ctx",
)
"""Of the context, what the KV of given tokens depends on."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that are stored in one record. cache: their number in the state.

    window_tokens: 0 for full attention. layout: None for a snapshot of everything, of
    `snapshot_nbytes` bytes at the most.
    """

    cache: int
    window_tokens: int
    layout: CacheLayout | None
    snapshot_nbytes: int = 0

    def record_nbytes(self, block_tokens: int) -> int:
        """Bytes of one record; the most of a snapshot."""
        return self.layout.cell_nbytes * block_tokens if self.layout else self.snapshot_nbytes


def find_layers(
    llama: llama_cpp.Llama, context: Context, block_tokens: int, snapshot_nbytes: int
) -> list[Layers]:
    """Return the kinds of layers of a model, by the state of one token.

    One snapshot where the layout of the state is not known, which the log says. Raises Incompatible
    for a model whose state cannot be read at all, and InvalidRequest for a size of blocks that its
    sliding window is no multiple of.
    """
    probing = llama.n_tokens == 0
    try:
        if probing:
            llama.eval([max(0, llama.token_bos())])
        layers = _layers_of(llama, context)
        _check_blocks(layers, block_tokens)
        return layers
    except UnknownState as reason:
        logger.warning(
            "layout=unknown stored=snapshots reason=%r "
            "meaning='a prompt resumes only where an earlier prompt or its answer ended'",
            str(reason),
        )
        return [Layers(0, LAST_BLOCK, None, snapshot_nbytes)]
    except (StateFailed, RuntimeError) as error:
        raise Incompatible(f"the state of this model cannot be kept: {error}") from error
    finally:
        if probing:
            context.clear()


def _layers_of(llama: llama_cpp.Llama, context: Context) -> list[Layers]:
    window = context.window_tokens
    if llama_cpp.llama_model_is_recurrent(llama.model) or llama_cpp.llama_model_is_hybrid(
        llama.model
    ):
        raise UnknownState("the model is recurrent, or partly")
    architecture = llama.metadata.get("general.architecture", "")
    states = read_state(context.save(), (1, 2))
    if len(states) == 2 and (not window or architecture in _CHUNKED_WINDOWS):
        raise UnknownState(f"{architecture} has a second cache that is no sliding window")
    if not all(state.layout.tensors for state in states):
        raise UnknownState("a cache has no layers")
    windows = (0, window)[: len(states)]
    return [
        Layers(number, size, state.layout)
        for number, (state, size) in enumerate(zip(states, windows, strict=True))
    ]


def _check_blocks(layers: list[Layers], block_tokens: int) -> None:
    """Raise InvalidRequest unless a window begins where a block does: llama.cpp writes no more of
    it than the window."""
    for each in layers:
        rest = each.window_tokens % block_tokens if each.window_tokens else 0
        if rest > 1:
            fitting = [n for n in range(block_tokens, 0, -1) if each.window_tokens % n < 2]
            raise InvalidRequest(
                f"block_tokens={block_tokens} does not divide the model's sliding window of "
                f"{each.window_tokens} tokens; use block_tokens={fitting[0]}"
            )


def identity_of(
    llama: llama_cpp.Llama, layers: list[Layers], *, exact: bool = False
) -> dict[str, str]:
    """Return what the KV of `llama` depends on, beside its files. exact: none is of answers."""
    parameters = {name: getattr(llama.context_params, name) for name in _PARAMETERS}
    if any(key.endswith("rope.scaling.original_context_length") for key in llama.metadata):
        parameters["n_ctx"] = llama.n_ctx()  # some of these scale positions by it
    state = [each.layout.describe() if each.layout else SNAPSHOT_FORM for each in layers]
    windows = [each.window_tokens for each in layers]
    identity = {
        "engine": "llama.cpp",
        "parameters": _digest(parameters),
        "overrides": _digest(llama.kv_overrides or {}),
        "adapter_scale": str(llama.lora_scale) if llama.lora_path else "",
        "offloaded_layers": str(llama.model_params.n_gpu_layers),
        "kv_dtype": f"k={parameters['type_k']} v={parameters['type_v']}",
        "layout": FORM,
        "layers": _digest({"caches": state, "windows": windows}),
    }
    if exact:
        identity["answers"] = "left out"
    return identity


def describe(
    llama: llama_cpp.Llama, layers: list[Layers], block_tokens: int, version: str, *, exact: bool
) -> Namespace:
    """Return the namespace of `llama`, without what its files are."""
    identity = {**identity_of(llama, layers, exact=exact), "version": version}
    groups = tuple(
        Group(
            "snapshot" if each.layout is None else "window" if each.window_tokens else "full",
            each.record_nbytes(block_tokens),
            each.window_tokens,
            varies=each.layout is None,
        )
        for each in layers
    )
    name = str(llama.metadata.get("general.name", "")) or model_name(llama.model_path)
    return Namespace(block_tokens, groups, tuple(sorted(identity.items())), name=name)


class ModelFiles:
    """The files that a `Llama` was made of, hashed in the background; and whether they changed."""

    def __init__(self, llama: llama_cpp.Llama, weights_id: str) -> None:
        """Raise Incompatible for a file that is not there."""
        self._model = [] if weights_id else file_and_splits(Path(llama.model_path))
        sources: dict[str, Source] = {
            "weights": weights_id or self._model,
            "build": _libraries(),
            "adapter": [Path(llama.lora_path)] if llama.lora_path else "",
        }
        try:
            self._stamps = [_stamp(path) for path in self._model]
            self._fingerprints = Fingerprints(
                {name: each for name, each in sources.items() if each},
                FileDigests(default_digest_memory()),
            )
        except OSError as error:
            raise Incompatible(
                f"a file of the model cannot be read: {error}; name the weights instead, by "
                'weights_id="my-model-v3"'
            ) from error

    def complete(self, namespace: Namespace) -> Namespace | None:
        """Return the namespace with what the files are; None: that is not known yet, or never, as
        the log says."""
        found = self._fingerprints.found
        if found is None:
            return None
        identity: Mapping[str, str] = {**dict(namespace.identity), **found}
        return replace(namespace, identity=tuple(sorted(identity.items())))

    def changed(self) -> bool:
        """Whether a file of the weights is not what was loaded any more."""
        try:
            return [_stamp(path) for path in self._model] != self._stamps
        except OSError:
            return True


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


def _libraries() -> list[Path]:
    """Return the files of llama.cpp that this process runs."""
    library = Path(llama_cpp.llama_cpp._lib._name).resolve()
    others = [*library.parent.glob("libllama.*"), *library.parent.glob("libggml*")]
    return sorted({library, *(path.resolve() for path in others if path.is_file())})


def _digest(value: Mapping[str, object]) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
