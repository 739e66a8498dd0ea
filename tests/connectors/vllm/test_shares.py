"""How the records of a load are divided among the threads that copy them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.block import BlockKey
from kvstore_vllm.loading import _Copy, _shares

SIZES = st.lists(st.lists(st.integers(1, 5000), max_size=20), max_size=5)


def copy_of(group: int, sizes: list[int]) -> _Copy:
    keys = [BlockKey(bytes([group, at])) for at in range(len(sizes))]
    places = list(range(len(sizes)))
    records = [memoryview(bytes(size)) for size in sizes]
    return _Copy(group, keys, records, places, places, [None] * len(sizes), places)


@given(SIZES, st.integers(1, 8))
def test_each_record_is_in_one_share_with_what_belongs_to_it(
    sizes: list[list[int]], parts: int
) -> None:
    copies = [copy_of(group, each) for group, each in enumerate(sizes)]
    shares = _shares(copies, parts)
    assert len(shares) == parts
    found = [copy for share in shares for copy in share]
    for copy in copies:
        own = [each for each in found if each.group == copy.group]
        assert [key for each in own for key in each.keys] == copy.keys
        assert [at for each in own for at in each.device_blocks] == copy.device_blocks
        assert [len(r) for each in own for r in each.records] == [len(r) for r in copy.records]
    assert all(copy.records for copy in found)
    assert len(found) <= parts + len(copies)  # calls


@given(SIZES, st.integers(1, 8))
def test_shares_have_about_as_many_bytes(sizes: list[list[int]], parts: int) -> None:
    shares = _shares([copy_of(group, each) for group, each in enumerate(sizes)], parts)
    nbytes = [sum(len(r) for copy in share for r in copy.records) for share in shares]
    total, most = sum(nbytes), max((size for each in sizes for size in each), default=0)
    assert sum(map(sum, sizes)) == total
    assert all(each <= total / parts + most for each in nbytes)
