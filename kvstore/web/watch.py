"""One look at the daemon a second, for all who watch the same tenant."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from kvstore.model.errors import KVStoreError, Unavailable
from kvstore.model.tenant import Principal, Role
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.web import shapes
from kvstore.web.daemon import Calls

logger = logging.getLogger(__name__)

EVERY_S = 1.0
VIEWERS_MAX = 16
WATCHES_MAX = 4  # tenants at once: each takes one of the daemon's monitors
FRAMES_KEPT = 10  # a viewer that is further behind is told that it missed some
ANSWERED_MAX = 500  # in one frame; of more, the newest
CONVERSATIONS_SHOWN: Final = 100
CONVERSATIONS_EVERY, NAMESPACES_EVERY = 2, 5  # frames
RETRY_S = 2.0
SHARED: Final = Role.OPERATOR  # what a frame tells takes this role
TOLD: Final = ("Monitor", "Conversations", "ListNamespaces")  # by frames, of others' requests


class Watches:
    """All that is watched. Lives on the page's loop."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._watches: dict[tuple[str, bool], Watch] = {}
        self.viewers = 0

    async def frames(
        self, principal: Principal, is_still: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        """Yield a JSON object a line, the first with everything, then what has changed, until the
        caller ends it or `is_still` says no. `place` first."""
        watch = self._watch(principal)
        watch.viewers += 1
        try:
            async for frame in watch.frames():
                if not is_still():
                    return
                yield frame
        finally:
            watch.viewers -= 1
            self.viewers -= 1
            if not watch.viewers:
                self._watches.pop(watch.key, None)
                watch.close()

    def place(self, principal: Principal) -> None:
        """Take a place for one more viewer; `frames` gives it back. Raises Unavailable."""
        if self.viewers >= VIEWERS_MAX:
            raise Unavailable(
                f"{self.viewers} viewers look at this daemon, which is all there may be: close "
                "one, or use `kvstore top`",
                reason="viewers",
            )
        key = _key_of(principal)
        if key not in self._watches and len(self._watches) >= WATCHES_MAX:
            raise Unavailable(
                f"{WATCHES_MAX} tenants are watched already, which is all there may be at once",
                reason="viewers",
            )
        self.viewers += 1

    def _watch(self, principal: Principal) -> Watch:
        key = _key_of(principal)
        if (watch := self._watches.get(key)) is None:
            watch = self._watches[key] = Watch(self._calls, key)
        return watch


def _key_of(principal: Principal) -> tuple[str, bool]:
    """Return what makes two viewers see the same: an admin sees the other tenants' shares."""
    return principal.tenant, principal.role is Role.ADMIN


class Watch:
    """Looks from its making to `close`."""

    def __init__(self, calls: Calls, key: tuple[str, bool]) -> None:
        self.key = key
        self.viewers = 0
        tenant, is_admin = key
        self._principal = Principal(tenant, "page", Role.ADMIN if is_admin else SHARED)
        self._calls = calls
        self._now: dict[str, Any] = {}  # all that there is to say
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=FRAMES_KEPT)
        self._number = 0
        self._since = time.time() - EVERY_S  # of samples
        self._answered: deque[Any] = deque(maxlen=ANSWERED_MAX)
        self._came = 0  # since the last frame
        self._changed = asyncio.Event()
        self._tasks = [
            asyncio.ensure_future(self._look_always()),
            asyncio.ensure_future(self._listen_always()),
        ]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield everything, then each change."""
        while not self._number:
            await self._changed.wait()
        seen = self._number
        yield _line({**self._now, "full": True})
        while True:
            await self._changed.wait()
            due = [(number, frame) for number, frame in self._frames if number > seen]
            if due and due[0][0] > seen + 1:
                yield _line({**self._now, "missed": due[0][0] - seen - 1})
            for seen, frame in due:  # noqa: B007 - the last is where we are
                yield frame

    async def _look_always(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            frame: dict[str, Any] = {"at": time.time(), "error": ""}
            try:
                frame |= await self._look()
            except KVStoreError as error:
                frame["error"] = str(error)
            except Exception as error:  # a defect here must not look like a daemon that is away
                logger.exception("page=not_drawn tenant=%s", self._principal.tenant)
                frame["error"] = (
                    f"the page failed: {type(error).__name__}; the daemon's log says more"
                )
            self._tell(frame)
            await asyncio.sleep(max(EVERY_S / 10, EVERY_S - (loop.time() - began)))

    async def _look(self) -> dict[str, Any]:
        stats = await self._calls.stats(self._principal)
        found: dict[str, Any] = {"status": shapes.status(stats)}
        if "tenants" in stats and self._principal.tenant not in stats["tenants"]:
            return found  # of all of them together there are figures, and nothing else
        asked = pb.HistoryRequest(step_s=1, since=self._since)
        reply = await self._calls.ask(self._principal, "History", asked)
        found["history"] = shapes.history(reply)
        if reply.samples:
            self._since = reply.samples[-1].at
        if self._number % CONVERSATIONS_EVERY == 0:
            limit = pb.ConversationsRequest(limit=CONVERSATIONS_SHOWN)
            reply = await self._calls.ask(self._principal, "Conversations", limit)
            found["conversations"] = shapes.conversations(reply)
        if self._number % NAMESPACES_EVERY == 0:
            reply = await self._calls.ask(
                self._principal, "ListNamespaces", pb.ListNamespacesRequest()
            )
            found["namespaces"] = shapes.namespaces(reply.items)
        return found

    def _tell(self, frame: dict[str, Any]) -> None:
        """Make one frame, once for all."""
        answered = [shapes.answered(each) for each in self._answered]
        skipped = self._came - len(answered)
        self._answered.clear()
        self._came = 0
        self._now |= frame
        self._number += 1
        whole = {**frame, "answered": answered, "not_shown": skipped}
        self._frames.append((self._number, _line(whole)))
        told, self._changed = self._changed, asyncio.Event()
        told.set()

    async def _listen_always(self) -> None:
        """Take requests as they are answered."""
        while True:
            try:
                replies = self._calls.monitor(self._principal, pb.MonitorRequest())
                async with contextlib.aclosing(replies):  # type: ignore[type-var]
                    dropped = 0
                    async for reply in replies:
                        self._answered.extend(reply.answered)
                        self._came += len(reply.answered) + reply.dropped - dropped
                        dropped = reply.dropped
            except KVStoreError as error:
                logger.debug("page=not_listening reason=%r", str(error))
            except Exception:
                logger.exception("page=not_listening")
            await asyncio.sleep(RETRY_S)


def _line(frame: dict[str, Any]) -> bytes:
    return msgspec.json.encode(frame) + b"\n"
