"""The state of a context's only sequence, by llama.cpp's own functions."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import llama_cpp
import numpy as np

from kvstore_llamacpp.state import SEQUENCE, Bytes

WHOLE = llama_cpp.LLAMA_STATE_SEQ_FLAGS_NONE
WINDOW_ONLY = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class StateFailed(Exception):
    """llama.cpp could not write or read a state; its log says why."""


class Context:
    """Reads and replaces what one `Llama` has computed. For the thread that runs it."""

    def __init__(self, llama: llama_cpp.Llama) -> None:
        self._reference = weakref.ref(llama)

    @property
    def _llama(self) -> llama_cpp.Llama:
        llama = self._reference()
        if llama is None:
            raise StateFailed("the model is gone")
        return llama

    @property
    def window_tokens(self) -> int:
        """The model's sliding window, 0 if it says none."""
        return max(0, int(llama_cpp.llama_model_n_swa(self._llama.model)))

    def first_position(self) -> int:
        """Return the first position that every layer still has, -1 for none."""
        return int(llama_cpp.llama_memory_seq_pos_min(self._memory, SEQUENCE))

    def save(self, buffer: Bytes | None = None, flags: int = WHOLE) -> Bytes:
        """Return the state, in `buffer` if that is large enough. Raises StateFailed."""
        context = self._open
        nbytes = int(llama_cpp.llama_state_seq_get_size_ext(context, SEQUENCE, flags))
        if nbytes <= 0:
            raise StateFailed("llama.cpp gave no size of the state")
        if buffer is None or len(buffer) < nbytes:
            buffer = np.empty(nbytes, np.uint8)
        wrote = llama_cpp.llama_state_seq_get_data_ext(
            context, _pointer(buffer), nbytes, SEQUENCE, flags
        )
        if wrote != nbytes:
            raise StateFailed(f"llama.cpp wrote {wrote} of {nbytes} bytes of the state")
        return buffer[:nbytes]

    def restore(self, state: Bytes, tokens: list[int]) -> None:
        """Replace everything by a state of these tokens. Raises StateFailed; nothing is left then.

        Nothing was evaluated in this process, so the next token has to be before one is sampled.
        """
        llama, context = self._llama, self._open
        llama.n_tokens = 0
        llama._requires_eval = True
        read = llama_cpp.llama_state_seq_set_data_ext(
            context, _pointer(state), len(state), SEQUENCE, WHOLE
        )
        if read != len(state):
            self.clear()
            raise StateFailed(f"llama.cpp took {read} of {len(state)} bytes of the state")
        llama.input_ids[: len(tokens)] = tokens
        llama.n_tokens = len(tokens)

    def clear(self) -> None:
        """Forget everything that was computed."""
        self._llama.n_tokens = 0
        self._llama._requires_eval = True
        llama_cpp.llama_memory_clear(self._memory, True)

    @property
    def _open(self) -> Any:
        """The context. Raises StateFailed once the model is closed."""
        context = self._llama.ctx
        if context is None:
            raise StateFailed("the model is closed")
        return context

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(self._open)


def _pointer(buffer: Bytes) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
