"""The thread with the sockets. Everybody else posts, and never waits for it."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import zmq

from kvstore.events.book import Book, Told
from kvstore.events.replays import Replays
from kvstore.events.streams import BATCHES_PER_S, Stream
from kvstore.events.table import hashes_of
from kvstore.events.wire import Event, payload, sequence_bytes
from kvstore.metrics import Metrics
from kvstore.model.block import KEY_NBYTES, NamespaceId
from kvstore.model.errors import ConfigError

logger = logging.getLogger(__name__)

QUEUE_NBYTES_MAX = 64 << 20  # posted, and not taken yet
UNREAD_BATCHES_MAX = 32  # for a subscriber that does not read: 45 MB at most
REQUEST_NBYTES_MAX = 1024  # what sends more is cut off by ZMQ
SUBSCRIPTIONS_STEP = 256  # taken before anybody else gets a turn
SUBSCRIBED_MAX = 4096  # beginnings of topics that are counted
IDLE_S = 1.0
CLOSE_S = 2.0
BATCH_S = 1 / BATCHES_PER_S


class Tokens(NamedTuple):
    """The tokens of blocks of a namespace. ask: they may have been stored before, so where they are
    is to be seen again."""

    namespace_id: NamespaceId
    model: str
    block_tokens: int
    told: Sequence[Told]
    lora_name: str
    ask: bool

    @property
    def nbytes(self) -> int:
        return sum(len(each.keys) + len(each.tokens) for each in self.told)


class Seen(NamedTuple):
    """Where blocks are now. keys: back to back; places: one byte each; found: see `Book`."""

    namespace_id: NamespaceId
    model: str
    block_tokens: int
    keys: bytes
    places: bytes
    found: bool

    @property
    def nbytes(self) -> int:
        return len(self.keys) + len(self.places)


class Topics(NamedTuple):
    """Which topics of engines there are: (topic, model)."""

    topics: frozenset[tuple[str, str]]

    @property
    def nbytes(self) -> int:
        return 0


Posted = Tokens | Seen | Topics


class Publisher:
    """Binds in its constructor, so that a start can fail. Raises ConfigError.

    first: the first sequence number. used: told of numbers before they are. ask: told, on this
    thread, the keys of blocks whose place is to be seen again. own: the rank of a stream of the
    daemon's own; None: topics of engines.
    """

    def __init__(
        self,
        publish: str,
        replay: str,
        *,
        own: int | None,
        first: int,
        batches_max: int,
        used: Callable[[int], None],
        ask: Callable[[NamespaceId, bytes], None],
        metrics: Metrics,
    ) -> None:
        self.book = Book()
        self._own = own
        self._highest = first - 1
        self._due = 0.0
        self._batches_max = batches_max
        self._used = used
        self._ask = ask
        self._metrics = metrics
        self._queue: deque[Posted] = deque()
        self._queued_nbytes = 0
        self._lock = threading.Lock()
        self._ending = False
        self._replays: Replays | None = None
        self.streams: dict[bytes, Stream] = {}
        self._subscribed: Counter[bytes] = Counter()  # subscriptions, by how their topics begin
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        try:
            self._pub = self._context.socket(zmq.XPUB)
            self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)  # so that a drop is seen: see `_send`
            self._pub.setsockopt(zmq.SNDHWM, UNREAD_BATCHES_MAX)
            self.publish = _bind(self._pub, "events.publish", publish)
            self.replay = ""
            if replay:
                router = self._context.socket(zmq.ROUTER)
                self._replays = Replays(router, self.streams, self._payload, metrics)
                self.replay = _bind(router, "events.replay", replay)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        if own is not None:
            self._open(b"", None)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop. Blocks for a moment."""
        self._ending = True
        self.wake_up()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join(CLOSE_S)

    def post(self, what: Posted, *, wake: bool = False) -> bool:
        """Hand something over; False: too much is waiting. Any thread may call it.

        wake: it is to be looked at now; else with what comes next.
        """
        nbytes = what.nbytes
        with self._lock:
            if self._queued_nbytes + nbytes > QUEUE_NBYTES_MAX:
                return False
            self._queue.append(what)
            self._queued_nbytes += nbytes
            full = self._queued_nbytes > QUEUE_NBYTES_MAX // 8
        if wake or full:
            self.wake_up()
        return True

    @property
    def subscribers(self) -> int:
        """How many subscriptions there are that are told something. Any thread may ask."""
        topics = list(self.streams)
        return sum(
            count
            for begin, count in list(self._subscribed.items())
            if any(topic.startswith(begin) for topic in topics)
        )

    def wake_up(self) -> None:
        """Let what was posted be looked at now."""
        os.eventfd_write(self._wake, 1)

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._wake, self._pub):
            poller.register(each, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays.socket, zmq.POLLIN)
        try:
            while not self._ending:
                ready = dict(poller.poll(int(self._wait_s() * 1000 + 0.5)))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._turn()
        except Exception:
            logger.exception("events=ended")
            self._metrics.task_failed("events")
        finally:
            self._end()

    def _end(self) -> None:
        self._context.destroy(linger=0)
        os.close(self._wake)

    def _wait_s(self) -> float:
        if self._replays is not None and (wait_s := self._replays.wait_s) is not None:
            return wait_s
        if self.book.dirty or any(stream.telling_all for stream in self.streams.values()):
            return max(0.0, self._due - time.monotonic())
        return IDLE_S

    def _turn(self) -> None:
        """Do a bounded amount of everything there is to do."""
        self._take_posted()
        self._metrics.event_blocks.set(self.book.announced)
        self._take_subscriptions()
        self._publish()
        self._count_drops()
        if self._replays is not None:
            self._replays.turn()

    def _take_posted(self) -> None:
        with self._lock:
            posted, self._queue = self._queue, deque()
            self._queued_nbytes = 0
        # Tokens of one namespace that came one after another are learned together.
        for _, group in itertools.groupby(posted, _learned_together):
            several = list(group)
            try:
                self._note(several)
            except Exception:  # a bug must cost one message, not the thread
                logger.exception("events=not_noted kind=%s", type(several[0]).__name__)
                self._metrics.event_drops.labels("failed").inc()

    def _count_drops(self) -> None:
        dropped = self.book.dropped
        for reason, blocks in dropped.items():
            self._metrics.event_drops.labels(reason).inc(blocks)
        dropped.clear()

    def _note(self, posted: Sequence[Posted]) -> None:
        """Note one thing, or tokens that are learned together."""
        first = posted[0]
        if isinstance(first, Topics):
            self._set_topics(first.topics)
            return
        space = self.book.space(first.namespace_id, first.model, first.block_tokens)
        if space is None:
            self._metrics.event_drops.labels("namespaces").inc()
        elif isinstance(first, Seen):
            hashes = hashes_of(first.keys, KEY_NBYTES)
            self.book.changed(space, hashes, np.frombuffer(first.places, np.uint8), first.found)
        else:
            told = [told for each in posted if isinstance(each, Tokens) for told in each.told]
            new = self.book.know(space, told, first.lora_name)
            if first.ask and len(new):
                keys = np.frombuffer(b"".join([each.keys for each in told]), np.uint8)
                self._ask(first.namespace_id, keys.reshape(-1, KEY_NBYTES)[new].tobytes())

    # ---- topics ------------------------------------------------------------------------------

    def _open(self, topic: bytes, model: str | None) -> Stream:
        stream = self.streams[topic] = Stream(
            topic,
            self.book,
            model=model,
            clears=self._own is not None,
            first=self._highest + 1,
            batches_max=self._batches_max,
            now=time.monotonic(),
        )
        return stream

    def _set_topics(self, topics: frozenset[tuple[str, str]]) -> None:
        wanted = {topic.encode(): model for topic, model in topics}
        for topic in self.streams.keys() - wanted.keys():
            del self.streams[topic]
        for topic in wanted.keys() - self.streams.keys():
            stream = self._open(topic, wanted[topic])
            stream.joined = sum(
                n for begin, n in self._subscribed.items() if topic.startswith(begin)
            )
            stream.tell_all(time.monotonic())

    def _take_subscriptions(self) -> None:
        for _ in range(SUBSCRIPTIONS_STEP):
            if not self._pub.poll(0):
                return
            frame = self._pub.recv(zmq.NOBLOCK)
            if frame[:1] not in (b"\x00", b"\x01"):
                continue
            joins, begin = frame[:1] == b"\x01", frame[1:]
            self._count_subscription(begin, joins=joins)
            for topic, stream in self.streams.items():
                if not topic.startswith(begin):
                    continue
                if joins:
                    self._metrics.event_joins.inc()
                    stream.join(time.monotonic())
                else:
                    stream.joined = max(0, stream.joined - 1)

    def _count_subscription(self, begin: bytes, *, joins: bool) -> None:
        counts = self._subscribed
        if joins and (begin in counts or len(counts) < SUBSCRIBED_MAX):
            counts[begin] += 1
        elif not joins and begin in counts:
            counts[begin] -= 1
            if not counts[begin]:
                del counts[begin]

    def _publish(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        steps = self.book.take()
        for stream in self.streams.values():
            batch = stream.batch(steps, now)
            if batch is None:
                continue
            number, events = batch
            self._due = now + BATCH_S
            self._highest = max(self._highest, number)
            self._used(number)
            self._metrics.event_batches.inc()
            for event in events:
                self._metrics.events.labels(type(event).__name__).inc()
            self._send([stream.topic, sequence_bytes(number), self._payload(events)])

    def _payload(self, events: list[Event]) -> bytes:
        return payload(time.time(), events, self._own)

    def _send(self, frames: list[bytes]) -> None:
        """Send to whoever reads. A subscriber that does not gets no more: it sees a gap."""
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._metrics.event_drops.labels("unread").inc()
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            try:
                self._pub.send_multipart(frames, zmq.NOBLOCK)
            finally:
                self._pub.setsockopt(zmq.XPUB_NODROP, 1)


def _learned_together(posted: Posted) -> object:
    """Return what is the same of those that are learned together, and of no others."""
    if isinstance(posted, Tokens):
        return posted.namespace_id, posted.lora_name, posted.ask
    return id(posted)


def _bind(socket: zmq.Socket[bytes], key: str, endpoint: str) -> str:
    """Bind; returns the address that was taken. Raises ConfigError."""
    socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_NBYTES_MAX)
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{key}={endpoint} cannot be had ({error.strerror}): choose another port"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
