from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A running daemon that tests share; they must not stop it."""
    with Daemon() as daemon:
        yield daemon.start()
        daemon.stop()


@pytest.fixture(params=["local", "remote"])
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Client]:
    """A client over each of the two data paths."""
    with Client(daemon.target, arena=request.param == "local") as client:
        yield client
