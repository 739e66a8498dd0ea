"""How the tests share the machine's cores: files whole, and all real engines in one process."""

from __future__ import annotations

import pytest

# Files that take a minute or more: what begins last must be short, or one core waits for it.
LONG = ("test_clean_environment.py", "test_readme.py", "test_namespaces.py", "test_torture.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group for `--dist loadgroup`. Engines take longest, so they begin first; they share what is
    made for a session, and two at once would not fit into small machines."""
    for item in items:
        group = "engines" if item.get_closest_marker("vllm") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_begins)


def _begins(item: pytest.Item) -> int:
    """Return 0 for engines, which take longest, 1 for long files, 2 for others."""
    if item.get_closest_marker("vllm"):
        return 0
    return 1 if item.path.name in LONG else 2
