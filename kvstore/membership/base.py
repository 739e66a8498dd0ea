"""What every driver of the fleet's members does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

from kvstore.model.errors import ConfigError
from kvstore.model.member import Member, NodeId

MEMBERS_MAX = 4096  # of one fleet; more are counted and left out
PING_S = 2.0  # for an answer that decides whether a member stays

Hello: TypeAlias = Callable[[str], Awaitable[Member]]
"""Ask the daemon at an address, HOST:PORT, who it is. Raises any exception if it does not say."""

Ping: TypeAlias = Callable[[Member], Awaitable[bool]]
"""Ask a member whether it is there: True if a daemon with this node id and fleet answers."""


class NodeIdTaken(ConfigError):
    """Another daemon of the fleet has this node id, and lives. address: where it is."""

    def __init__(self, node: NodeId, address: str) -> None:
        super().__init__(
            f"the daemon at {address} has the node id {node} already: each daemon needs one of its "
            "own. Was a directory with the file node_id copied? Remove that file from the copy"
        )
        self.node = node
        self.address = address


class Membership(Protocol):
    """The members of one fleet, as one daemon sees them. All methods run on one event loop."""

    async def join(self, member: Member) -> None:
        """Tell the fleet of this daemon, and follow the others until `leave`.

        It returns even if the engine does not answer: the members are then the last known ones, and
        this daemon is told of later. Raises NodeIdTaken, and ConfigError if the engine refuses what
        the settings say; nothing runs then.
        """

    async def update(self, member: Member) -> None:
        """Tell the fleet what this daemon is now, such as draining: soon, if that is not possible
        at once. Node id, instance and address stay what they were."""

    def members(self) -> Mapping[NodeId, Member]:
        """Return the others. This daemon is not among them. What is returned does not change."""

    def on_change(self, changed: Callable[[], None]) -> None:
        """Have `changed` called after `members` has become another one."""

    async def leave(self) -> None:
        """Tell the fleet that this daemon goes, and stop. Takes 2 s at most; once is enough."""

    @property
    def away_s(self) -> float | None:
        """For how long the engine has been out of reach; None: it answers."""

    def stats(self) -> dict[str, Any]:
        """Return what `status` shows, ready for JSON."""
