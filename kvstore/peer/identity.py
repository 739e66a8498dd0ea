"""Who this daemon is for its peers, and which peers it speaks with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.model.member import Member, NodeId
from kvstore.peer.base import PeerIncompatible
from kvstore.peer.messages import MAGIC, Hello, encode
from kvstore.peer.trust import Trust, check_names


@dataclass(frozen=True, slots=True)
class Ourselves:
    """What all links of this daemon share.

    member: returns what is true of it now. trust: None: no TLS, and whoever reaches the port is
    believed. sealed: bulk connections are encrypted, which needs trust: `cluster.bulk`.
    """

    fleet: str
    member: Callable[[], Member]
    trust: Trust | None = None
    sealed: bool = False

    def __post_init__(self) -> None:
        if self.sealed and self.trust is None:
            raise ValueError("keys of bulk connections travel over TLS only")

    def hello(self) -> bytes:
        """Return the body of our HELLO."""
        return encode(Hello(magic=MAGIC, fleet=self.fleet, member=self.member()))

    def check(self, hello: Hello, names: Sequence[str], expected: NodeId | None = None) -> int:
        """Return the version to speak. Raises PeerIncompatible for a peer not to speak with.

        names: of its certificate, without meaning if there is no TLS. expected: who should be
        there; None: anybody of the fleet.
        """
        ours, theirs = self.member(), hello.member
        who = f"node {theirs.node[:8]} at {theirs.address}"
        if hello.fleet != self.fleet:
            raise PeerIncompatible(
                f"{who} is of another fleet than {self.fleet!r}: see cluster.fleet", reason="fleet"
            )
        if theirs.instance == ours.instance:
            raise PeerIncompatible(f"{who} is this daemon itself", reason="self", peer=theirs)
        if theirs.node == ours.node:
            raise PeerIncompatible(
                f"{who} has our node id: a daemon, or a copy of its directory, is there twice",
                reason="node",
                peer=theirs,
            )
        if expected is not None and theirs.node != expected:
            raise PeerIncompatible(f"{who} is not node {expected[:8]}", reason="node")
        if self.trust is not None:
            check_names(names, theirs.node, self.fleet)
        version = min(ours.protocol[1], theirs.protocol[1])
        if version < max(ours.protocol[0], theirs.protocol[0]):
            raise PeerIncompatible(
                f"{who} speaks versions {theirs.protocol[0]} to {theirs.protocol[1]} of the peer "
                f"protocol, we {ours.protocol[0]} to {ours.protocol[1]}: upgrade the older one",
                reason="protocol",
            )
        return version
