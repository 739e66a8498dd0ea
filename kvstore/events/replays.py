"""Replay: batches that a subscriber has missed, sent to it alone, as fast as it takes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import zmq

from kvstore.events.streams import Numbered, Stream
from kvstore.events.wire import END, Event, sequence_bytes, sequence_of
from kvstore.metrics import Metrics
from kvstore.model.errors import InvalidRequest

REPLAYS_MAX = 8
REPLAY_STEP = 64  # batches, before anybody else gets a turn
REPLAY_STILL_S = 10.0  # for whoever asked for a replay to take the next batch
WAIT_S = 0.01  # to look again whether it takes more
END_FRAMES = [b"", b"", END, b""]


class _Replay:
    """One answer to a request, sent as fast as its asker takes it. streams: a topic, and what of it
    is to be sent. waiting: frames that did not fit. ended: the end of the answer was made."""

    def __init__(
        self, asker: bytes, streams: list[tuple[bytes, Iterator[Numbered]]], now: float
    ) -> None:
        self.asker = asker
        self.batches = ((topic, batch) for topic, batches in streams for batch in batches)
        self.waiting: list[bytes] | None = None
        self.ended = self.over = False
        self.moved_at = now


class Replays:
    """The socket that is asked for them. On the publisher's thread.

    payload: makes a batch of events.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        streams: Mapping[bytes, Stream],
        payload: Callable[[list[Event]], bytes],
        metrics: Metrics,
    ) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that it is seen whether it takes more
        socket.setsockopt(zmq.SNDHWM, REPLAY_STEP)
        socket.setsockopt(zmq.RCVHWM, REPLAYS_MAX)
        self.socket = socket
        self._streams = streams
        self._payload = payload
        self._metrics = metrics
        self._running: list[_Replay] = []

    @property
    def wait_s(self) -> float | None:
        """How long until there may be something to do; None: until somebody asks."""
        if not self._running:
            return None
        return WAIT_S if all(each.waiting for each in self._running) else 0.0

    def turn(self) -> None:
        """Take requests, and send a bounded part of what was asked for."""
        self._take_requests()
        self._send()

    def _take_requests(self) -> None:
        for _ in range(REPLAYS_MAX):
            if not self.socket.poll(0):
                return
            asker, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            body = [frame for frame in frames if frame]
            try:
                if not 1 <= len(body) <= 2:
                    raise InvalidRequest("a replay is asked for by a sequence number")
                start = sequence_of(body[-1])
            except InvalidRequest:
                self._count("refused")
                self._answer(asker, END_FRAMES)
                continue
            self._begin(asker, start, body[0] if len(body) == 2 else None)

    def _begin(self, asker: bytes, start: int, topic: bytes | None) -> None:
        wanted: list[tuple[bytes, Iterator[Numbered]]] = []
        busy = len(self._running) >= REPLAYS_MAX
        for stream in self._streams.values():
            if topic is None or stream.topic == topic:
                how, batches = stream.replay(start)
                self._count("busy" if busy else how)
                wanted.append((stream.topic, batches))
        if busy or not wanted:
            self._answer(asker, END_FRAMES)
        else:
            self._running.append(_Replay(asker, wanted, time.monotonic()))

    def _count(self, how: str) -> None:
        self._metrics.event_replays.labels(how).inc()

    def _send(self) -> None:
        now = time.monotonic()
        for replay in self._running:
            for _ in range(REPLAY_STEP):
                if not self._send_next(replay, now):
                    break
            if now - replay.moved_at > REPLAY_STILL_S:
                self._count("unread")
                replay.over = True
        self._running = [replay for replay in self._running if not replay.over]

    def _send_next(self, replay: _Replay, now: float) -> bool:
        """Send a batch, or the end; False: there is no more, or its asker takes no more now."""
        if replay.over:
            return False
        if replay.waiting is None:
            found = next(replay.batches, None)
            if found is None:
                replay.waiting, replay.ended = END_FRAMES, True
            else:
                topic, (number, events) = found
                replay.waiting = [b"", topic, sequence_bytes(number), self._payload(events)]
        if not self._answer(replay.asker, replay.waiting, replay):
            return False
        replay.waiting, replay.moved_at, replay.over = None, now, replay.ended
        return True

    def _answer(self, asker: bytes, frames: list[bytes], replay: _Replay | None = None) -> bool:
        try:
            self.socket.send_multipart([asker, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # it is gone
            if replay is not None:
                replay.over = True
            return False
        return True
