from collections.abc import Iterator

import pytest

from kvstore.testing.daemon import Daemon


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A running daemon that tests share; they must not stop it."""
    with Daemon() as daemon:
        yield daemon.start()
        daemon.stop()
