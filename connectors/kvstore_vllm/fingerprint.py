"""Which weights an engine runs: a digest of every file it may have loaded, without delaying it.

All files of the model's folder count but those that cannot change the KV of given tokens. Which of
them vLLM reads depends on its version and options (`consolidated*.safetensors` before the shards,
code of the model, scales of a quantization): a file too many costs misses, one too few is wrong KV.

The digest is found in the background: see `kvstore.system.fingerprints`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kvstore.model.errors import Incompatible
from kvstore.settings import default_digest_memory
from kvstore.system import fingerprints
from kvstore.system.file_digests import FileDigests
from kvstore.system.fingerprints import Source, file_and_splits, process_began

__all__ = ["Fingerprints", "Source", "process_began", "weights_files"]

FILES_MAX = 4096
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
IRRELEVANT = (
    ".*",
    "*.md",
    "*.txt",
    "*.jinja",
    "*.png",
    "*.jpg",
    "*.pdf",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "chat_template*",
    "generation_config.json",
    "optimizer.pt",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
)
"""Files that no model is made of. Tokenizers are not among them: a model's code may read them."""
OTHER_FOLDERS = (".*", "__pycache__", "checkpoint-*", "onnx", "openvino", "original", "runs")
"""Folders beside the model that vLLM does not load it from."""


def weights_files(path: Path) -> list[Path]:
    """Return the files that tell the weights in `path`, a model's folder or one file of weights.

    Raises Incompatible if there are no weights, or more files than a model has.
    """
    if path.is_file():
        return file_and_splits(path)
    files = sorted(_files(path, depth=1)) if path.is_dir() else []
    if len(files) > FILES_MAX:
        raise Incompatible(f"{path} has over {FILES_MAX} files: is it a model? {_NAME_THEM}")
    if not any(_is_one_of(file.name, WEIGHTS) for file in files):
        raise Incompatible(f"found no weights in {path}; {_NAME_THEM}")
    return files


_NAME_THEM = 'name them in kv_connector_extra_config, e.g. "weights_id": "my-model-v3"'


def _files(folder: Path, depth: int) -> Iterator[Path]:
    for each in folder.iterdir():
        if each.is_dir():
            if depth and not _is_one_of(each.name, OTHER_FOLDERS):
                yield from _files(each, depth - 1)
        elif not _is_one_of(each.name, IRRELEVANT) and each.is_file():
            yield each


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class Fingerprints(fingerprints.Fingerprints):
    """The same, remembered where all engines of this user look."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        digests: FileDigests | None = None,
        began: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(sources, digests or FileDigests(default_digest_memory()), began)
