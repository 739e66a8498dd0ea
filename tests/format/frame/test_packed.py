from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.frame import FrameHeader, PackedFrames, SegmentTag, encode_header, pack_header
from kvstore.format.frame.packed import ALIKE, _records, join_packed
from tests.format.frame.strategies import HEADERS, TAGS
from tests.format.frame.test_header import KEYS_TOMBSTONE, RUN, TAG


def packed(frames: list[tuple[int, FrameHeader]], tag: SegmentTag = TAG) -> list[bytes]:
    return [pack_header(encode_header(header, tag, offset)) for offset, header in frames]


def placed(headers: list[FrameHeader]) -> list[tuple[int, FrameHeader]]:
    frames, offset = [], 4096
    for header in headers:
        frames.append((offset, header))
        offset += header.nbytes
    return frames


@given(TAGS, st.lists(HEADERS, max_size=5))
def test_the_vectors_say_what_the_headers_say(tag: SegmentTag, headers: list[FrameHeader]) -> None:
    frames = placed(headers)
    found = PackedFrames.of(packed(frames, tag), tag)
    assert found.headers() == frames
    assert found.offsets.tolist() == [offset for offset, _ in frames]
    assert found.nbytes.tolist() == [header.nbytes for header in headers]
    assert found.sequences.tolist() == [header.sequence for header in headers]
    assert found.blocks.tolist() == [len(header.blocks) for header in headers]
    assert found.namespaces() == {header.namespace_id for header in headers}
    heads = [int.from_bytes(b.key[:8], "little") for header in headers for b in header.blocks]
    assert found.heads.tolist() == heads


@given(st.lists(HEADERS, max_size=5), st.data())
def test_some_of_them_are_like_all_of_them(headers: list[FrameHeader], data: st.DataObject) -> None:
    frames = placed(headers)
    wanted = data.draw(st.lists(st.booleans(), min_size=len(frames), max_size=len(frames)))
    some = PackedFrames.of(packed(frames), TAG).where(np.array(wanted, np.bool_))
    assert some.headers() == [frame for frame, want in zip(frames, wanted, strict=True) if want]


@given(st.integers(0, 1000), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_its_header_is_damaged(at: int, flip: int) -> None:
    frames = placed([RUN, KEYS_TOMBSTONE])
    body = bytearray(join_packed(packed(frames)))
    at %= len(body)
    body[at] ^= flip
    try:
        found = PackedFrames(bytes(body), TAG)
    except ValueError:
        return
    assert len(found.headers()) < 2
    assert all(header in (RUN, KEYS_TOMBSTONE) for _, header in found.headers())


@given(st.binary(max_size=400))
def test_any_bytes_are_frames_or_a_value_error(body: bytes) -> None:
    try:
        found = PackedFrames(body, TAG)
    except ValueError:
        return
    assert found.headers() == []


@pytest.mark.parametrize("cut", [1, 8, 9, 100])
def test_a_cut_body_is_refused(cut: int) -> None:
    body = join_packed(packed(placed([RUN, RUN])))
    with pytest.raises(ValueError, match="record"):
        PackedFrames(body[:-cut], TAG)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, ALIKE, ALIKE + 2, 50]))),
    st.integers(0, 300),
)
def test_records_of_one_size_in_a_row_are_cut_like_any_others(
    runs: list[tuple[int, int]], cut: int
) -> None:
    body = join_packed(bytes(nbytes) for nbytes, count in runs for _ in range(count))
    starts, sizes = _records(body)
    assert sizes.tolist() == [nbytes for nbytes, count in runs for _ in range(count)]
    ends = np.cumsum(sizes + 2)
    assert starts.tolist() == (ends - sizes).tolist()
    short = body[: max(0, len(body) - cut)]
    whole = [0, *ends.tolist()]
    if len(short) in whole:
        assert len(_records(short)[0]) <= len(sizes)
    else:
        with pytest.raises(ValueError, match="cut"):
            _records(short)
