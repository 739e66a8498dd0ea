"""`generate` loads the longest stored prefix of the prompt, and stores new blocks afterwards.

    prefixes = Prefixes(model, "unix:/run/kvstore/kvstore.sock")
    output = prefixes.generate(input_ids, max_new_tokens=100)  # instead of model.generate

`load` and `save` are its two halves, for a loop of your own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvstore import (
    BlockKey,
    Client,
    InvalidRequest,
    KeyChain,
    KVStoreError,
    Unavailable,
    root_key,
)
from kvstore.client.leased import PROMOTION_SHARE, answer_in, give_back
from kvstore.client.prefill_pace import PrefillPace
from kvstore.client.save_thread import SavesBehind
from kvstore_kernels.device import open_device
from kvstore_transformers.cache import PrefixCache
from kvstore_transformers.coding import CodedCopier, FineParts, namespace_for
from kvstore_transformers.compat import check_release, in_generate
from kvstore_transformers.copying import Copier, copier_for
from kvstore_transformers.direct import DirectMode, DirectStorage
from kvstore_transformers.fingerprint import open_weights
from kvstore_transformers.generating import AfterPrompt, follows_from_tokens
from kvstore_transformers.loading import Load, LoadFailed
from kvstore_transformers.namespace import check_unchanged, find_layout, with_weights
from kvstore_transformers.opening import Fidelity, Record, open_coding, record_beside
from kvstore_transformers.pool import HbmPool, HeldPages
from kvstore_transformers.saving import Job, Saver, saved_of

logger = logging.getLogger(__name__)

Least = Literal["base", "fine"]
KNOWN_SOON_S = 0.05  # a small model is known by then


class Prefixes(SavesBehind):
    """One model's use of one daemon. Not for several threads at once; do not carry across a fork.

    The namespace contains every byte of the weights. They are hashed in the background, at about
    2 GB/s per core. Until then prompts are computed without the store, and nothing is saved: see
    `wait_ready`. Weights must not change while it is open: make a new one afterwards.
    """

    def __init__(
        self,
        model: Any,
        target: str,
        *,
        block_tokens: int = 32,
        weights_id: str = "",
        load_deadline_s: float = 5.0,
        save_deadline_s: float = 1.0,
        save_queue_jobs: int = 8,
        hbm_bytes: int = 0,
        hbm_policy: str = "lru",
        direct_storage: DirectMode = "auto",
        record: Record = "auto",
        fidelity: Fidelity = "exact",
        daemon_uid: int | None = None,
        allow_untested: bool = False,
    ) -> None:
        """Inspect the model and start to hash its weights. The daemon may start later.

        target: "unix:/path/kvstore.sock". block_tokens: tokens per block. weights_id: names the
        weights instead of their hash; same id, same weights.
        load_deadline_s: how long a prompt may wait until its blocks are promoted. save_deadline_s:
        how long a save waits for room. save_queue_jobs: saves that may wait; further saves are
        dropped. hbm_bytes: GPU memory to keep blocks in as well, 0 for none; hbm_policy: its
        eviction policy, "lru" or "hz". direct_storage: whether to read blocks that only the file
        tier has straight from its files: "auto", where GPUDirect Storage works (the engine must see
        the files under the daemon's paths, and be allowed to read them); "always", by any means;
        "never". record: how blocks are stored: "l3", in about 0.72 of their bytes and the same bit
        for bit; "raw", as they are; "auto", l3 on a CPU with native code for it, else raw.
        fidelity: "exact", or "ep": lossy, a base part of a third of their bytes and a fine part of
        a fifth, which tiers may drop. The first block of a prompt stays exact. daemon_uid: the user
        that runs the daemon, if it is neither this one nor root. allow_untested: run with a version
        of transformers that this is not tested with.
        Raises Incompatible with the reason for a model that is not supported, ConfigError for an
        unknown word and for what cannot be done here, InvalidRequest if hbm_bytes do not fit.
        """
        if not target.startswith("unix:"):
            raise InvalidRequest(f"{target!r} is not unix:/path/kvstore.sock: blocks are mapped")
        check_release(allow_untested=allow_untested)
        self.model, self._load_deadline_s = model, load_deadline_s
        self.loads_failed, self._pace = 0, PrefillPace()
        self._layout = find_layout(model)
        record = record_beside(record, direct_storage)
        self._coding = open_coding(self._layout, block_tokens, record, fidelity)
        self._weights = open_weights(model, weights_id)
        self._weights.wait(KNOWN_SOON_S)
        found = self._weights.found
        self._namespace = namespace_for(self._coding, model, self._layout, block_tokens, found)
        self._namespace_id = self._namespace.id
        self._is_known, self._registered = bool(found), False
        sizes = [group.record_nbytes for group in self._namespace.groups]
        self._pool = self._open_pool(hbm_bytes, hbm_policy) if hbm_bytes else None
        self._direct = self._open_direct(max(sizes), direct_storage)
        self._client = Client(target, name="transformers", daemon_uid=daemon_uid)
        self._copier = self._open_copier(max(sizes))
        moving = (self._client, self._copier, self._pool)
        self._saver = Saver(*moving, wait_s=save_deadline_s, jobs_max=save_queue_jobs)
        self._loads = ThreadPoolExecutor(1, "kvstore-load", self._copier.enter_thread)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the weights are hashed. False: not yet, so nothing is loaded or saved."""
        self._weights.wait(timeout_s)
        return self._ready()

    def wait_reached(self, timeout_s: float) -> bool:
        """Wait until the GPU reaches the daemon's memory by itself; the first load or save maps it.
        False: not yet, or it cannot, and the log says why; copies are slower then. True at once on
        a CPU."""
        return self._copier.wait_reached(timeout_s)

    @property
    def hbm_blocks(self) -> int:
        """Blocks kept in GPU memory now."""
        return self._pool.blocks if self._pool is not None else 0

    @property
    def bounced_nbytes(self) -> int:
        """Bytes copied on the slower path, because the GPU cannot access the arena (yet)."""
        return self._copier.bounced_nbytes

    @property
    def direct_storage(self) -> str:
        """How blocks are read straight from files: "gds", "compat" or "host"; "off": not at all."""
        return self._direct.how

    @property
    def direct_nbytes(self) -> int:
        """Bytes read straight from files."""
        return self._direct.read_nbytes

    @property
    def direct_failures(self) -> int:
        """Loads whose files could not be read; the arena delivered the rest of them."""
        return self._direct.failures

    @property
    def saved_uncoded_blocks(self) -> int:
        """Records that were stored raw, because coding made them no smaller; 0 with record="raw",
        which codes none."""
        return self._saver.saved_uncoded_blocks

    @property
    def fine_parts(self) -> FineParts:
        """How many fine parts of lossy blocks loads have used, have not got, and have got wrong."""
        return self._coding.fine_parts if self._coding is not None else FineParts()

    def generate(self, input_ids: Tensor, *, fidelity: Least = "base", **options: Any) -> Any:
        """Return what `model.generate(input_ids, **options)` returns. fidelity: as for `load`.

        Batches, beams, padding, and arguments that make the KV depend on more than token ids are
        computed without the store.
        """
        if not follows_from_tokens(self.model.generation_config, input_ids, options):
            return self.model.generate(input_ids, **options)
        cache = self._start(input_ids, fidelity)
        try:
            output = self.model.generate(input_ids, **in_generate(cache), **options)
            cache.finish()
        except LoadFailed as error:  # in the first forward: no token came of it
            cache = self._failed(cache, error)
            if options.get("streamer") is not None:
                options["streamer"] = AfterPrompt(options["streamer"])
            output = self.model.generate(input_ids, **in_generate(cache), **options)
        sequences = output if isinstance(output, Tensor) else output.sequences
        try:
            self.save(cache, sequences)
        except InvalidRequest:
            logger.exception("save=dropped")  # the answer is there all the same
        return output

    def load(self, input_ids: Tensor, *, fidelity: Least = "base") -> PrefixCache:
        """Return a cache with the longest stored prefix of `input_ids` (1, n), or an empty one.

        fidelity: of lossy blocks, "base" takes the fine parts that there are; "fine" ends the
        prefix at the first block without one, and `save` then stores such blocks anew.

        At least one token remains to compute. Failures of the daemon never raise. Raises
        InvalidRequest for more than one prompt or another word, Incompatible if the model has
        changed.
        """
        cache = self._start(input_ids, fidelity)
        try:
            cache.finish()
        except LoadFailed as error:
            return self._failed(cache, error)
        return cache

    def _start(self, input_ids: Tensor, fidelity: Least) -> PrefixCache:
        """The same, but what is restored need not be there yet: its layers wait for it."""
        check_unchanged(self.model, self._layout)
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise InvalidRequest(f"one prompt (1, n) at a time, not {tuple(input_ids.shape)}")
        if fidelity not in ("base", "fine"):
            raise InvalidRequest(f"fidelity={fidelity!r} of a prompt: base and fine are known")
        cache = self._empty(
            input_ids[0].tolist(), refined=fidelity == "fine" and bool(self._namespace.fine)
        )
        if not self._ready() or self._autocast:
            return cache
        keys = self._keys(cache.prompt[:-1])[: self._client.batch_keys_max]
        if not keys:
            return cache
        if self._pool is not None:
            self._pool.asked(keys)
        if self._restore_pooled(cache, keys, len(keys) - 1):
            return cache
        if self._client.available:
            try:
                self._load(cache, keys)
            except KVStoreError as error:
                cache = self._failed(cache, error)
        if not cache.restored_blocks:
            self._restore_pooled(cache, keys)
        return cache

    def _failed(self, cache: PrefixCache, error: KVStoreError) -> PrefixCache:
        """Count a load that failed; return a cache with nothing in it."""
        self.loads_failed += 1
        logger.info("load=failed error=%r", error)
        return self._empty(cache.prompt, refined=cache.refined)

    def _empty(self, prompt: Sequence[int], *, refined: bool) -> PrefixCache:
        tokens = self._namespace.block_tokens
        return PrefixCache(self.model.config, prompt, tokens, refined=refined)

    def save(self, cache: PrefixCache, sequences: Tensor) -> None:
        """Store the full blocks of `cache` that are not stored yet, in the background.

        sequences: (1, n) or (n,), the prompt and the generated tokens. KV that was computed in
        another precision than the model's is not stored. Raises InvalidRequest if the tokens do
        not start with the prompt of this cache.
        """
        tokens = sequences.flatten().tolist()
        if tokens[: len(cache.prompt)] != cache.prompt:
            raise InvalidRequest("these tokens do not start with the prompt of this cache")
        self._note_pace(cache)
        if not self._ready():
            return
        keys = self._keys(tokens[: cache.get_seq_length()])
        if len(keys) <= cache.stored_blocks and self._pool is None:
            return
        with contextlib.suppress(KVStoreError):
            self._register()  # with a pool, the daemon may never have been asked
        if not cache.exact or not all(g.fits(cache.layers) for g in self._layout.groups):
            return
        kinds = list(zip(self._layout.groups, self._namespace.groups, strict=False))
        groups = [saved_of(cache, *kind, cache.stored_blocks) for kind in kinds]
        pooled = []
        if self._pool is not None:
            whole = [saved_of(cache, *kind, 0) for kind in kinds]
            pooled = [HeldPages(each.begin, each.pages) for each in whole]
        begun = (cache.stored_blocks, groups, self._copier.mark(), pooled)
        self._saver.put(Job(self._namespace_id, keys, *begun, refined=cache.refined))

    def close(self) -> None:
        """Finish the queued saves, for 2 s at most, and end the session."""
        self._saver.close()
        self._loads.shutdown()
        self._weights.close()
        self._copier.close()
        self._direct.close()
        self._client.close()

    # ---- inside ------------------------------------------------------------------------------

    @property
    def _saves(self) -> Saver:
        return self._saver

    @property
    def _daemon(self) -> Client:
        return self._client

    def _ready(self) -> bool:
        """Whether the weights are known; complete the namespace when they are."""
        if not self._is_known and (found := self._weights.found):
            self._namespace = with_weights(self._namespace, found)
            self._namespace_id = self._namespace.id
            self._is_known = True
        return self._is_known

    def _keys(self, tokens: Sequence[int]) -> list[BlockKey]:
        return KeyChain(root_key(self._namespace_id), self._namespace.block_tokens).update(tokens)

    def _register(self) -> None:
        """Have the client name the namespace to a daemon that does not know it. Waits for none."""
        if not self._registered:
            self._client.register(self._namespace, now=False)
            self._registered = True

    def _open_direct(self, record_nbytes_max: int, mode: DirectMode) -> DirectStorage:
        if self._coding is not None and mode == "auto":
            mode = "never"  # coded records come through the arena
        return DirectStorage(self._layout.device, record_nbytes_max, mode)

    def _open_copier(self, record_nbytes_max: int) -> Copier | CodedCopier:
        extents = self._client.extents
        if self._coding is not None:
            return self._coding.copier(extents)
        return copier_for(self._layout.device, record_nbytes_max, extents)

    def _open_pool(self, nbytes: int, policy: str) -> HbmPool:
        device = open_device(self._layout.device)
        kept = replace(self._namespace, groups=self._namespace.groups[: len(self._layout.groups)])
        return HbmPool(device, self._layout, kept, nbytes=nbytes, policy=policy)

    def _restore_pooled(
        self, cache: PrefixCache, keys: Sequence[BlockKey], more_than: int = 0
    ) -> bool:
        """Restore from GPU memory, if it has more blocks than that; it tells no fidelity."""
        if self._pool is None or cache.refined or not (load := self._pool.restore(keys, more_than)):
            return False
        if self._namespace.fidelity != "exact":  # what was loaded is not saved again
            cache.stored_blocks = max(cache.stored_blocks, load.loaded_blocks)
        cache.restore(load.blocks, load.pages, load)
        return True

    def _load(self, cache: PrefixCache, keys: Sequence[BlockKey]) -> None:
        self._register()
        asked_at = time.monotonic()
        size = self._namespace.block_tokens
        recompute_s = self._pace.s_per_token(len(keys) * size / 2) * size
        file_places = self._coding is None and self._direct.is_wanted(
            sum(group.record_nbytes for group in self._namespace.groups), recompute_s
        )
        asked = self._client.submit(
            lambda remote: remote.acquire(
                self._namespace_id,
                keys,
                wait_s=self._load_deadline_s * PROMOTION_SHARE,
                request_id=cache.request_id,
                recompute_s_per_block=recompute_s,
                refined=cache.refined,
                file_places=file_places,
            )
        )
        try:
            grant = answer_in(self._client, asked, self._load_deadline_s)
        except Unavailable:
            give_back(self._client, asked)
            raise
        load = None
        try:
            cache.stored_blocks = grant.hit_blocks
            if grant.hit_blocks and grant.leased:
                if self._restore_pooled(cache, keys, grant.hit_blocks - 1):
                    return
                load = Load(
                    self._client,
                    self._copier,
                    self._direct,
                    self._layout,
                    self._namespace,
                    keys=keys,
                    grant=grant,
                    deadline=asked_at + grant.deadline_s,
                    bytes_deadline=asked_at + self._load_deadline_s,
                    refined=cache.refined,
                )
        finally:
            if load is None and grant.lease_id:
                self._client.submit(lambda remote: remote.release(grant.lease_id))
        if load is not None:
            cache.restore(grant.hit_blocks, load.pages, load)
            self._loads.submit(load.run)

    @property
    def _autocast(self) -> bool:
        """Whether the caller computes in another precision than the model has."""
        return bool(torch.is_autocast_enabled(self._layout.device.type))

    def _note_pace(self, cache: PrefixCache) -> None:
        """Learn how fast the model is, so that nothing is waited for that it computes sooner."""
        self._pace.note(1, cache.pace.s_per_token, cache.pace.depth)
