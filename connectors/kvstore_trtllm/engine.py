"""What the two halves of one rank share: settings, the client, and what the KV is.

TensorRT-LLM makes a worker on every rank, and on rank 0 a scheduler as well, at the same time in
two threads, from the same arguments. Neither is told of the other.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import wait
from typing import Any

from kvstore import Client
from kvstore.model.block import Namespace
from kvstore.model.errors import KVStoreError
from kvstore.system.fingerprints import Fingerprints
from kvstore_trtllm import compat
from kvstore_trtllm.namespace import (
    Facts,
    check_supported,
    describe,
    open_weights,
    with_weights,
)
from kvstore_trtllm.settings import read_settings

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 2.0

_lock = threading.Lock()
_engines: dict[int, Engine] = {}


class Engine:
    """One rank of one engine. facts: once the pool is registered."""

    def __init__(self, llm_args: Any) -> None:
        """Raise ConfigError or Incompatible, saying what to change, if the cache cannot be used.

        A daemon that is down is no error: the engine starts, and misses until it is back.
        """
        self.llm_args = llm_args  # kept: its id is not another's meanwhile
        self.settings = read_settings()
        self.version = compat.check_release(allow_untested=self.settings.allow_untested)
        check_supported(llm_args)
        self.facts: Facts | None = None
        self._namespace: Namespace | None = None
        self._weights: Fingerprints | None = None
        if compat.rank() == 0:  # it tells the others
            self._weights = open_weights(llm_args, self.settings.weights_id)
        self.client = Client(
            self.settings.target or None,
            name=f"tensorrt-llm {compat.rank()}",
            daemon_uid=self.settings.daemon_uid,
        )
        # In the background; failing is fine.
        self._connecting = self.client.submit(lambda remote: remote.connect())

    @property
    def namespace(self) -> Namespace | None:
        """None until the pool is registered and the weights are known."""
        if self._namespace is None and self.facts is not None and self._weights is not None:
            found = self._weights.found
            if found is not None:
                unnamed = describe(self.facts, str(self.llm_args.model))
                self._namespace = with_weights(unnamed, found)
                logger.info("namespace=%s", self._namespace.id.hex()[:8])
        return self._namespace

    def close(self) -> None:
        """End the client. TensorRT-LLM has no call for it; a process that ends need not."""
        with _lock:
            _engines.pop(id(self.llm_args), None)
        wait([self._connecting], CLOSE_WAIT_S)  # a client that is closed meanwhile leaks its link
        try:
            self.client.close()
        except (KVStoreError, TimeoutError) as error:
            logger.warning("close=incomplete error=%r", error)


def engine_of(llm_args: Any) -> Engine:
    """Return what the halves made from these arguments share."""
    with _lock:
        engine = _engines.get(id(llm_args))
        if engine is None:
            engine = _engines[id(llm_args)] = Engine(llm_args)
        return engine
