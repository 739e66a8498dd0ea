"""What each host of a fleet may serve. `Truth` is common to all, a `HostModel` one host's share.

A version of a block is put on one host, and arrives on others: each arrival is an event. A host may
serve what arrived on it after its own last delete of the key. Nobody may serve what was put before
a delete for the whole fleet that was answered. A host that was no member then may, but only as long
as it was not able to read in etcd what was deleted, and no other host may have it from there.
Exempt, wherever it goes, is what was in the bucket, or on a host with a bucket, while a host with a
bucket did not know of the delete; and what etcd has lost, on hosts that had not heard of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.model.block import BlockKey
from tests.sim.model import Item, Model, Space, Version, Violation

BUCKET = "bucket"


@dataclass(slots=True, eq=False)
class Order:
    """A delete for the whole fleet. begun: when it was asked for. listed: the members that the
    host that was asked told of it, once etcd kept it. reached: the hosts that have carried it out,
    durably. lost: etcd does not keep it any more."""

    keys: frozenset[BlockKey]
    begun: int
    listed: frozenset[str] = frozenset()
    reached: set[str] = field(default_factory=set)
    exempt: set[int] = field(default_factory=set)  # checksums
    answered_at: float = math.inf
    lost: bool = False

    def has_told(self, host: str) -> bool:
        return host in self.reached or host in self.listed


class Truth:
    """with_bucket: the hosts that share the bucket. is_behind: says whether a host need not know
    yet of a delete that was answered at a moment. is_blind: whether it could not read any delete
    since its start, and borrows all the same."""

    def __init__(
        self, space: Space, with_bucket: Collection[str], now: Callable[[], float]
    ) -> None:
        self.is_behind: Callable[[str, float], bool] = lambda host, answered_at: False
        self.is_blind: Callable[[str], bool] = lambda host: False
        self._now = now
        self.space = space
        self.versions: dict[int, Version] = {}
        self.published: dict[int, int] = {}
        self.arrived: defaultdict[str, dict[int, int]] = defaultdict(dict)  # host -> checksum
        self.answered = 0
        self._with_bucket = with_bucket
        self._event = 0
        self._open: set[Order] = set()
        self._deleted: defaultdict[BlockKey, list[Order]] = defaultdict(list)
        self._of_key: defaultdict[BlockKey, list[int]] = defaultdict(list)

    def next_event(self) -> int:
        self._event += 1
        return self._event

    def publish(self, versions: Iterable[Version], event: int) -> None:
        for version in versions:
            self.published[version.checksum] = event
            self._of_key[version.item.key].append(version.checksum)

    def begin(self, keys: Collection[BlockKey]) -> Order:
        order = Order(frozenset(keys), self.next_event())
        self._open.add(order)
        return order

    def carried_out(self, host: str, keys: Collection[BlockKey], begun: int) -> None:
        """Note that a host has deleted keys durably, in a delete that began there at an event."""
        answered = {order for key in keys for order in self._deleted[key]}
        for order in self._open | answered:
            if begun > order.begun and order.keys <= set(keys):
                order.reached.add(host)

    def failed(self, order: Order) -> None:
        self._open.discard(order)

    def finish(self, order: Order) -> None:
        """Note that a delete was answered."""
        self._open.discard(order)
        self.answered += 1
        order.answered_at = self._now()
        self._exempt(order)
        for key in order.keys:
            self._deleted[key].append(order)

    def forget_kept(self) -> None:
        """Note that etcd has lost every delete."""
        for order in {*self._open, *(each for some in self._deleted.values() for each in some)}:
            order.lost = True
            self._exempt(order)

    def _exempt(self, order: Order) -> None:
        """Exempt what is where nobody can delete it."""
        excused = [host for host in self.arrived if self._cannot_hear(host, order)]
        if any(host not in order.reached for host in self._with_bucket):
            excused.append(BUCKET)
        order.exempt.update(
            value
            for key in order.keys
            for value in self._of_key[key]
            if self.published[value] <= order.begun
            and any(value in self.arrived[host] for host in excused)
        )

    def _cannot_hear(self, host: str, order: Order) -> bool:
        """Say whether a host does not know of a delete, and will not before others read from it:
        what it writes to the bucket is newer there than the tombstone."""
        if host == BUCKET or order.has_told(host):
            return False
        return order.lost or host in self._with_bucket

    def arrives(self, host: str, values: Sequence[int]) -> None:
        """Note that records come to a host, or to the bucket."""
        event = self.next_event()
        self.arrived[host].update((value, event) for value in values)
        for value in values:
            for order in self._deleted[self.versions[value].item.key]:
                if self._cannot_hear(host, order) or self.is_blind(host):
                    order.exempt.add(value)

    def is_deleted(self, host: str, item: Item, value: int) -> bool:
        """Say whether a host may not serve a version any more, nor may others."""
        put_at = self.published[value]
        return any(
            put_at <= order.begun
            and value not in order.exempt
            and (order.has_told(host) or not self.is_behind(host, order.answered_at))
            for order in self._deleted[item.key]
        )


class HostModel(Model):
    """One host. See the module."""

    def __init__(self, truth: Truth, host: str) -> None:
        super().__init__(truth.space)
        self._truth = truth
        self._host = host
        self._versions = truth.versions
        self._published = truth.published

    @property
    def arrived(self) -> dict[int, int]:
        return self._truth.arrived[self._host]

    def write(self, item: Item, nbytes: int, base: Version | None = None) -> Version:
        self.owner = self._host.encode()  # only a name here: two hosts never write the same bytes
        return super().write(item, nbytes, base)

    def publish(self, versions: Iterable[Version]) -> list[Version]:
        event = self._truth.next_event()
        fresh = [v for v in versions if v.checksum not in self._published]
        self._truth.publish(fresh, event)
        self.arrived.update((version.checksum, event) for version in fresh)
        return fresh

    def retract(self, versions: Iterable[Version]) -> None:
        """Note that a commit was refused. Somebody may have read what it had published so far, so
        it stays a version that was put."""

    def arrives(self, values: Sequence[int]) -> None:
        """Note that records come from another host, or from the bucket."""
        self._truth.arrives(self._host, values)

    def forget(self, keys: Iterable[BlockKey]) -> int:
        self._event = self._truth.next_event() - 1
        return super().forget(keys)

    def bury(self, keys: Iterable[BlockKey], event: int) -> None:
        keys = list(keys)
        super().bury(keys, event)
        self._truth.carried_out(self._host, keys, event)

    def may_be_gone(self, item: Item, value: int) -> bool:
        return self.arrived.get(value, 0) <= self._asked.get(item.key, 0)

    def check(self, item: Item, value: int) -> Version:
        version = self._versions.get(value)
        if version is None or version.item != item or value not in self._published:
            raise Violation("wrong", f"{self._name(item)} has a checksum nobody put under it")
        if value not in self.arrived:
            raise Violation("wrong", f"{self._name(item)} is where it never arrived")
        if self.arrived[value] <= self._forgotten.get(item.key, 0):
            raise Violation("resurrected", f"{self._name(item)} was deleted on this host")
        if self._truth.is_deleted(self._host, item, value):
            raise Violation("resurrected", f"{self._name(item)} was deleted in the whole fleet")
        return version
