"""What a model's weights are: a digest of every byte of its tensors, found in the background.

The tensors as they are in memory count, not the files they came from: what was quantized, merged or
edited since is what computes the KV.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from kvstore import Incompatible

logger = logging.getLogger(__name__)

CHUNK_NBYTES = 16 << 20
THREADS_MAX = 8
CLOSE_WAIT_S = 5.0


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return every tensor that `model` computes with, by name.

    Raises Incompatible for weights that are not in memory.
    """
    weights = {**dict(model.named_buffers()), **model.state_dict()}
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or weight.is_meta:
            raise Incompatible(f"the weights of {name} are not in memory; pass a weights_id")
    return weights


class WeightsFingerprint:
    """The hex SHA-256 over names, shapes, dtypes and bytes of tensors. One thread per core reads
    them; they must not change meanwhile."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = sorted(weights.items())
        self._digests: dict[str, bytes] = {}
        self._left = iter(self._weights)
        self._lock = threading.Lock()
        self._closed = False
        self._known = threading.Event()
        self._found = ""
        self._began = time.monotonic()
        count = min(THREADS_MAX, os.cpu_count() or 1)
        self._threads = [
            threading.Thread(target=self._run, name="kvstore-weights", daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def found(self) -> str:
        """The fingerprint; "" until it is known."""
        return self._found

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is known; False if that took too long."""
        return self._known.wait(timeout_s)

    def close(self) -> None:
        """Stop reading the tensors."""
        self._closed = True
        for thread in self._threads:
            thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                item = next(self._left, None)
            if item is None:
                return
            name, weight = item
            try:
                digest = self._digest(weight)
            except RuntimeError as error:  # the device failed: nothing is known of these weights
                logger.error("weights=unknown cache=off tensor=%s reason=%r", name, str(error))
                return
            with self._lock:
                self._digests[name] = digest
                complete = len(self._digests) == len(self._weights) and not self._closed
            if complete:
                self._finish()

    def _digest(self, weight: Tensor) -> bytes:
        digest = hashlib.sha256()
        flat = weight.detach().reshape(-1)
        step = max(1, CHUNK_NBYTES // max(1, flat.element_size()))
        for begin in range(0, len(flat), step):
            if self._closed:
                break
            chunk = flat[begin : begin + step].contiguous().view(torch.uint8).cpu()
            digest.update(chunk.numpy())
        return digest.digest()

    def _finish(self) -> None:
        whole = hashlib.sha256()
        for name, weight in self._weights:
            whole.update(f"{name}\0{tuple(weight.shape)}\0{weight.dtype}\0".encode())
            whole.update(self._digests[name])
        seconds = time.monotonic() - self._began
        nbytes = sum(weight.nbytes for _, weight in self._weights)
        logger.info("weights=hashed bytes=%d seconds=%.2f", nbytes, seconds)
        self._weights = []
        self._found = whole.hexdigest()
        self._known.set()


class NamedWeights:
    """Weights that the user names: known at once."""

    def __init__(self, weights_id: str) -> None:
        self.found = weights_id

    def wait(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        """Nothing runs."""


Weights = WeightsFingerprint | NamedWeights


def open_weights(model: torch.nn.Module, weights_id: str) -> Weights:
    """Return what tells the weights of `model`. Raises Incompatible."""
    return NamedWeights(weights_id) if weights_id else WeightsFingerprint(weights_of(model))
