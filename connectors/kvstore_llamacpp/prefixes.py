"""What of one model's prompts is stored, and how it gets there: lookups, loads and saves.

A model that runs is in one of two ways beyond a prefix: it has computed it, or it was given the
state of it. Only what is longer than what the model has is loaded: a state replaces all there is.
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import llama_cpp

from kvstore import BlockKey, Client, InvalidRequest, KeyChain, root_key
from kvstore.client.prefill_pace import PrefillPace
from kvstore.client.request_hints import HintSender
from kvstore_llamacpp.context import WHOLE, WINDOW_ONLY, Context, StateFailed
from kvstore_llamacpp.hints import NO_HINTS, current_hints
from kvstore_llamacpp.live import Live
from kvstore_llamacpp.loading import Loader, snapshot_nbytes
from kvstore_llamacpp.namespace import ModelFiles, describe, find_layers
from kvstore_llamacpp.runs import runs_of
from kvstore_llamacpp.saving import Buffers, Job, Saver
from kvstore_llamacpp.state import UnknownState, read_state
from kvstore_llamacpp.turn import Kept, Turn

logger = logging.getLogger(__name__)

KNOWN_STEP_S = 0.005
PREFIXES_MAX = 1 << 16  # keys of blocks that this process remembers


@dataclass(slots=True)
class LoadCounts:
    """Prompts that were looked up, resumed and could not be loaded; tokens that were loaded;
    prompts that were computed without the store; hints that were sent, and those that failed."""

    lookups: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    failed: int = 0
    bypassed: int = 0
    hints: int = 0
    hints_failed: int = 0


class Prefixes:
    """The stored prompts of one `Llama`. For the thread that runs it."""

    def __init__(
        self,
        llama: llama_cpp.Llama,
        client: Client,
        *,
        version: str,
        block_tokens: int,
        snapshot_bytes: int,
        exact: bool,
        weights_id: str,
        load_deadline_s: float,
        save_deadline_s: float,
        save_queue_jobs: int,
    ) -> None:
        """Learn the model's state by computing one token, and start to hash its GGUF.

        Raises Incompatible and InvalidRequest.
        """
        self.counts = LoadCounts()
        self._llama = weakref.ref(llama)
        self._context = Context(llama)
        self._vocabulary = llama.n_vocab()
        self._files = ModelFiles(llama, weights_id)
        self._layers = find_layers(llama, self._context, block_tokens, snapshot_bytes)
        self.window_tokens = max(each.window_tokens for each in self._layers)
        self.snapshots = self._layers[0].layout is None
        self._namespace = describe(llama, self._layers, block_tokens, version, exact=exact)
        self._is_known = self._is_registered = self._is_stale = False
        self.exact = exact
        self.live = Live(
            llama,
            self._context,
            block_tokens=block_tokens,
            window_tokens=self.window_tokens,
            snapshots=self.snapshots,
        )
        self._pace = PrefillPace()
        self._met: OrderedDict[BlockKey, None] = OrderedDict()
        self._client = client
        self._buffers = Buffers()
        self.saver = Saver(client, self._buffers, wait_s=save_deadline_s, jobs_max=save_queue_jobs)
        self._loader = Loader(client, self._buffers, self._layers, deadline_s=load_deadline_s)
        self._hints = HintSender(client, self._note_hint)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the GGUF is hashed. False: not yet, so nothing is loaded or saved."""
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            if time.monotonic() >= deadline:
                return False
            time.sleep(KNOWN_STEP_S)
        return True

    def has_some(self, tokens: Sequence[int]) -> bool:
        """Whether a prefix of these tokens is stored. Raises KVStoreError."""
        if not self._usable(tokens):
            return False
        self._register()
        return self._loader.match(self._namespace, self._chain().update(tokens)) > 0

    def new_turn(self, reads_scores: bool = False) -> Turn:
        """Begin to follow a completion. reads_scores: its caller wants the prompt's logits."""
        return Turn(self._chain(), self._namespace.block_tokens, reads_scores, current_hints())

    def resume(self, turn: Turn, tokens: list[int]) -> list[int]:
        """Put what is stored of a prompt into the model; return its tokens, none if nothing was.

        Raises KVStoreError and StateFailed: then the model has nothing, or what it had.
        """
        size = self._namespace.block_tokens
        turn.is_named = self._ready()
        turn.chain, turn.prompt = self._chain(), tokens
        turn.request_id = f"llama-{secrets.token_hex(4)}"
        self._forget_for(turn)
        if self.live.opaque or turn.reads_scores or not self._usable(tokens):
            self.counts.bypassed += 1
            return []
        keys = turn.chain.update(tokens[:-1])
        turn.parted_blocks = self._known_blocks(keys)
        has = self.live.usable(tokens)
        if not keys:
            return []
        self._register()
        self.counts.lookups += 1
        if has >= size:  # what is asked for is brought up for it, so ask with care
            turn.stored_blocks = self._loader.match(self._namespace, keys)
            if turn.stored_blocks * size <= has:
                self._rewind(turn, has)
                return []
        loaded = self._loader.load(
            self._namespace,
            keys,
            request_id=turn.request_id,
            recompute_s_per_block=self._pace.s_per_token((has + len(keys) * size) / 2) * size,
            session_id=turn.hints.session_id,
        )
        if loaded is None:
            return []
        turn.stored_blocks = loaded.tokens // size
        try:
            if loaded.tokens <= has:
                return []
            self._context.restore(loaded.state, tokens[: loaded.tokens])
            self.live.was_restored()
        except StateFailed:
            self._loader.forget(self._namespace, keys[turn.stored_blocks - 1])
            turn.stored_blocks = 0
            raise
        finally:
            for buffer in loaded.buffers:
                self._buffers.give(buffer)
        self._remember(keys[: turn.stored_blocks])
        self.counts.loads += 1
        self.counts.loaded_tokens += loaded.tokens
        logger.info(
            "load=done request=%s tokens=%d of=%d", turn.request_id, loaded.tokens, len(tokens)
        )
        return tokens[: loaded.tokens]

    def keep(self, turn: Turn) -> None:
        """Keep the state, if the model has come to the end of a block."""
        blocks, rest = divmod(self._model.n_tokens, self._namespace.block_tokens)
        if not self.window_tokens or rest or not blocks or not self._is_known or turn.reads_scores:
            return
        if self.live.opaque:
            return
        try:
            flags = WHOLE if self.snapshots else WINDOW_ONLY
            memory = self._context.save(self._buffers.take(), flags)
            window = None if self.snapshots else read_state(memory, (1,))[0]
            if self.snapshots and snapshot_nbytes(memory) > self._layers[0].snapshot_nbytes:
                raise StateFailed(f"a snapshot of {len(memory)} bytes is over snapshot_bytes")
        except (StateFailed, UnknownState) as error:
            logger.warning("keep=failed error=%r", error)
            return
        if (replaced := turn.keep(Kept(blocks, memory, window))) is not None:
            self._buffers.give(replaced.memory)

    def save(self, turn: Turn) -> None:
        """Hand what was computed to the save thread, once. Never raises."""
        if turn.saved or not turn.prompt:
            return
        turn.saved = True
        memory = [each.memory for each in turn.all_kept()]
        try:
            job = self._job(turn, memory)
        except Exception as error:
            # The answer is there all the same.
            logger.warning("save=dropped error=%r", error)
            self.saver.give_up(memory)
            return
        if job is not None:
            self.saver.put(job)
        else:
            for buffer in memory:
                self._buffers.give(buffer)
        if turn.hints is not NO_HINTS and self._is_known:
            self._hints.send(turn.hints, self._namespace, self._keys_of(turn) or [])

    def note_pace(self, tokens: int, seconds: float, depth: float) -> None:
        """Learn how fast the model is, so that nothing is waited for that it computes sooner."""
        self._pace.note(tokens, seconds, depth)

    def close(self) -> None:
        """Finish the queued saves, for 2 s at most."""
        self.saver.close()

    # Inside ---------------------------------------------------------------------------------------

    def _note_hint(self, what: Literal["sent", "failed"]) -> None:
        self.counts.hints += what == "sent"
        self.counts.hints_failed += what == "failed"

    @property
    def _model(self) -> llama_cpp.Llama:
        llama = self._llama()
        if llama is None:
            raise InvalidRequest("the Llama of this cache is gone")
        return llama

    def _ready(self) -> bool:
        """Whether the files are known; complete the namespace when they are."""
        if not self._is_known and (found := self._files.complete(self._namespace)) is not None:
            self._namespace = found
            self._is_known = True
        return self._is_known

    def _usable(self, tokens: Sequence[int]) -> bool:
        """Whether the KV of these tokens may come from the store, and the daemon is there."""
        if not self._is_stale and self._files.changed():
            self._is_stale = True
            logger.error(
                "weights=changed cache=off reason='the GGUF is not the file that was loaded' "
                "do='make a new Llama and a new cache'"
            )
        if self._is_stale or not self._ready():
            return False
        plain = all(0 <= token < self._vocabulary for token in tokens)  # others are no text
        return plain and bool(self._client.available)

    def _register(self) -> None:
        if not self._is_registered:
            self._client.register(self._namespace)  # from here on the client repeats it by itself
            self._is_registered = True

    def _chain(self) -> KeyChain:
        return KeyChain(root_key(self._namespace.id), self._namespace.block_tokens)

    def _forget_for(self, turn: Turn) -> None:
        """Have the model forget what is in its context, and must not be used for this prompt."""
        live = self.live
        live.look()
        live.cut_opaque(turn.prompt)
        if live.opaque:
            return
        if self.exact:
            live.cut_to_exact(turn.prompt)
        if turn.reads_scores and live.restored:
            live.cut(0)  # a state brings no logits

    def _rewind(self, turn: Turn, has: int) -> None:
        """Have the model go on at the end of a block, if this prompt has parted from what is there.

        Others may part there, too, and can only resume where a window was kept. It costs less than
        a block, once.
        """
        size = self._namespace.block_tokens
        blocks = has // size
        parted = self.window_tokens and not self.snapshots and has < self._model.n_tokens
        if parted and turn.stored_blocks < blocks and self.live.has_window(blocks * size):
            self.live.cut(blocks * size)

    def _known_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Return how many blocks of a prefix this process has met before."""
        count = 0
        for key in keys:
            if key not in self._met:
                break
            self._met.move_to_end(key)
            count += 1
        return count

    def _remember(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._met[key] = None
        while len(self._met) > PREFIXES_MAX:
            self._met.popitem(last=False)

    @property
    def _tokens(self) -> list[int]:
        """What the model has computed."""
        llama = self._model
        found: list[int] = llama.input_ids[: llama.n_tokens].tolist()
        return found

    def _keys_of(self, turn: Turn) -> list[BlockKey] | None:
        """Return the keys of what was computed for a turn; None if that is not its prompt's, or
        cannot be stored."""
        tokens = self._tokens
        self.live.look()
        if self.live.opaque or not self._usable(tokens):
            return None
        if not turn.is_named:  # the files have become known since
            turn.chain, turn.is_named = self._chain(), True
        return turn.keys(tokens[: len(turn.prompt)] if self.exact else tokens)

    def _job(self, turn: Turn, memory: list[Any]) -> Job | None:
        """Return what to store of a turn; None for nothing. Adds to `memory` what it takes."""
        size, tokens = self._namespace.block_tokens, self._tokens
        keys = self._keys_of(turn)
        if not keys or turn.reads_scores:
            return None
        self._register()
        states = []
        if not self.snapshots and len(keys) > turn.stored_blocks:
            memory.append(self._context.save(self._buffers.take()))
            states = read_state(memory[-1], (len(self._layers),))
            if states[0].first != 0 or states[0].end != len(tokens):
                raise UnknownState("the state is not that of the tokens that were computed")
        runs = list(runs_of(self._layers, states, turn, len(keys), size))
        if not runs:
            return None
        self._remember(keys)
        return Job(self._namespace.id, keys, runs, memory, turn.hints.session_id)
