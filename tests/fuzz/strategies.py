"""Inputs that are almost right."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.targets import Target


@st.composite
def mutations(draw: st.DrawFn, target: Target) -> bytes:
    """Draw a seed with some of its bytes replaced, removed, doubled, or something else."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(draw(st.sampled_from(target.seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        # Headers are where the parsers look: most of a page is zeros.
        at = at if draw(st.booleans()) else at % 160
        cut = draw(st.sampled_from([0, 1, 1, 4, 8]))
        data[at : at + cut] = draw(st.binary(min_size=cut, max_size=cut) | st.binary(max_size=12))
    return bytes(data)
