"""A member as JSON: what was written is read, and nothing else is believed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvstore.membership import decode_member, encode_member
from kvstore.membership.entry import ENTRY_NBYTES_MAX
from kvstore.model.errors import InvalidRequest
from kvstore.model.member import ENGINES_MAX, Member, State
from kvstore.testing.membership import new_member

FULL = new_member(
    "[::1]:7702",
    protocol=(1, 3),
    features=("ucx", "aead"),
    zone="rack-7",
    state=State.DRAINING,
    engines=("10.0.0.7:8000", "engine-1.example:8001"),
    arena_bytes=1 << 38,
    file_bytes=1 << 44,
)


@pytest.mark.parametrize("member", [FULL, new_member("h:1", zone="", version="")])
def test_what_was_written_is_read(member: Member) -> None:
    assert decode_member(encode_member(member)) == member
    assert len(encode_member(member)) < 500


def test_the_largest_member_there_is_fits() -> None:
    name = 3 * f"{'a' * 63}." + "a" * 61 + ":65535"
    assert decode_member(encode_member(new_member(name, engines=(name,) * ENGINES_MAX)))


def test_what_a_newer_version_adds_is_ignored() -> None:
    entry = {**json.loads(encode_member(FULL)), "cores": 64, "more": {"a": [1]}, "state": "warming"}
    assert decode_member(json.dumps(entry).encode()) == FULL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node", "../../etc/passwd"),
        ("node", "A" * 32),
        ("node", "a" * 32 + "\n"),
        ("node", None),
        ("instance", "b" * 17),
        ("instance", "b" * 16 + "\n"),
        ("address", "10.0.0.7"),
        ("address", "10.0.0.7:0"),
        ("address", "10.0.0.7:70000"),
        ("address", "unix:/run/x:1"),
        ("address", "a b:1"),
        ("address", "a" * 300 + ":1"),
        ("address", "a" * 64 + ".example:1"),
        ("address", "a..b:1"),
        ("version", "1.0\nlevel=error"),
        ("version", "1" * 65),
        ("protocol", [3, 1]),
        ("protocol", [-1, 1]),
        ("protocol", [1, 1 << 20]),
        ("protocol", [1]),
        ("protocol", [1, 2.5]),
        ("features", ["x"] * 33),
        ("features", ["UCX\x00"]),
        ("zone", "a/b"),
        ("zone", "z" * 65),
        ("state", "s" * 33),
        ("engines", ["10.0.0.7:8000"] * (ENGINES_MAX + 1)),
        ("engines", ["http://10.0.0.7:8000"]),
        ("arena_bytes", -1),
        ("arena_bytes", 1 << 63),
        ("file_bytes", True),
        ("file_bytes", 1e300),
    ],
)
def test_a_field_that_cannot_be_is_refused(field: str, value: Any) -> None:
    entry = {**json.loads(encode_member(FULL)), field: value}
    with pytest.raises(InvalidRequest):
        decode_member(json.dumps(entry).encode())


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 30000, b" " * (ENTRY_NBYTES_MAX + 1)]
)
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_member(data)


def test_damage_is_refused_or_another_member_never_another_error() -> None:
    draw = random.Random(7)
    good = encode_member(FULL)
    for _ in range(5000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        cut = data[: draw.randint(1, len(data))] if draw.random() < 0.3 else data
        try:
            member = decode_member(bytes(cut))
        except InvalidRequest:
            continue
        assert decode_member(encode_member(member)) == member
