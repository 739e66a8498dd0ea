"""How the tests share the machine's cores: files whole, and all real engines in one process."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group for `--dist loadgroup`. Engines take longest, so they begin first; they share what is
    made for a session, and two at once would not fit into small machines."""
    for item in items:
        group = "engines" if item.get_closest_marker("vllm") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
