"""A prompt cache for `llama_cpp.Llama` that outlives the process: `llama.set_cache(cache)`.

    llama = Llama(model_path="model.gguf", n_ctx=8192)
    llama.set_cache(KVStoreCache(llama, "unix:/run/kvstore/kvstore.sock"))

llama-cpp-python asks its cache for a `LlamaState` before it computes a prompt, and hands one over
when the answer is complete. Such a state holds logits and whole buffers, and takes a good part of a
second either way. So this cache puts the state of the sequence into the context itself, and returns
a `LlamaState` that says no more than which tokens are there: the caller finds them there already.
In the other direction it reads the state of the sequence when it is handed one of these.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import llama_cpp
import numpy as np

from kvstore import Client, InvalidRequest, KVStoreError
from kvstore.client.save_thread import SavesBehind
from kvstore.client.target import default_target
from kvstore_llamacpp.compat import check_version
from kvstore_llamacpp.context import Context, StateFailed
from kvstore_llamacpp.hints import hints_for
from kvstore_llamacpp.prefixes import LoadCounts, Prefixes
from kvstore_llamacpp.saving import Saver
from kvstore_llamacpp.turn import Turn

logger = logging.getLogger(__name__)

KNOWN_SOON_S = 0.05  # a small file is hashed by then
PREFILL_TOKENS_MIN = 128  # fewer are decoding, whose time says nothing of prefill
_HOOKED = ("_create_completion", "eval", "reset", "save_state")


class KVStoreCache(SavesBehind, llama_cpp.BaseLlamaCache):  # type: ignore[misc] # llama_cpp is not checked
    """The prompts of one `Llama`, kept by one daemon. For the thread that runs the model.

    It replaces four methods of that `Llama` object, which call the original ones: `close` puts
    them back. Failures of the daemon are misses, and never raise.
    """

    def __init__(
        self,
        llama: llama_cpp.Llama,
        target: str | None = None,
        *,
        block_tokens: int = 32,
        snapshot_bytes: int = 32 << 20,
        exact: bool = False,
        weights_id: str = "",
        load_deadline_s: float = 2.0,
        save_deadline_s: float = 1.0,
        save_queue_jobs: int = 4,
        daemon_uid: int | None = None,
        allow_untested: bool = False,
    ) -> None:
        """Learn the model's state by computing one token, and start to hash its GGUF.

        target: "unix:/path/kvstore.sock"; None: as the `kvstore` command finds it; the daemon may
        start later. block_tokens: a sliding window has to be a multiple of it.
        snapshot_bytes: the most of a state whose layout is not known; the daemon's extents and
        segments have to be larger. exact: answers are, bit by bit, those of a model that computes
        each prompt anew: KV of answers, which has other rounding, is not used again.
        weights_id: names the weights instead of their hash; same id, same weights.
        load_deadline_s: how long a prompt may wait for what is stored. save_deadline_s: a save, for
        room. save_queue_jobs: answers that may wait to be saved; more are dropped. daemon_uid: the
        user that runs the daemon, if neither this one nor root. allow_untested: try other versions.
        Raises Incompatible for such a version, and for a state that cannot be read; InvalidRequest
        for a `Llama` that has such a cache, and a target that is not on this host.
        """
        super().__init__(capacity_bytes=0)
        target = target or default_target(daemon_uid)
        if not target.startswith("unix:"):
            raise InvalidRequest(f"{target!r} is not unix:/path/kvstore.sock: blocks are mapped")
        if any(name in vars(llama) for name in _HOOKED):
            raise InvalidRequest("this Llama has a cache of kvstore already: close that one first")
        version = check_version(llama_cpp, allow_untested=allow_untested)
        self._llama = weakref.ref(llama)
        self._context = Context(llama)
        self._client = _client(target, load_deadline_s, daemon_uid)
        try:
            self._prefixes = Prefixes(
                llama,
                self._client,
                version=version,
                block_tokens=block_tokens,
                snapshot_bytes=snapshot_bytes,
                exact=exact,
                weights_id=weights_id,
                load_deadline_s=load_deadline_s,
                save_deadline_s=save_deadline_s,
                save_queue_jobs=save_queue_jobs,
            )
        except BaseException:
            self._client.close()
            raise
        self._turn: Turn | None = None
        self._inside, self.request_id = False, ""
        for name in _HOOKED:
            vars(llama)[name] = getattr(self, f"_{name.lstrip('_')}")
        self.wait_ready(KNOWN_SOON_S)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the GGUF is hashed. False: not yet, so nothing is loaded or saved."""
        return self._prefixes.wait_ready(timeout_s)

    @property
    def counts(self) -> LoadCounts:
        """What became of the prompts so far."""
        return self._prefixes.counts

    @property
    def cache_size(self) -> int:
        """Bytes of the records that this object has stored."""
        return self._prefixes.saver.saved_nbytes

    @property
    def stores_snapshots(self) -> bool:
        """Whether the layout of the model's state is unknown, so that it is stored as a whole."""
        return self._prefixes.snapshots

    def hints(self, **fields: Any) -> AbstractContextManager[None]:
        """Return a context; what is completed in it has these hints: `session_id`, `end_session`,
        `expect_s`, `pin_s`, `pin_bytes` and `demote`, as in a request to vLLM.

        They are sent when a completion has ended. A stream has to begin in the context. Entering it
        raises InvalidRequest for hints that are not known or not possible.
        """
        return hints_for(fields)

    def close(self) -> None:
        """Finish the queued saves, for 2 s at most, end the session, leave the `Llama` alone."""
        if (llama := self._llama()) is not None:
            for name in _HOOKED:
                vars(llama).pop(name, None)
            if llama.cache is self:
                llama.set_cache(None)
        self._prefixes.close()
        self._client.close()

    # What llama-cpp-python asks of its cache ------------------------------------------------------

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether a prefix of these tokens is stored."""
        try:
            return self._prefixes.has_some(list(key))
        except KVStoreError as error:
            logger.info("match=failed error=%r", error)
            return False

    def __getitem__(self, key: Sequence[int]) -> llama_cpp.LlamaState:
        """Put the longest stored prefix of these tokens into the model, if that is more than it
        has; return which tokens those are. Raises KeyError otherwise."""
        if self._turn is None or self._turn.prompt:
            self._end_turn()
            self._turn = self._prefixes.new_turn()
        try:
            tokens = self._prefixes.resume(self._turn, list(key))
        except Exception as error:
            # Whatever it is, the prompt can be computed.
            self.counts.failed += 1
            if isinstance(error, InvalidRequest):  # will not get better by itself
                logger.error("load=failed error=%r", error)
            elif isinstance(error, KVStoreError | StateFailed):
                logger.info("load=failed error=%r", error)
            else:
                logger.exception("load=failed")
            tokens = []
        self.request_id = self._turn.request_id
        if not tokens:
            raise KeyError("nothing is stored that the model does not have")
        return _tokens_alone(tokens, self._model)

    def __setitem__(self, key: Sequence[int], value: llama_cpp.LlamaState) -> None:
        """Store what the model has computed, in the background."""
        if self._turn is not None:
            self._prefixes.save(self._turn)

    # What the model does, seen from inside --------------------------------------------------------

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As the original, which calls this cache at its start and its end."""
        llama = self._model
        steps = type(llama)._create_completion(llama, *args, **kwargs)
        if llama.cache is not self:
            yield from steps
            return
        reads_scores = bool(kwargs.get("echo")) and kwargs.get("logprobs") is not None
        yield from self._followed(steps, reads_scores)

    def _followed(self, steps: Any, reads_scores: bool) -> Iterator[Any]:
        """Yield the steps of a completion; save what an abandoned one has computed."""
        self._end_turn()
        self._turn = turn = self._prefixes.new_turn(reads_scores)
        try:
            while True:
                self._inside = True
                try:
                    step = next(steps)
                except StopIteration:
                    return
                finally:
                    self._inside = False
                yield step
        finally:
            steps.close()
            if self._turn is turn:
                self._end_turn()

    def _end_turn(self) -> None:
        """Save what a completion has computed that is still open: what comes next replaces it."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._prefixes.save(turn)

    def _used_by_another(self) -> None:
        """End a completion that waits for its reader, if something else now uses the model."""
        if not self._inside and self._turn is not None and self._turn.prompt_seen:
            self._end_turn()

    def _save_state(self) -> llama_cpp.LlamaState:
        """As the original; but what goes to this cache next, says no more than its tokens."""
        llama = self._model
        if self._inside and llama.cache is self:
            return _tokens_alone(llama.input_ids[: llama.n_tokens].tolist(), llama)
        return type(llama).save_state(llama)

    def _reset(self) -> None:
        """As the original; what is in the context now is saved before."""
        llama = self._model
        self._used_by_another()
        type(llama).reset(llama)
        self._prefixes.live.look()

    def _eval(self, tokens: Sequence[int]) -> None:
        """As the original; keeps states on the way, where a later prompt may resume."""
        llama = self._model
        self._used_by_another()
        self._prefixes.live.look()
        tokens = self._with_window(llama, tokens)
        turn = self._turn if self._inside and llama.cache is self else None
        if turn is None:
            self._compute(llama, tokens)
            return
        began = time.monotonic()
        stops = self._prefixes.window_tokens > 0
        if not turn.prompt_seen and llama.n_tokens > turn.stored_blocks * turn.block_tokens:
            self._prefixes.keep(turn)  # where it parted from what was computed before
        for begin, end in turn.pieces(llama.n_tokens, len(tokens), stops=stops):
            self._compute(llama, tokens[begin:end], as_prompt=not turn.prompt_seen)
            if not turn.prompt_seen or (len(tokens) == 1 and not self._prefixes.exact):
                self._prefixes.keep(turn)
        turn.prompt_seen = True
        if len(tokens) >= PREFILL_TOKENS_MIN:
            depth = llama.n_tokens - len(tokens) / 2
            self._prefixes.note_pace(len(tokens), time.monotonic() - began, depth)

    def _compute(
        self, llama: llama_cpp.Llama, tokens: Sequence[int], *, as_prompt: bool = False
    ) -> None:
        try:
            type(llama).eval(llama, tokens)
        finally:
            self._prefixes.live.computed(as_prompt=as_prompt)

    def _with_window(self, llama: llama_cpp.Llama, tokens: Sequence[int]) -> Sequence[int]:
        """Return what to compute next: everything, if the window before it is not there any more.

        llama-cpp-python cuts a sequence wherever a prompt parts from it, and does not ask whether
        layers with a window still have what is before that. KV that does not follow from tokens
        cannot be computed anew: that is left to llama-cpp-python.
        """
        done = llama.n_tokens
        if self._prefixes.live.opaque or self._prefixes.live.has_window(done):
            return tokens
        logger.info("window=gone recomputed_tokens=%d", done)
        tokens = [*llama.input_ids[:done].tolist(), *tokens]
        self._context.clear()
        self._prefixes.live.look()
        return tokens

    @property
    def _saves(self) -> Saver:
        return self._prefixes.saver

    @property
    def _daemon(self) -> Client:
        return self._client

    @property
    def _model(self) -> llama_cpp.Llama:
        llama = self._llama()
        if llama is None:
            raise InvalidRequest("the Llama of this cache is gone")
        return llama


def _client(target: str, deadline_s: float, daemon_uid: int | None) -> Client:
    """Return a client none of whose calls takes longer than a load may."""
    return Client(
        target,
        name="llama.cpp",
        timeout_s=deadline_s,
        connect_timeout_s=deadline_s,
        daemon_uid=daemon_uid,
    )


def _tokens_alone(tokens: Sequence[int], llama: llama_cpp.Llama) -> llama_cpp.LlamaState:
    """Return a state that says which tokens a model has computed, and holds none of it."""
    return llama_cpp.LlamaState(
        input_ids=np.asarray(tokens, dtype=np.intc),
        scores=np.empty((0, llama.n_vocab()), dtype=np.single),
        n_tokens=len(tokens),
        llama_state=b"",
        llama_state_size=0,
        seed=llama._seed,
    )
