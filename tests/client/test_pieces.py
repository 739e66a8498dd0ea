"""Records that lie in several places of the caller's memory."""

from __future__ import annotations

import random

import pytest

from kvstore import Client, InvalidRequest
from kvstore.client.pieces import Pieces
from kvstore.model.checksum import LEAF_NBYTES, checksum, copy_gathered, copy_scattered
from kvstore.testing.daemon import Daemon
from kvstore.testing.damage import damage_resident
from kvstore.testing.samples import sample_keys, sample_namespace

CUTS = {
    "small": (1, 4095, 100),
    "leaves": (LEAF_NBYTES, 2 * LEAF_NBYTES),
    "across leaves": (LEAF_NBYTES - 1, 3, LEAF_NBYTES * 9, 17),
    "one": (LEAF_NBYTES + 5,),
    "empty between": (7, 0, 9),
    "many in a leaf": (11,) * 40,
}


def pieces_of(data: bytes, sizes: tuple[int, ...]) -> list[bytearray]:
    found, at = [], 0
    for size in sizes:
        found.append(bytearray(data[at : at + size]))
        at += size
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_the_checksum_is_that_of_the_whole(cut: str) -> None:
    """However it is cut, and whether it is taken while gathering or while scattering."""
    data = random.Random(cut).randbytes(sum(CUTS[cut]))
    pieces = [memoryview(each) for each in pieces_of(data, CUTS[cut])]
    slot = memoryview(bytearray(len(data)))
    assert copy_gathered(pieces, slot) == checksum(data)
    assert bytes(slot) == data
    targets = [memoryview(bytearray(len(each))) for each in pieces]
    assert copy_scattered(slot, targets) == checksum(data)
    assert b"".join(targets) == data
    with pytest.raises(ValueError, match="differ in size"):
        copy_gathered(pieces, slot[1:])


@pytest.mark.parametrize("cut", ["small", "across leaves"])
def test_pieces_go_through_both_data_paths(client: Client, cut: str) -> None:
    nbytes = sum(CUTS[cut])
    space = sample_namespace(f"pieces {cut} {client.target}", record_nbytes=nbytes)
    client.register(space)
    keys = sample_keys(f"pieces {cut}", 6)
    data = [random.Random(f"{cut} {at}").randbytes(nbytes) for at in range(6)]
    records = [Pieces(pieces_of(each, CUTS[cut])) for each in data[:5]]
    assert client.put(space.id, keys, [*records, data[5]]).refused == 0
    assert client.get(space.id, keys) == data
    targets = [pieces_of(bytes(nbytes), CUTS[cut]) for _ in range(6)]
    whole = bytearray(nbytes)
    good = client.get_into(space.id, keys, [*map(Pieces, targets[:5]), whole], from_files=True)
    assert good == [True] * 6
    assert [b"".join(each) for each in targets[:5]] == data[:5]
    assert whole == data[5]


def test_a_rotten_record_does_not_pass_in_pieces(daemon: Daemon) -> None:
    space, keys = sample_namespace("rotten pieces"), sample_keys("rotten pieces", 1)
    nbytes = space.groups[0].record_nbytes
    with Client(daemon.target) as client:
        client.register(space)
        client.put(space.id, keys, [bytes(nbytes)])
        damage_resident(client, space.id, keys)
        target = Pieces([bytearray(nbytes - 100), bytearray(100)])
        assert client.get_into(space.id, keys, [target]) == [False]
        # The file tier may have had the record before it was damaged.
        assert client.get(space.id, keys) in ([None], [bytes(nbytes)])


def test_what_is_no_record_is_refused(client: Client) -> None:
    space, keys = sample_namespace("no pieces"), sample_keys("no pieces", 1)
    client.register(space)
    nbytes = space.groups[0].record_nbytes
    with pytest.raises(InvalidRequest, match=f"has {nbytes - 1} bytes"):
        client.put(space.id, keys, [Pieces([bytes(nbytes - 3), bytes(2)])])
    with pytest.raises(InvalidRequest, match="cannot be written"):
        client.get_into(space.id, keys, [Pieces([bytearray(nbytes - 3), bytes(3)])])
    with pytest.raises(InvalidRequest, match="contiguous"):
        Pieces([memoryview(bytes(8))[::2]])
