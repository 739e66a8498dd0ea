"""How much of a tier each tenant may hold: guaranteed, and lent beyond that by weight. Pure.

need   what a tenant holds now and some headroom, so that its next puts find room
first  everybody gets its need up to its guarantee: the guarantees fit, so nobody loses this
then   needs beyond guarantees share what is left by weight: who is over its guarantee by most
       per weight is the first to give
last   what nobody needs stays where it is, until somebody does
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One tenant's part of one tier, in bytes.

    most: it may have no more. used: what its blocks take. headroom: what it should have free. cap:
    what it may hold now.
    """

    guaranteed: int
    most: int
    weight: float
    used: int
    headroom: int
    cap: int

    @property
    def need(self) -> int:
        return min(self.most, self.used + self.headroom)


def caps_for(capacity: int, claims: Sequence[Claim]) -> list[int]:
    """Return what each tenant should be allowed to hold; together at most `capacity`.

    The guarantees together have to fit into it.
    """
    weights = [each.weight for each in claims]
    caps = [min(each.need, each.guaranteed) for each in claims]
    for wanted in (
        [each.need for each in claims],
        [min(each.cap, each.most) for each in claims],
    ):
        missing = [max(0, want - cap) for want, cap in zip(wanted, caps, strict=True)]
        lent = by_weight(capacity - sum(caps), missing, weights)
        caps = [cap + more for cap, more in zip(caps, lent, strict=True)]
    return caps


def by_weight(room: int, wanted: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return parts of `room`: none is more than wanted, and nobody who lacks some has less per
    weight than another."""
    parts = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda at: wanted[at] / weights[at])
    room, weight = max(0, room), sum(weights[at] for at in order if wanted[at])
    for at in order:
        if wanted[at]:
            part = int(room * (weights[at] / weight))  # of the last, a little above room
            parts[at] = min(wanted[at], part, room)
            room -= parts[at]
            weight -= weights[at]
    return parts


def raised(capacity: int, held: Sequence[int], caps: Sequence[int], to: Sequence[int]) -> list[int]:
    """Return how far caps may be raised now, so that what is held never exceeds `capacity`.

    held: what each takes from the system; under a lowered cap it may still be more than that. caps:
    as they are, the lowered ones included. to: what they should become.
    """
    free = capacity - sum(max(cap, has) for cap, has in zip(caps, held, strict=True))
    found = []
    for cap, has, target in zip(caps, held, to, strict=True):
        already = max(0, min(has, target) - cap)  # it holds this still: nobody else can have it
        more = already + max(0, min(target - cap - already, free))
        free -= max(0, more - already)
        found.append(cap + max(0, more))
    return found
