"""A value's page vouches for one record under one name, and for nothing else."""

from __future__ import annotations

import pytest

from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId, Part
from kvstore.tier.pool.messages import Reply, Request, decode, encode
from kvstore.tier.pool.names import keys_pattern, namespace_pattern, record_name
from kvstore.tier.pool.value import encode_page, parse_page

SPACE, OTHER = NamespaceId(b"n" * 32), NamespaceId(b"o" * 32)
KEY, PART = BlockKey(b"k" * 32), Part(3, 1)
NAME = record_name(SPACE, KEY, PART)
PAGE = encode_page(
    NAME, SPACE, PART, key=KEY, parent=None, block_index=7, nbytes=5000, checksum=42, stamp=9
)


def parsed(page: bytes = PAGE, name: str = NAME, **changed: object) -> tuple[int, int] | None:
    is_that = {"namespace_id": SPACE, "part": PART, "key": KEY, "nbytes": 5000} | changed
    return parse_page(memoryview(page), name, **is_that)  # type: ignore[arg-type]


def test_a_page_comes_back() -> None:
    assert len(PAGE) == PAGE_NBYTES
    assert parsed() == (42, 9)


@pytest.mark.parametrize(
    "changed",
    [
        {"namespace_id": OTHER},
        {"part": Part(3, 0)},
        {"key": BlockKey(b"x" * 32)},
        {"nbytes": 4999},
        {"name": record_name(OTHER, KEY, PART)},
    ],
)
def test_another_records_page_is_none(changed: dict[str, object]) -> None:
    assert parsed(**changed) is None  # type: ignore[arg-type]


def test_a_changed_page_is_none() -> None:
    for at in range(0, PAGE_NBYTES, 17):
        assert parsed(PAGE[:at] + bytes([PAGE[at] ^ 4]) + PAGE[at + 1 :]) is None
    assert parsed(PAGE[:-1]) is None
    assert parsed(b"") is None


def test_patterns_name_what_they_should() -> None:
    assert namespace_pattern(SPACE) == f"^kvstore1/{SPACE.hex()}/"
    assert keys_pattern(SPACE, [KEY]) == f"^kvstore1/{SPACE.hex()}/({KEY.hex()})/"
    assert NAME.startswith(f"kvstore1/{SPACE.hex()}/{KEY.hex()}/")


def test_other_bytes_are_no_messages() -> None:
    good = encode(Reply(3, [1, 2]))[4:]
    assert decode(good, Reply) == Reply(3, [1, 2])
    for bad in (b"", b"\xff", good[:-1], good + b"x", b"\x93\x01\x90\x01"):
        assert decode(bad, Reply) is None
    assert decode(good, Request) is None
