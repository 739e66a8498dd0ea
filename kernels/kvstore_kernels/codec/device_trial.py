"""Kernels of the codec are tried before they are used: each kind of values, once per process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvstore_kernels.codec import reference
from kvstore_kernels.codec.coder import BASE_PLANES, FINE_PLANES, Memory, stored_nbytes
from kvstore_kernels.codec.device_coder import DeviceCoder, LauncherOf
from kvstore_kernels.codec.device_passes import Arrived, Staged
from kvstore_kernels.codec.device_tables import WIDTHS
from kvstore_kernels.codec.places import GROUP_CHANNELS, Axis, Place, Shape
from kvstore_kernels.codec.record import HEADER_NBYTES, DType
from kvstore_kernels.packing import PagedKV

logger = logging.getLogger(__name__)

AUTO_ON_A_GPU: Literal["auto", "raw"] = "raw"
"""What `record="auto"` is there. The kernels code what the reference codes, but on an H100 a coded
prefix came back at three quarters of the speed of a raw one: they are for those who ask for them by
name, to store more."""
_HEADS, _TOKENS = 2, 16
_LARGEST = 900.0  # rotated over 1024 channels, it is 28,800: a lossy record takes all of it


def open_coder(
    shape: Shape,
    layers: Sequence[Memory],
    pages: tuple[PagedKV, int],
    places: Sequence[Sequence[Place]] = (),
    *,
    lossy: bool = False,
    base_planes: tuple[int, int] = BASE_PLANES,
) -> DeviceCoder | None:
    """Return a coder, as `DeviceCoder` takes its arguments, for CUDA tensors.

    None, with the reason in the log, where its kernels cannot be had or do not equal the reference:
    records are then stored raw.
    """
    paged = pages[0]
    if not paged.sums or paged.device.type != "cuda":
        logger.warning("codec=off device=%s reason='no kernels'", paged.device)
        return None
    try:
        from kvstore_kernels.cuda.launch import CodecKernels
    except ImportError as error:
        logger.warning("codec=off device=%s reason=%r", paged.device, error)
        return None
    coder = DeviceCoder(
        shape, layers, pages, CodecKernels, places, lossy=lossy, base_planes=base_planes
    )
    return coder if coder_works(paged.device, shape.dtype, coder.width, CodecKernels) else None


@cache
def coder_works(device: torch.device, dtype: DType, width: int, opened: LauncherOf) -> bool:
    """Code scratch tensors by the kernels for `width`; False, with the reason in the log, where
    they cannot be compiled or one byte differs from the reference's."""
    try:
        for channels in (GROUP_CHANNELS * width, GROUP_CHANNELS * width - 48):
            for stretch in (1, 16):
                _try(device, dtype, channels, stretch, opened)
    except Exception as error:
        logger.warning("codec=off device=%s dtype=%s reason=%r", device, dtype.name, error)
        return False
    logger.info("codec=on device=%s dtype=%s", device, dtype.name)
    return True


def _try(
    device: torch.device, dtype: DType, channels: int, stretch: int, opened: LauncherOf
) -> None:
    """Raise ValueError unless the kernels give the reference's records and values.

    stretch: exponents are so many times as far apart, which makes escapes.
    """
    assert channels <= GROUP_CHANNELS * WIDTHS[-1]
    shape = _shape(dtype, channels)
    rng = np.random.default_rng(channels)
    x = rng.normal(0, 1, (len(shape.tiles), _TOKENS, channels))
    x *= np.exp2(rng.normal(0, stretch / 2, (len(shape.tiles), 1, channels)))
    x = np.clip(np.where(rng.random(x.shape) < 0.02, x * 2.0**-stretch, x), -_LARGEST, _LARGEST)
    tiles = [reference.of_float(each.astype(np.float32), dtype) for each in x]
    memory = np.zeros((3, shape.raw_nbytes), np.uint8)
    reference.scatter(shape, tiles, [memory[1]])
    layer = torch.from_numpy(memory).to(device, copy=True)
    layers = [Memory(layer.data_ptr(), layer.stride(0))]
    for lossy in (False, True):
        coder = DeviceCoder(shape, layers, (PagedKV([[layer]]), 0), opened, lossy=lossy)
        staged = torch.empty(coder.room_nbytes(), dtype=torch.uint8, device=device)
        (made,) = coder.encode([1], staged).finish()
        if lossy:
            pair = reference.ep_encode(shape, tiles, BASE_PLANES, FINE_PLANES)
            assert pair is not None
            assert made.fine is not None
            _compare(staged, made.base, pair[0], coder)
            _compare(staged, made.fine, pair[1], coder, made.base.checksum)
            right = reference.ep_decode(shape, *pair)
            arrived = Arrived(*made.base[:2], *made.fine)
        else:
            if dtype is not DType.FP16:
                _compare(staged, made.base, reference.l3_encode(shape, tiles), coder)
            right, arrived = tiles, Arrived(*made.base[:2])
        coder.decode([2], staged, [arrived]).finish()
        for mine, theirs in zip(reference.gather(shape, [_bytes(layer)[2]]), right, strict=True):
            if not np.array_equal(mine, theirs):
                raise ValueError(f"wrong values of {channels} channels, lossy={lossy}")


def _compare(
    staged: Tensor, part: Staged, right: bytes, coder: DeviceCoder, pair: int | None = None
) -> None:
    if pair is None:
        nbytes = stored_nbytes(len(right), coder.shape) if not coder.lossy else len(right)
        if len(right) >= coder.record_nbytes:
            return  # stored raw
    else:
        nbytes, right = len(right), right[:24] + pair.to_bytes(8, "little") + right[32:]
    mine = _bytes(staged)[part.begin : part.begin + part.nbytes].tobytes()
    if mine != right + bytes(nbytes - len(right)):
        raise ValueError(f"wrong records of {coder.shape.text[:HEADER_NBYTES]}")


def _shape(dtype: DType, channels: int) -> Shape:
    def place(kind: str, first: int) -> Place:
        heads = Axis(_HEADS, _TOKENS * channels)
        return Place(kind, heads, Axis(_TOKENS, channels), Axis(channels, 1), first)

    return Shape([[place("K", 0), place("V", _HEADS * _TOKENS * channels)]], dtype)


def _bytes(tensor: Tensor) -> reference.Bytes:
    found: reference.Bytes = tensor.cpu().numpy()
    return found
