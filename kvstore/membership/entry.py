"""A member as JSON: what etcd, members.json and a daemon's HELLO carry.

Nothing of it is trusted: sizes, names and counts are checked. Fields that are not known are those
of a newer version, and are ignored.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.model.member import ENGINES_MAX, Member, State, check_fleet_name, check_node_id
from kvstore.settings.cluster import parse_address

ENTRY_NBYTES_MAX = 32 << 10  # 64 engines with the longest names there are
ADDRESS_CHARS_MAX = 262  # of a name, a colon and a port
FEATURES_MAX = 32
PROTOCOL_MAX = 1 << 16
STORED_NBYTES_MAX = 1 << 62

_Address = Annotated[str, msgspec.Meta(max_length=ADDRESS_CHARS_MAX)]
_Feature = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_-]{1,32}\Z")]
_Version = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.+_-]{0,64}\Z")]
_Protocol = Annotated[int, msgspec.Meta(ge=0, lt=PROTOCOL_MAX)]
_Nbytes = Annotated[int, msgspec.Meta(ge=0, le=STORED_NBYTES_MAX)]


class _Entry(msgspec.Struct, frozen=True):
    node: str
    instance: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    address: _Address
    version: _Version = ""
    protocol: tuple[_Protocol, _Protocol] = (1, 1)
    features: Annotated[tuple[_Feature, ...], msgspec.Meta(max_length=FEATURES_MAX)] = ()
    zone: str = ""
    state: Annotated[str, msgspec.Meta(max_length=32)] = State.UP.value
    engines: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=ENGINES_MAX)] = ()
    arena_bytes: _Nbytes = 0
    file_bytes: _Nbytes = 0


_decoder = msgspec.json.Decoder(_Entry)


def encode_member(member: Member) -> bytes:
    """Return a member as JSON."""
    return msgspec.json.encode(member)


def decode_member(data: bytes | msgspec.Raw) -> Member:
    """Return the member that JSON describes. Raises InvalidRequest, which says what is wrong."""
    if memoryview(data).nbytes > ENTRY_NBYTES_MAX:
        raise InvalidRequest(f"an entry of a member has at most {ENTRY_NBYTES_MAX} bytes")
    try:
        entry = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"no entry of a member: {str(error)[:200]}") from error
    if entry.protocol[0] > entry.protocol[1]:
        raise InvalidRequest("the lowest version of the protocol is above the highest")
    if entry.zone:
        check_fleet_name(entry.zone)
    for address in (entry.address, *entry.engines):
        check_address(address)
    return Member(
        node=check_node_id(entry.node),
        instance=entry.instance,
        address=entry.address,
        version=entry.version,
        protocol=entry.protocol,
        features=entry.features,
        zone=entry.zone,
        state=_state(entry.state),
        engines=entry.engines,
        arena_bytes=entry.arena_bytes,
        file_bytes=entry.file_bytes,
    )


def check_address(text: str) -> None:
    """Raise InvalidRequest for text that is no HOST:PORT."""
    try:
        parse_address("address", text)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from error


def _state(word: str) -> State:
    """Return a state. One of a newer version is taken for draining: it is asked for nothing."""
    return State.UP if word == State.UP else State.DRAINING
