"""Which files on this machine are a model: what an engine may have read to get its weights.

All files of the model's folder count but those that cannot change the KV of given tokens. Which of
them an engine reads depends on its version and options (`consolidated*.safetensors` before the
shards, code of the model, scales of a quantization): a file too many costs misses, one too few is
wrong KV.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.model.errors import Incompatible
from kvstore.system.fingerprints import file_and_splits

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
"""Folders beside the model that engines do not load it from."""


def weights_files(path: Path, *, advice: str) -> list[Path]:
    """Return the files that tell the weights in `path`, a model's folder or one file of weights.

    advice: what to do otherwise. Raises Incompatible, with it, if there are no weights, or more
    files than a model has.
    """
    if path.is_file():
        return file_and_splits(path)
    files = sorted(_files(path, depth=1)) if path.is_dir() else []
    if len(files) > FILES_MAX:
        raise Incompatible(f"{path} has over {FILES_MAX} files: is it a model? {advice}")
    if not any(_is_one_of(file.name, WEIGHTS) for file in files):
        raise Incompatible(f"found no weights in {path}; {advice}")
    return files


def model_path(
    model: str, *, revision: str | None, folder: str | None, advice: str, hub: bool = True
) -> Path:
    """Return where a model lies: a path, or what was downloaded of a name on the Hugging Face hub.

    revision, folder: of the download; None: as by default. hub: the name is one of that hub.
    advice: what to do otherwise. Raises Incompatible, with it, if it is not on this machine.
    """
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        if not hub:
            raise ValueError("it comes from another hub")
        found = snapshot_download(model, revision=revision, cache_dir=folder, local_files_only=True)
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        raise Incompatible(f"cannot find the weights of {model} on this machine; {advice}") from (
            error
        )
    return Path(found)


def _files(folder: Path, depth: int) -> Iterator[Path]:
    for each in folder.iterdir():
        if each.is_dir():
            if depth and not _is_one_of(each.name, OTHER_FOLDERS):
                yield from _files(each, depth - 1)
        elif not _is_one_of(each.name, IRRELEVANT) and each.is_file():
            yield each


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
