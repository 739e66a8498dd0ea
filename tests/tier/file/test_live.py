from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.frame import FrameHeader
from kvstore.model.block import Part
from kvstore.tier.file.live import live_positions
from tests.tier.file.frames import OTHER, run, tombstone


def header(sequence: int, names: str, **fields: object) -> FrameHeader:
    return run(sequence, names, nbytes=1, **fields)[0]  # type: ignore[arg-type]


def test_the_highest_sequence_wins_in_whatever_order_frames_are_found() -> None:
    assert live_positions([header(2, "abc"), header(1, "bcd")]) == [(0, 1, 2), (2,)]


def test_parts_and_namespaces_do_not_touch_each_other() -> None:
    others = [header(2, "a", part=Part(0, 1)), header(3, "a", namespace=OTHER)]
    assert live_positions([header(1, "a"), *others]) == [(0,)] * 3


def test_a_directory_is_one_tenants_however_a_frame_names_it() -> None:
    """One of the time before it was encrypted names none."""
    named = replace(header(2, "a"), tenant=b"t" * 16)
    assert live_positions([header(1, "a"), named]) == [(), (0,)]


def test_a_tombstone_kills_all_parts_of_lower_sequences_only() -> None:
    frames = [header(1, "ab"), header(2, "a", part=Part(1, 0)), tombstone(3, "a"), header(4, "a")]
    assert live_positions(frames) == [(1,), (), (), (0,)]


def test_a_namespace_tombstone_kills_its_namespace_only() -> None:
    frames = [header(1, "ab"), header(2, "a", namespace=OTHER), tombstone(3, ""), header(4, "b")]
    assert live_positions(frames) == [(), (0,), (), (0,)]


def test_a_tombstone_hides_no_older_frame_behind_a_newer_dead_one() -> None:
    assert live_positions([header(1, "a"), header(2, "a"), tombstone(3, "a")]) == [(), (), ()]


@given(
    st.lists(
        st.tuples(st.sampled_from(["run", "keys", "namespace"]), st.text("abc", max_size=3)),
        max_size=12,
    ),
    st.randoms(),
)
def test_it_is_what_a_dict_would_hold(steps: list[tuple[str, str]], random: object) -> None:
    frames, model = [], {}
    for sequence, (kind, text) in enumerate(steps, start=1):
        names = "".join(sorted(set(text))) or "a"
        if kind == "run":
            frames.append(header(sequence, names))
            model.update(dict.fromkeys(names, sequence))
        elif kind == "keys":
            frames.append(tombstone(sequence, names))
            model = {name: at for name, at in model.items() if name not in names}
        else:
            frames.append(tombstone(sequence, ""))
            model = {}
    random.shuffle(frames)  # type: ignore[attr-defined]
    found = {
        frame.blocks[position].key: frame.sequence
        for frame, positions in zip(frames, live_positions(frames), strict=True)
        for position in positions
    }
    assert found == {header(1, name).blocks[0].key: at for name, at in model.items()}
