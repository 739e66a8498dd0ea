"""Torch on one thread: beside other work, two wait for each other most of the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the weights of a tiny model, however busy the machine is."""
    pytest.importorskip("transformers")
    from kvstore_transformers import prefixes

    monkeypatch.setattr(prefixes, "KNOWN_SOON_S", 30.0)
