"""One server of each kind for all tests here; each test has a prefix of its own in its bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstore.testing.seaweed import Seaweed
from tests.tier.object import azurite, google


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Seaweed]:
    with Seaweed() as server:
        yield server.start()


@pytest.fixture(scope="session")
def azure_server() -> Iterator[azurite.Azurite]:
    with azurite.running() as server:
        yield server


@pytest.fixture(scope="session")
def google_server() -> Iterator[google.Google]:
    with google.running() as server:
        yield server


@pytest.fixture
def credentials(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def own_prefix() -> str:
    return os.urandom(8).hex()
