"""Real KV: computed by a model from text, or read from a dump of an earlier run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from kvstore.model.checksum import checksum
from kvstore.model.errors import InvalidRequest
from kvstore_bench.codec.texts import TEXTS
from kvstore_kernels.codec.coder import BASE_PLANES, Coder, Memory
from kvstore_kernels.codec.places import Axis, Place, Shape, Unplaced
from kvstore_kernels.codec.record import DType

Say = Callable[[str], None]
Bits = npt.NDArray[np.uint16]
AMX_TOKENS = 32  # a block has a multiple of them
LINE_NBYTES = 64


@dataclass(frozen=True)
class Kv:
    """KV in bfloat16, as bits: a (heads, tokens, channels) for each layer's keys, then values."""

    parts: Sequence[Bits]

    @property
    def tokens(self) -> int:
        return int(self.parts[0].shape[1])


class Blocks:
    """KV cut into blocks, as an engine keeps it: for each layer's keys or values (blocks, heads,
    tokens, channels). It is also what a Coder calls raw."""

    def __init__(self, parts: Sequence[Bits], block_tokens: int) -> None:
        """Raise InvalidRequest for KV of less than one block."""
        self.count = parts[0].shape[1] // block_tokens
        if not self.count:
            raise InvalidRequest(f"KV of {parts[0].shape[1]} tokens has no block of {block_tokens}")
        self.pages = [_blocks(part, self.count, block_tokens) for part in parts]
        self.shape = Shape(
            [
                [
                    Place(
                        "KV"[index % 2],
                        Axis(page.shape[1], block_tokens * page.shape[3]),
                        Axis(block_tokens, page.shape[3]),
                        Axis(page.shape[3], 1),
                    )
                ]
                for index, page in enumerate(self.pages)
            ],
            DType.BF16,
        )
        self.record_nbytes = self.shape.raw_nbytes

    @property
    def nbytes(self) -> int:
        return int(self.count * self.record_nbytes)

    def coder(self, base_planes: tuple[int, int] = BASE_PLANES) -> Coder:
        layers = [Memory(page.ctypes.data, page.strides[0]) for page in self.pages]
        return Coder(self.shape, layers, self, checksum, base_planes=base_planes)

    def packed(self) -> tuple[Coder, list[Bits]]:
        """Return the same blocks in memory of their own, packed as AMX wants them, and their coder.
        Raises Unplaced for blocks that are no multiple of 32 tokens: AMX takes none."""
        pages = [_at_line(page.shape) for page in self.pages]
        places = [[_packed("KV"[index % 2], *page.shape[1:])] for index, page in enumerate(pages)]
        layers = [Memory(page.ctypes.data, page.strides[0]) for page in pages]
        coder = Coder(self.shape, layers, self, checksum, places)
        for block in range(self.count):
            (encoded,) = self.coder().encode_exact([block], self.room())
            coder.decode([block], [encoded.base])
        return coder, pages

    def room(self) -> npt.NDArray[np.uint8]:
        """Return memory that one encoded block fits in."""
        return np.empty(self.coder().room_nbytes(lossy=True), np.uint8)

    def parts(self) -> list[Bits]:
        """Return the blocks as what they were cut from: (heads, tokens, channels) each."""
        return [
            np.ascontiguousarray(page.transpose(1, 0, 2, 3)).reshape(
                page.shape[1], -1, page.shape[3]
            )
            for page in self.pages
        ]

    def read(self, block: int, record: memoryview) -> None:
        np.concatenate(
            [page[block].reshape(-1) for page in self.pages],
            out=np.frombuffer(record, np.uint16),
        )

    def write(self, block: int, record: memoryview) -> None:
        values, at = np.frombuffer(record, np.uint16), 0
        for page in self.pages:
            size = page[block].size
            page[block] = values[at : at + size].reshape(page[block].shape)
            at += size

    def records(self) -> list[bytes]:
        """Return every block as bytes, as it would be stored raw."""
        made = []
        for block in range(self.count):
            record = bytearray(self.record_nbytes)
            self.read(block, memoryview(record))
            made.append(bytes(record))
        return made


