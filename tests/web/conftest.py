from collections.abc import Iterator

import pytest

from kvstore.testing.daemon import Daemon
from tests.web.asking import token_of

pytest.importorskip("starlette", reason="needs pip install 'kvstore-tiers[web]'")
pytest.importorskip("uvicorn", reason="needs pip install 'kvstore-tiers[web]'")


@pytest.fixture(scope="package")
def daemon() -> Iterator[Daemon]:
    """A running daemon that tests share; they must not stop it."""
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture(scope="package")
def token(daemon: Daemon) -> str:
    return token_of(daemon)
