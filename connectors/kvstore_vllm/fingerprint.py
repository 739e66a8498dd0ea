"""Which weights a model directory holds, from samples of the files: a second, not minutes.

Safetensors are described tensor by tensor (name, shape, dtype, 4 KiB at the start, middle and end),
in order of their names, so that resharding the files changes nothing. Other formats are described
file by file. Names and times of files would differ between machines and not show new weights.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from kvstore.errors import Incompatible

SAMPLE_NBYTES = 4096
HEADER_NBYTES_MAX = 256 << 20
_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".gguf")


def weights_fingerprint(path: Path) -> str:
    """Return the hex SHA-256 of the weights in `path`, a model directory or one weights file.

    Raises Incompatible if there are none, or if a file is malformed.
    """
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    tensors = _chosen([file for file in files if file.suffix == ".safetensors"])
    digest = hashlib.sha256()
    if tensors:
        for record in sorted(item for file in tensors for item in _tensors(file)):
            digest.update(record)
        return digest.hexdigest()
    others = [file for file in files if file.suffix in _OTHER_SUFFIXES]
    if not others:
        raise Incompatible(
            f"found no weights in {path} to fingerprint; name them in kv_connector_extra_config, "
            'e.g. "weights_id": "my-model-v3"'
        )
    for file in others:
        with file.open("rb") as stream:
            nbytes = file.stat().st_size
            digest.update(f"{file.name}\0{nbytes}\0".encode() + _samples(stream, 0, nbytes))
    return digest.hexdigest()


def _chosen(files: Sequence[Path]) -> list[Path]:
    """Return the files an engine would load: those of the index if there is one.

    Some models ship the same weights twice (`consolidated.safetensors` beside the shards).
    """
    folders = {file.parent for file in files}
    indexes = [index for folder in folders for index in folder.glob("*.safetensors.index.json")]
    if not indexes:
        shards = [file for file in files if not file.name.startswith("consolidated")]
        return shards or list(files)
    named = set(json.loads(min(indexes).read_text())["weight_map"].values())
    return [file for file in files if file.name in named]


def _tensors(file: Path) -> Iterator[bytes]:
    """Yield one line of bytes per tensor of a safetensors file, starting with its name."""
    with file.open("rb") as stream:
        head = stream.read(8)
        nbytes = struct.unpack("<Q", head)[0] if len(head) == 8 else HEADER_NBYTES_MAX + 1
        if nbytes > HEADER_NBYTES_MAX:
            raise Incompatible(f"{file} is not a safetensors file")
        try:
            header = json.loads(stream.read(nbytes))
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    what = f"{name}\0{entry['shape']}\0{entry['dtype']}\0".encode()
                    yield what + _samples(stream, 8 + nbytes + begin, end - begin)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Incompatible(f"{file} is not a safetensors file: {error!r}") from error


def _samples(stream: BinaryIO, begin: int, nbytes: int) -> bytes:
    """Return up to 4 KiB each from the start, middle and end of `nbytes` bytes at `begin`."""
    last = max(0, nbytes - SAMPLE_NBYTES)
    samples = b""
    for offset in (0, last // 2, last):
        stream.seek(begin + offset)
        samples += stream.read(min(SAMPLE_NBYTES, nbytes))
    return samples
