"""What one `Llama` has in its context, and which of it a prompt may go on from.

llama-cpp-python knows the tokens in its context as `input_ids[:n_tokens]`. That is not all there is
to know. A handler of images writes KV into the context itself and raises `n_tokens` past what
`eval` has computed: the token ids at those places are old ones. A state that was restored has no
logits, and of layers with a window no more than the window. And KV of answers has other rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import llama_cpp
import numpy as np

from kvstore_llamacpp.context import Context


class Live:
    """The tokens in the context of one `Llama`. For the thread that runs it.

    opaque: whether the context has KV that does not follow from `input_ids`. restored: how many of
    its first tokens came with a state.
    """

    def __init__(
        self,
        llama: llama_cpp.Llama,
        context: Context,
        *,
        block_tokens: int,
        window_tokens: int,
        snapshots: bool,
    ) -> None:
        """window_tokens: 0 for full attention. snapshots: the layout of the state is unknown."""
        self._reference = weakref.ref(llama)
        self._context = context
        self._block_tokens = block_tokens
        self._window_tokens = window_tokens
        self._snapshots = snapshots
        self._whole_only = bool(
            llama_cpp.llama_model_is_recurrent(llama.model)
            or llama_cpp.llama_model_is_hybrid(llama.model)
        )
        self._keeps_windows = bool(llama.context_params.swa_full)
        self._exact = self._known = self._complete_from = self.restored = 0
        self._opaque_from: int | None = None

    @property
    def _llama(self) -> llama_cpp.Llama:
        llama = self._reference()
        assert llama is not None
        return llama

    @property
    def opaque(self) -> bool:
        return self._opaque_from is not None

    def look(self) -> None:
        """Learn what has changed outside: before anything here decides or computes."""
        tokens = self._llama.n_tokens
        if self._opaque_from is None and tokens > self._known:
            self._opaque_from = self._known
        elif self._opaque_from is not None and tokens <= self._opaque_from:
            self._opaque_from = None
        self._known = min(self._known, tokens)
        self._exact = min(self._exact, tokens)
        self.restored = min(self.restored, tokens)
        if tokens == 0:
            self._complete_from = 0

    def computed(self, *, as_prompt: bool) -> None:
        """Learn what `eval` has computed. as_prompt: in blocks, from the start."""
        tokens = self._llama.n_tokens
        self._known = tokens
        if as_prompt and not self.opaque:
            self._exact = tokens // self._block_tokens * self._block_tokens
        if not self._keeps_windows:
            self._complete_from = tokens

    def was_restored(self) -> None:
        """Learn that all there is came with a state."""
        self.restored = self._complete_from = self._llama.n_tokens
        self._opaque_from = None
        self.computed(as_prompt=True)

    def has_window(self, tokens: int) -> bool:
        """Whether the context has what a token after the first so many needs of every layer.

        A recurrent model refuses to be cut elsewhere, and llama-cpp-python asks it.
        """
        if tokens == 0 or self._whole_only:
            return True
        if self._snapshots:
            return tokens >= self._complete_from or self._context.first_position() == 0
        if not self._window_tokens:
            return True
        return 0 <= self._context.first_position() <= max(0, tokens - (self._window_tokens - 1))

    def usable(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt the model need not compute as it is."""
        llama = self._llama
        count = min(llama.n_tokens, len(tokens) - 1)
        if count <= 0:
            return 0
        differ = np.flatnonzero(llama.input_ids[:count] != np.asarray(tokens[:count]))
        same = int(differ[0]) if len(differ) else count
        if self._whole_only:
            return same if same == llama.n_tokens else 0
        return same if self.has_window(same) else 0

    def cut(self, tokens: int) -> None:
        """Have the model forget what is after the first so many tokens; all, if it has to."""
        llama = self._llama
        if tokens < llama.n_tokens:
            possible = self.has_window(tokens) and not self._whole_only
            llama.n_tokens = tokens if possible else 0
            llama._requires_eval = True
            self.look()

    def cut_to_exact(self, tokens: Sequence[int]) -> None:
        """Have the model forget what it has not computed as it would compute this prompt."""
        size = self._block_tokens
        self.cut(min(self.usable(tokens), self._exact) // size * size)

    def cut_opaque(self, tokens: Sequence[int]) -> None:
        """Have the model forget KV that does not follow from tokens, unless this prompt goes on
        from it: the prompt of a handler is the ids at those places, whatever they are."""
        if self._opaque_from is None:
            return
        llama = self._llama
        have = llama.input_ids[: llama.n_tokens].tolist()
        if list(tokens[: len(have)]) != have:
            self.cut(self._opaque_from)
