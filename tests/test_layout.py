"""The layout keeps to its bounds."""

from tests.layout import holds, layout


def test_the_layout_explains_itself() -> None:
    found = layout()
    assert holds(found), found
