"""Who is in the fleet. An engine of its own, or a list, says it; nothing here elects or agrees."""

from kvstore.membership.base import Hello, Membership, NodeIdTaken, Ping
from kvstore.membership.entry import decode_member, encode_member
from kvstore.membership.opening import open_membership
from kvstore.membership.state_files import LastMembers, own_node_id, state_directory

__all__ = [
    "Hello",
    "LastMembers",
    "Membership",
    "NodeIdTaken",
    "Ping",
    "decode_member",
    "encode_member",
    "open_membership",
    "own_node_id",
    "state_directory",
]
