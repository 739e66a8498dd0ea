"""The daemons of a fleet, as they know each other: who, where, and what they can do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from kvstore.model.errors import InvalidRequest

NodeId = NewType("NodeId", str)
"""Of a daemon and what it stores: 32 hex digits, kept beside its files. It outlives restarts."""

FLEET_CHARS_MAX = 64
ENGINES_MAX = 64
SESSION_ENGINES_MAX = 8
SOURCE_CHARS_MAX = 300
_NODE_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class State(StrEnum):
    """UP: it lends and borrows. DRAINING: it ends what it began, and lends nothing more."""

    UP = "up"
    DRAINING = "draining"


class Origin(NamedTuple):
    """Who has a prefix, as its request says. source: a node id, or HOST:PORT of an engine.
    expect_blocks: how long the prefix will be there, while it is still being computed."""

    source: str
    expect_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One daemon of a fleet.

    instance: random, of one start: 16 hex digits. address: HOST:PORT for peers. protocol: the
    lowest and the highest version of the peer protocol that it speaks. features: what else, such as
    "ucx". zone: daemons with equal zones are near each other. engines: addresses, HOST:PORT, of the
    engines it serves.
    """

    node: NodeId
    instance: str
    address: str
    version: str = ""
    protocol: tuple[int, int] = (1, 1)
    features: tuple[str, ...] = ()
    zone: str = ""
    state: State = State.UP
    engines: tuple[str, ...] = ()
    arena_bytes: int = 0
    file_bytes: int = 0


def check_node_id(text: str) -> NodeId:
    """Return a node id. Raises InvalidRequest for text that is none."""
    if _NODE_ID.fullmatch(text) is None:
        raise InvalidRequest(f"{text[:80]!r} is no node id: it has 32 digits of 0-9 and a-f")
    return NodeId(text)


def check_fleet_name(name: str) -> str:
    """Return the name of a fleet, or of a zone. Raises InvalidRequest for one that is none."""
    if len(name) > FLEET_CHARS_MAX or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{name[:80]!r} is no name: use 1 to {FLEET_CHARS_MAX} letters, digits, '.', '_' and "
            "'-', beginning with a letter or digit"
        )
    return name


class Holds(NamedTuple):
    """What another host seems to have of a prefix, by its heads: to 256 tokens. engines: where the
    engines that it serves answer. age_s: how old that is; None: unknown."""

    node: NodeId
    address: str
    engines: tuple[str, ...]
    blocks: int
    age_s: float | None
