"""What a daemon keeps for its next start, in files of its own: its node id, the last members, and
how far it has applied the fleet's deletes.

They are small, replaced at once, and synced. What cannot be read is ignored with a warning: a start
can do without.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvstore.membership.base import MEMBERS_MAX
from kvstore.membership.entry import decode_member
from kvstore.model.errors import InvalidRequest
from kvstore.model.member import Member, NodeId, check_node_id
from kvstore.settings import state_directory
from kvstore.system.notes import read_note, write_note

__all__ = ["AppliedDeletes", "AppliedNote", "LastMembers", "own_node_id", "state_directory"]
logger = logging.getLogger(__name__)

NODE_ID_FILE = "node_id"
MEMBERS_FILE = "members.json"
DELETES_FILE = "deletes.json"
MEMBERS_NBYTES_MAX = 8 << 20
DELETES_NBYTES_MAX = 16384
OTHERS_MAX = 8  # fleets that a daemon was in before
NODE_ID_NBYTES_MAX = 64


class _File(msgspec.Struct, frozen=True):
    fleet: str
    members: list[msgspec.Raw]


def own_node_id(directory: Path | None) -> NodeId:
    """Return this daemon's node id, which is made and kept at its first start.

    Without a directory, or where it cannot be kept, the next start has another one. It blocks.
    """
    fresh = NodeId(secrets.token_hex(16))
    if directory is None:
        logger.warning("node_id=new why='neither cluster.state nor file.path is set'")
        return fresh
    path = directory / NODE_ID_FILE
    data = read_note(path, NODE_ID_NBYTES_MAX)
    if data is not None:
        try:
            return check_node_id(data.decode("ascii", "replace").strip())
        except InvalidRequest as error:
            logger.warning("file=ignored path=%s error=%s", path, error)
    write_note(path, fresh.encode() + b"\n")
    return fresh


class LastMembers:
    """The last known members of a fleet, in a file. Its methods block."""

    def __init__(self, directory: Path, fleet: str) -> None:
        self._path = directory / MEMBERS_FILE
        self._fleet = fleet

    def read(self) -> list[Member]:
        """Return the members that are in the file, without those that cannot be understood."""
        data = read_note(self._path, MEMBERS_NBYTES_MAX)
        if data is None:
            return []
        try:
            found = msgspec.json.decode(data, type=_File)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("file=ignored path=%s error=%r", self._path, str(error)[:200])
            return []
        if found.fleet != self._fleet:
            return []
        members: dict[NodeId, Member] = {}
        for each in found.members[:MEMBERS_MAX]:
            try:
                member = decode_member(each)
            except InvalidRequest as error:
                logger.warning("file=entry_ignored path=%s error=%s", self._path, error)
                continue
            members[member.node] = member
        return list(members.values())

    def write(self, members: Iterable[Member]) -> None:
        """Replace the file. What keeps it from being written is logged."""
        write_note(
            self._path,
            msgspec.json.encode({"fleet": self._fleet, "members": list(members)}) + b"\n",
        )


class AppliedNote(msgspec.Struct, frozen=True):
    """How far this daemon has applied the fleet's deletes. tokens: one of them is in etcd for as
    long as every delete since is. others: of the fleets that it was in before, the last one first:
    if it comes back, its files have what was deleted there meanwhile."""

    fleet: str
    revision: int
    tokens: list[str]
    others: list[AppliedNote] = []


class AppliedDeletes:
    """The note of that, in a file. Its methods block."""

    def __init__(self, directory: Path, fleet: str) -> None:
        self._path = directory / DELETES_FILE
        self._fleet = fleet
        self._others: list[AppliedNote] | None = None  # None: not read yet

    def read(self) -> AppliedNote | None:
        """Return the note; None if there is none. One that cannot be read has no token, so it is
        that of a daemon that was away for too long."""
        found = self._read()
        each = [found, *found.others] if found is not None else []
        notes = [msgspec.structs.replace(note, others=[]) for note in each]
        self._others = [note for note in notes if note.fleet != self._fleet][:OTHERS_MAX]
        return next((note for note in notes if note.fleet == self._fleet), None)

    def _read(self) -> AppliedNote | None:
        data = read_note(self._path, DELETES_NBYTES_MAX)
        if data is None:
            return AppliedNote(self._fleet, 0, []) if self._path.exists() else None
        try:
            return msgspec.json.decode(data, type=AppliedNote)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("file=broken path=%s error=%r", self._path, str(error)[:200])
            return AppliedNote(self._fleet, 0, [])

    def write(self, revision: int, tokens: Iterable[str]) -> None:
        """Replace the note. What keeps it from being written is logged."""
        if self._others is None:
            self.read()
        note = AppliedNote(self._fleet, revision, list(tokens), self._others or [])
        write_note(self._path, msgspec.json.encode(note) + b"\n")
