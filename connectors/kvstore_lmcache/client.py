"""The native client of LMCache's server: its L2 is a daemon of ours.

LMCache's `native_plugin` adapter calls it from its own threads. Every call starts work on the
client's loop and returns a number at once; `drain_completions` says what has ended.

LMCache takes an adapter for healthy while its own thread lives. So a daemon that is stopped or dead
is noticed here: a lookup waits `lookup_deadline_s` once, and from then on all is a miss at once,
until the daemon has answered a ping in the background.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import kvstore
from kvstore import AsyncClient, Incompatible, InvalidRequest, KVStoreError
from kvstore.client.page_counters import Counters
from kvstore.client.pages import Pages, Place, connect, kind_of
from kvstore_lmcache.compat import check_version
from kvstore_lmcache.completions import Completion, Completions
from kvstore_lmcache.names import Names
from kvstore_lmcache.settings import parse_settings
from kvstore_lmcache.weights import ModelWeights

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 5.0

Work = Callable[[AsyncClient], Coroutine[Any, Any, list[bool]]]


class Client:
    """What LMCache constructs: `Client(**adapter_params)`. See `Settings` for the parameters.

    Raises ConfigError for parameters that it does not know, Incompatible for an LMCache that it is
    not tested with. A daemon that is not there (yet) is no error: all is a miss until it is. So are
    pages of a model whose weights nothing tells; the log says what to set.
    """

    def __init__(self, **adapter_params: object) -> None:
        settings = parse_settings(adapter_params, "adapter_params")
        version = check_version(allow_untested=settings.allow_untested)
        self.counters = Counters()
        self._names = Names(settings, version)
        self._weights = ModelWeights(settings.weights_id)
        self._pages = Pages(settings.limits, self.counters)
        self._in_flight_max = settings.in_flight_max
        self._completions = Completions()
        self._numbers = itertools.count(1)
        self._in_flight = 0
        self._closed = False
        self._changed = threading.Condition()
        self._client = kvstore.Client(
            settings.target or None,
            name=f"lmcache-{version}",
            daemon_uid=settings.daemon_uid,
        )
        self._client.submit(connect)  # the first lookup has no time for it

    # ---- what LMCache calls --------------------------------------------------------------------

    def event_fd(self) -> int:
        """Return the descriptor that is readable when something has ended."""
        return self._completions.fd

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        places = self._places(keys)
        return self._begin(len(keys), lambda remote: self._pages.exist(remote, places))

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        places, pages = self._places(keys), _paired(keys, memoryviews)
        return self._begin(len(keys), lambda remote: self._pages.load(remote, places, pages))

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[memoryview]) -> int:
        places, pages = self._places(keys), _paired(keys, memoryviews)
        return self._begin(len(keys), lambda remote: self._pages.save(remote, places, pages), True)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        places = self._places(keys)
        return self._begin(len(keys), lambda remote: self._pages.delete(remote, places))

    def drain_completions(self) -> list[Completion]:
        """Return (number, succeeded, error, outcome of each key) of each task that has ended."""
        return self._completions.drain()

    def close(self) -> None:
        """End, after what is under way has: LMCache's pages are gone when this returns."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if not self._changed.wait_for(lambda: not self._in_flight, CLOSE_WAIT_S):
                logger.error("close=early in_flight=%d", self._in_flight)
        self._client.close()
        self._completions.close()
        logger.info("closed %s", self.counters.as_dict())

    # ---- inside --------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """False while the daemon is away, and all is a miss."""
        return self._client.available

    def flush(self, wait_s: float = 30.0) -> bool:
        """Wait until all that was saved is on disk; False if it is not after `wait_s`. LMCache
        does not call it. Raises Unavailable."""
        return self._client.admin.flush(wait_s)

    def _places(self, keys: Sequence[str]) -> list[Place | None]:
        models = [key.partition("@")[0] for key in keys]
        weights = {model: self._weights_of(model, models.count(model)) for model in set(models)}
        return [self._place(key, weights[model]) for key, model in zip(keys, models, strict=True)]

    def _weights_of(self, model: str, keys: int) -> str | None:
        """Return what tells the weights of a model that `keys` pages are of; None: nothing does."""
        try:
            found, reason = self._weights.identity(model), "the weights are not known (yet)"
        except Incompatible as error:
            found, reason = None, str(error)
        if found is None:
            self.counters.refuse("unnamed", keys, reason)
        return found

    def _place(self, key: str, weights: str | None) -> Place | None:
        if weights is None:
            return None
        try:
            return self._names.object_place(key, weights)
        except InvalidRequest as error:
            self.counters.refuse("malformed", 1, str(error))
            return None

    def _begin(self, keys: int, work: Work, all_or_nothing: bool = False) -> int:
        """Start work whose outcome is one bool a key; without a daemon it has failed already."""
        number = next(self._numbers)
        with self._changed:
            busy = self._in_flight >= self._in_flight_max
            refused = self._closed or busy or not self._client.available
            self._in_flight += not refused
        if refused:
            why = ("busy", "in_flight_max is reached") if busy else ("away", "the daemon is away")
            self.counters.refuse(why[0], keys, why[1])
            self._completions.add(number, False, why[1], [False] * keys)
            return number

        async def run(remote: AsyncClient) -> None:
            done, error = [False] * keys, "ended early"
            try:
                done, error = await work(remote), ""
            except KVStoreError as failure:
                error = str(failure)
                self.counters.refuse(kind_of(failure), keys, error)
            except Exception as failure:  # LMCache has to hear of every task
                logger.exception("task=failed")
                error = repr(failure)
                self.counters.add("failed", keys)
            finally:
                ok = not error and (all(done) or not all_or_nothing)
                self._ended(number, ok, error, done)

        try:
            self._client.submit(run)
        except InvalidRequest as closed:  # by `close`, which did not wait for this
            self._ended(number, False, str(closed), [False] * keys)
        return number

    def _ended(self, number: int, ok: bool, error: str, done: list[bool]) -> None:
        self._completions.add(number, ok, error, done)
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()


def _paired(keys: Sequence[str], views: Sequence[memoryview]) -> list[memoryview]:
    """Return pages as bytes. Raises InvalidRequest unless there is one for each key."""
    if len(keys) != len(views):
        raise InvalidRequest(f"{len(views)} pages for {len(keys)} keys")
    return [memoryview(view).cast("B") for view in views]
