"""Daemons that tests of SGLang's classes talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.testing.daemon import Daemon
from tests.connectors.sglang.inside.stand_ins import put_stand_ins

put_stand_ins()

from tests.connectors.sglang.inside.engine import publish  # noqa: E402 - it imports SGLang


@pytest.fixture(autouse=True)
def _published() -> None:
    """SGLang's configuration is that of a process of its scheduler's."""
    publish()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A running daemon that tests share; they must not stop it."""
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture
def mortal() -> Iterator[Daemon]:
    """A daemon that the test may stop, kill and start."""
    with Daemon() as daemon:
        yield daemon.start()
