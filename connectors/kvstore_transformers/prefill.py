"""How long the model takes for a long piece of a prompt, on its device, without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch

PREFILL_TOKENS_MIN = 128
"""Shorter pieces are decoding, whose time says nothing of prefill."""

WAITED_FRACTION_MAX = 0.1


class PieceClock:
    """Times the last long piece: from when it reaches the first layer until it reaches the last."""

    def __init__(self) -> None:
        self._tokens = 0
        self._layers = 0
        self._began: Any = None
        self._ended: Any = None
        self._waited_s = 0.0
        self.depth = 0.0
        """How many tokens were before one of that piece, on average."""

    def note(
        self, tokens: int, layer: int, layers: int, device: torch.device, before: int = 0
    ) -> None:
        """Note that a piece has reached a layer of so many. before: tokens that the first layer
        has already."""
        if tokens < PREFILL_TOKENS_MIN or layers < 2:
            return
        if layer == 0:
            self._tokens, self._layers = tokens, layers
            self.depth = before + tokens / 2
            self._began, self._ended, self._waited_s = _now(device), None, 0.0
        elif layer == layers - 1 and self._began is not None and tokens == self._tokens:
            self._ended = _now(device)

    def note_wait(self, seconds: float) -> None:
        """Note that a layer was waited for: that was no computing."""
        self._waited_s += seconds

    @property
    def s_per_token(self) -> float:
        """Seconds per token, of all layers; 0 before the device has come that far, and if it had
        to wait for a good part of the time."""
        if self._ended is None:
            return 0.0
        if isinstance(self._ended, float):
            took = self._ended - self._began
        elif self._ended.query():
            took = self._began.elapsed_time(self._ended) / 1e3
        else:
            return 0.0
        if self._waited_s > WAITED_FRACTION_MAX * took:
            return 0.0
        return float(took * self._layers / (self._layers - 1) / self._tokens)


def _now(device: torch.device) -> Any:
    """Return this moment: the host's, or where a GPU's current stream is."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
