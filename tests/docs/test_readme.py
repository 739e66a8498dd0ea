"""The README: short enough to be read, and every command in it works as it stands there."""

from __future__ import annotations

from tests.docs.examples import ROOT

README = ROOT / "README.md"
BYTES_MAX = 6144


def test_it_is_short() -> None:
    assert len(README.read_bytes()) <= BYTES_MAX
