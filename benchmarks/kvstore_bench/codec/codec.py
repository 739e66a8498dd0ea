"""`kvstore bench codec`: bytes and speed of every form of a record, beside other codecs.

One thread on one core, real KV, one run: sides alternate, and a figure is the median of the rounds.
GB/s are of the bytes before coding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.model.errors import InvalidRequest
from kvstore_bench.codec.kv import AMX_TOKENS, Bits, Blocks, Kv
from kvstore_bench.codec.peers import peers
from kvstore_kernels import native
from kvstore_kernels.codec import reference
from kvstore_kernels.codec.coder import BASE_PLANES, FINE_PLANES, Coder
from kvstore_kernels.codec.record import Form, Header

Say = Callable[[str], None]
REFERENCE_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """What to measure. tokens of each text; blocks of block_tokens."""

    tokens: int = 2048
    block_tokens: int = 16
    rounds: int = 9
    peers_rounds: int = 3


def run(kv: Mapping[str, Kv], plan: CodecPlan, say: Say) -> dict[str, Any]:
    """Measure. Raises InvalidRequest for KV that is too short, or without the native library."""
    if native.library() is None:
        raise InvalidRequest(f"there is no native library to measure: {native.reason()}")
    blocks = Blocks(_joined(kv), plan.block_tokens)
    say(f"{blocks.count} blocks of {blocks.record_nbytes >> 10} KiB")
    result: dict[str, Any] = {"plan": asdict(plan), "blocks": blocks.count}
    result |= _sizes(blocks)
    speeds = {isa.name: _native(blocks, plan, isa, say) for isa in _isas()}
    best = speeds[native.use_isa().name]
    result["isa"] = native.use_isa().name
    result["native"] = speeds
    result["packed_for_amx"] = _packed(Blocks(_joined(kv), AMX_TOKENS), plan, say)
    result["reference"] = _reference(blocks)
    others = _peers(blocks, plan, say)
    result["peers"] = others
    result["memcpy_gb_s"] = best.pop("memcpy_gb_s")
    for each in speeds.values():
        each.pop("memcpy_gb_s", None)
    result["l3"] |= {name: best[f"l3_{name}"] for name in ("encode_gb_s", "decode_gb_s")}
    result["ep"] = {name: best[f"ep_{name}"] for name in ("encode_gb_s", "decode_gb_s")}
    result["ep"]["decode_base_gb_s"] = best["ep_decode_base_gb_s"]
    zipnn = others.get("zipnn")
    for way in ("encode", "decode"):
        ratio = result["l3"][f"{way}_gb_s"] / zipnn[f"{way}_gb_s"] if zipnn else None
        result["l3"][f"{way}_vs_zipnn"] = ratio
    return result


def _joined(kv: Mapping[str, Kv]) -> Sequence[Bits]:
    """Return the KV of all texts, one behind the other."""
    several = [each.parts for each in kv.values()]
    return [np.concatenate(parts, axis=1) for parts in zip(*several, strict=True)]


def _isas() -> list[native.Isa]:
    return [isa for isa in native.Isa if native.use_isa(isa) is isa]


def _sizes(blocks: Blocks) -> dict[str, Any]:
    coder = blocks.coder()
    ids = range(blocks.count)
    room = np.zeros(blocks.count * coder.room_nbytes(lossy=True), np.uint8)
    exact = [each.base for each in coder.encode_exact(ids, room)]
    raw = sum(Header.parse(each).form is Form.RAW for each in exact)
    sizes = np.array([len(each) for each in exact])
    written = np.array([Header.parse(each).nbytes for each in exact])
    lossy = coder.encode_lossy(ids, [False] * blocks.count, room)
    base = sum(len(each.base) for each in lossy)
    fine = sum(len(each.fine) for each in lossy if each.fine is not None)
    return {
        "l3": {"ratio": blocks.nbytes / int(sizes.sum()), "stored_raw": raw},
        "ep88": {"ratio": blocks.nbytes / (base + fine)},
        "ep54": {"ratio": blocks.nbytes / base},
        "record_size_spread": float(np.percentile(written, 99) / written.mean()),
        "record_bytes": {"raw": blocks.record_nbytes, "l3": float(sizes.mean())},
    }


def _native(blocks: Blocks, plan: CodecPlan, isa: native.Isa, say: Say) -> dict[str, float]:
    say(f"native, {isa.name}")
    native.use_isa(isa)
    coder, ids = blocks.coder(), range(blocks.count)
    room = np.ones(blocks.count * coder.room_nbytes(lossy=True), np.uint8)
    exact = [memoryview(bytes(each.base)) for each in coder.encode_exact(ids, room)]
    lossy = coder.encode_lossy(ids, [False] * blocks.count, room)
    bases = [memoryview(bytes(each.base)) for each in lossy]
    fines = [memoryview(bytes(each.fine)) if each.fine is not None else None for each in lossy]
    before = [page.copy() for page in blocks.pages]
    flat, copy = _flat(blocks), np.ones(blocks.nbytes, np.uint8)
    sides: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(copy, flat),
        "l3_encode": lambda: coder.encode_exact(ids, room),
        "ep_encode": lambda: coder.encode_lossy(ids, [False] * blocks.count, room),
        "ep_decode": lambda: coder.decode(ids, bases, fines),
        "ep_decode_base": lambda: coder.decode(ids, bases),
        "l3_decode": lambda: coder.decode(ids, exact),  # last: the next round encodes what it left
    }
    seconds = _alternate(sides, plan.rounds)
    if not _came_back(coder, exact, blocks.pages, before):
        raise InvalidRequest("the blocks came back wrong: this is a bug")
    return {f"{name}_gb_s": blocks.nbytes / each / 1e9 for name, each in seconds.items()}


def _packed(blocks: Blocks, plan: CodecPlan, say: Say) -> dict[str, float]:
    """Measure the same values in blocks of AMX_TOKENS, packed as vLLM packs them for AMX."""
    say("packed for AMX")
    coder, pages = blocks.packed()
    ids = range(blocks.count)
    room = np.ones(blocks.count * coder.room_nbytes(lossy=True), np.uint8)
    exact = [memoryview(bytes(each.base)) for each in coder.encode_exact(ids, room)]
    bases = [
        memoryview(bytes(each.base))
        for each in coder.encode_lossy(ids, [False] * blocks.count, room)
    ]
    before = [page.copy() for page in pages]
    sides: dict[str, Callable[[], object]] = {
        "l3_encode": lambda: coder.encode_exact(ids, room),
        "ep_encode": lambda: coder.encode_lossy(ids, [False] * blocks.count, room),
        "ep_decode_base": lambda: coder.decode(ids, bases),
        "l3_decode": lambda: coder.decode(ids, exact),
    }
    seconds = _alternate(sides, plan.rounds)
    if not _came_back(coder, exact, pages, before):
        raise InvalidRequest("the packed blocks came back wrong: this is a bug")
    return {f"{name}_gb_s": blocks.nbytes / each / 1e9 for name, each in seconds.items()}


def _came_back(
    coder: Coder, exact: Sequence[memoryview], pages: Sequence[Bits], were: Sequence[Bits]
) -> bool:
    """Decode exact records over other bits; say whether the pages are what they were."""
    for page, was in zip(pages, were, strict=True):
        np.invert(was, out=page)
    coder.decode(range(len(exact)), exact)
    return all(map(np.array_equal, pages, were))


def _flat(blocks: Blocks) -> npt.NDArray[np.uint8]:
    return np.concatenate([page.reshape(-1).view(np.uint8) for page in blocks.pages])


def _reference(blocks: Blocks) -> dict[str, float]:
    """Time numpy, on a few blocks: it is what the others have to equal, and slow."""
    count = min(REFERENCE_BLOCKS, blocks.count)
    shape = blocks.shape
    tiles = [reference.gather(shape, _memory(blocks, block)) for block in range(count)]
    exact = [reference.l3_encode(shape, each) for each in tiles]
    lossy = [reference.ep_encode(shape, each, BASE_PLANES, FINE_PLANES) for each in tiles]
    sides: dict[str, Callable[[], object]] = {
        "l3_encode": lambda: [reference.l3_encode(shape, each) for each in tiles],
        "l3_decode": lambda: [reference.l3_decode(shape, each) for each in exact],
        "ep_encode": lambda: [
            reference.ep_encode(shape, each, BASE_PLANES, FINE_PLANES) for each in tiles
        ],
        "ep_decode": lambda: [reference.ep_decode(shape, *each) for each in lossy if each],
    }
    nbytes = count * blocks.record_nbytes
    return {f"{n}_gb_s": nbytes / each / 1e9 for n, each in _alternate(sides, 2).items()}


def _memory(blocks: Blocks, block: int) -> list[npt.NDArray[np.uint8]]:
    return [page[block].reshape(-1).view(np.uint8) for page in blocks.pages]


def _peers(blocks: Blocks, plan: CodecPlan, say: Say) -> dict[str, dict[str, float]]:
    records = blocks.records()
    found: dict[str, dict[str, float]] = {}
    for name, peer in peers(records).items():
        say(name)
        coded = [bytes(peer.encode(record)) for record in records]
        if bytes(peer.decode(coded[0])) != records[0]:
            raise InvalidRequest(f"{name} does not return what it was given")
        sides: dict[str, Callable[[], object]] = {
            "encode": lambda peer=peer: [peer.encode(record) for record in records],  # type: ignore[misc]
            "decode": lambda peer=peer, coded=coded: [peer.decode(each) for each in coded],  # type: ignore[misc]
        }
        seconds = _alternate(sides, plan.peers_rounds)
        found[name] = {"ratio": blocks.nbytes / sum(map(len, coded))}
        found[name] |= {f"{n}_gb_s": blocks.nbytes / s / 1e9 for n, s in seconds.items()}
    return found


def _alternate(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each side, taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):  # the first one warms up
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - began)
    return {name: median(each[1:]) for name, each in seconds.items()}
