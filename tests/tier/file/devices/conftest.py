"""Devices are tried again at once."""

from __future__ import annotations

import pytest

from kvstore.tier.file.devices import admission


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try devices again at once, and for as long as it takes."""
    monkeypatch.setattr(admission, "RETRY_S", 0.01)
    monkeypatch.setattr(admission, "RETRY_MAX_S", 0.02)
