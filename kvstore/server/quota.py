"""How many calls of one tenant are answered at once, by whatever way they come, and how many of
them begin in one round of the event loop.

Each tenant begins a few in a round, by the bytes of its requests: see `Rounds`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.model.tenant import Principal
from kvstore.system.rounds import Rounds, RoundUser

CALLS_ALL = 1024  # answered at once, of all tenants
CALLS_MIN = 32  # of one tenant, however many there are
ROUND_NBYTES = 16 << 10  # of requests that the tenant of the largest weight begins in a round
CALL_NBYTES = 1 << 10  # what a call costs beside its bytes
RELEASE_FACTOR = 32  # each byte of a release may name a lease, which takes as long as a key
RELEASE_NBYTES_MAX = 10 * (1 << 16) + 64  # as many leases as a call may ever name
RELEASES_WAITING_MAX = 32  # of one tenant, beside those of its call sockets: a link has one
# It makes room: a tenant over its part could not give back what it holds, if it were refused.
_MAKES_ROOM = "Release"


class Quota:
    """The calls of one tenant. calls_max: at once; 0: as many as come."""

    def __init__(self, rounds: Rounds) -> None:
        self.calls_max = 0
        self.running = 0
        self._releases_waiting = 0
        self._turns = RoundUser(rounds, ROUND_NBYTES)

    def share(self, part: float) -> None:
        """Set its part of a round, beside the tenant of the largest weight."""
        self._turns.round_nbytes = max(CALL_NBYTES, int(ROUND_NBYTES * part))

    def place(self, method: str) -> _Place:
        """Return a context for one call. To enter it raises Unavailable if the tenant has its
        part already."""
        return _Place(self, method)

    def begins(self, method: str, nbytes: int) -> bool:
        """Take the turn of a call whose request has `nbytes`; False: it has to await `turn`."""
        return self._turns.begins(cost_of(method, nbytes))

    async def turn(self, method: str, nbytes: int) -> None:
        """Wait for the turn of a call that did not begin. The caller bounds how many wait."""
        await self._turns.turn(cost_of(method, nbytes))

    async def answered(
        self, method: str, data: Any, work: Callable[[Any, Any], Awaitable[Any]], context: Any
    ) -> Any:
        """Return what `work` makes of a call, when its turn has come.

        Raises Unavailable if the tenant has its part already: so many wait at most. A release does
        not count against that part; RELEASES_WAITING_MAX of them wait. Raises InvalidRequest for a
        release that is too large.
        """
        check_nbytes(method, data)
        with _Place(self, method):
            nbytes = len(data) if isinstance(data, bytes) else 0
            if not self.begins(method, nbytes):
                with self._waiting(method):
                    await self.turn(method, nbytes)
            return await work(data, context)

    @contextmanager
    def _waiting(self, method: str) -> Iterator[None]:
        """Count a release that waits for its turn. Raises Unavailable if too many do."""
        if method != _MAKES_ROOM:
            yield
            return
        if self._releases_waiting >= RELEASES_WAITING_MAX:
            raise Unavailable(
                f"{RELEASES_WAITING_MAX} releases of this tenant wait for their turn",
                reason="quota",
            )
        self._releases_waiting += 1
        try:
            yield
        finally:
            self._releases_waiting -= 1


class Quotas:
    """The bounds of all tenants of a daemon, by name."""

    def __init__(self) -> None:
        self._rounds = Rounds()
        self._by_name: dict[str, Quota] = {}

    def of(self, principal: Principal) -> Quota | None:
        """Return the bound of a caller's tenant; None for who has none."""
        return self._by_name.get(principal.tenant)

    def divide(self, weights: Mapping[str, float]) -> Mapping[str, Quota]:
        """Give each tenant its part, by weight. Returns the bounds of all of them."""
        known = self._by_name
        self._by_name = {name: known.get(name) or Quota(self._rounds) for name in weights}
        whole, most = sum(weights.values()), max(weights.values(), default=1.0)
        for name, quota in self._by_name.items():
            quota.calls_max = max(CALLS_MIN, int(CALLS_ALL * weights[name] / whole))
            quota.share(weights[name] / most)
        return self._by_name


def cost_of(method: str, nbytes: int) -> int:
    """Return what a call takes of a round, in bytes. nbytes: of its request."""
    return CALL_NBYTES + nbytes * (RELEASE_FACTOR if method == _MAKES_ROOM else 1)


def check_nbytes(method: str, data: Any) -> None:
    """Raise InvalidRequest for a release that names more leases than any call may: it would take
    memory as soon as it is parsed. data: the request as bytes; anything else passes."""
    if method == _MAKES_ROOM and isinstance(data, bytes) and len(data) > RELEASE_NBYTES_MAX:
        raise InvalidRequest("too many leases in one call: split it")


class _Place:
    """Not a generator: it is entered for each hot call."""

    __slots__ = ("_method", "_quota")

    def __init__(self, quota: Quota, method: str) -> None:
        self._quota = quota
        self._method = method

    def __enter__(self) -> None:
        quota = self._quota
        if 0 < quota.calls_max <= quota.running and self._method != _MAKES_ROOM:
            raise Unavailable(
                f"{quota.calls_max} calls of this tenant are being answered", reason="quota"
            )
        quota.running += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._quota.running -= 1