def _packed(kind: str, heads: int, tokens: int, channels: int) -> Place:
    """Return where vLLM puts the keys or values of a block on a processor with AMX."""
    if tokens % AMX_TOKENS:
        raise Unplaced(f"blocks of {tokens} tokens: AMX takes a multiple of {AMX_TOKENS}")
    head = Axis(heads, tokens * channels)
    if kind == "K":
        return Place(kind, head, Axis(tokens, 2, 16, 16 * channels), Axis(channels, 1, 2, 32))
    return Place(kind, head, Axis(tokens, 1, 2, 32), Axis(channels, 2, 16, 16 * tokens))


def _blocks(part: Bits, count: int, block_tokens: int) -> Bits:
    heads, _, channels = part.shape
    cut = part[:, : count * block_tokens].reshape(heads, count, block_tokens, channels)
    pages = _at_line((count, heads, block_tokens, channels))
    pages[:] = cut.transpose(1, 0, 2, 3)
    return pages


def _at_line(shape: tuple[int, ...]) -> Bits:
    """Return memory of zeros that begins at a line of 64 bytes, as that of every engine does."""
    room = np.zeros(math.prod(shape) + LINE_NBYTES // 2, np.uint16)
    first = -room.ctypes.data % LINE_NBYTES // 2
    return room[first : first + math.prod(shape)].reshape(shape)


def computed(model: Path, tokens: int, say: Say) -> dict[str, Kv]:
    """Return the KV of each text, of its first `tokens` tokens. Needs torch and transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    from kvstore_transformers.compat import in_forward

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = {}
    for name, text in TEXTS.items():
        say(f"KV of {tokens} tokens of {name}")
        ids = tokenizer(text()[: 12 * tokens], return_tensors="pt").input_ids[:, :tokens]
        cache = DynamicCache()  # of no configuration: layers with a window keep everything, too
        with torch.inference_mode():
            loaded(input_ids=ids, **in_forward(loaded, cache), use_cache=True, logits_to_keep=1)
        found[name] = Kv(bits_of(cache))
    return found


def bits_of(cache: Any) -> list[Bits]:
    """Round the KV of transformers' `cache` to bfloat16, as bits: each layer's keys, values."""
    import torch

    parts = [part for layer in cache.layers for part in (layer.keys[0], layer.values[0])]
    return [part.to(torch.bfloat16).view(torch.uint16).numpy() for part in parts]


def open_kv(model: Path | None, dumped: Path | None, tokens: int, say: Say) -> dict[str, Kv]:
    """Compute KV, or read it. Raises InvalidRequest without either."""
    if model is not None:
        found = computed(model, tokens, say)
        if dumped is not None:
            dump(found, dumped)
        return found
    if dumped is None:
        raise InvalidRequest("real KV is needed: --model PATH computes it, --dump FILE reads it")
    return read_dump(dumped)


def dump(kv: dict[str, Kv], target: Path) -> None:
    """Write KV to a file that `read_dump` reads."""
    arrays = {
        f"{name}/{index:03d}": part
        for name, each in kv.items()
        for index, part in enumerate(each.parts)
    }
    np.savez(target, **arrays)  # type: ignore[arg-type]


def read_dump(source: Path) -> dict[str, Kv]:
    """Read KV from a file of `dump`. Raises InvalidRequest for another."""
    try:
        with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found: dict[str, list[Bits]] = {}
            for key in sorted(arrays.files):
                found.setdefault(key.split("/")[0], []).append(arrays[key])
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise InvalidRequest(f"{source} is no dump of KV: {error}") from error
    for name, parts in found.items():
        if any(part.ndim != 3 or part.dtype != np.uint16 for part in parts) or len(parts) % 2:
            raise InvalidRequest(f"{source}: {name} is not KV in bfloat16")
    return {name: Kv(parts) for name, parts in found.items()}
