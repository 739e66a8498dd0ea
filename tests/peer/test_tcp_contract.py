"""A link over TCP keeps the contract: in clear, and under TLS with records sealed or in clear."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.peer.base import PeerLink
from kvstore.peer.trust import Trust
from kvstore.testing.lender import MemoryLender
from kvstore.testing.peer_link import PeerLinkContract
from tests.peer.fleet import BORROWER, LENDER, Certificates, ourselves, served


class TestClear(PeerLinkContract):
    @asynccontextmanager
    async def linked(self, lender: MemoryLender) -> AsyncIterator[PeerLink]:
        async with served(ourselves(LENDER), lender) as found:
            link = await found.dial(ourselves(BORROWER))
            yield link
            await link.close()


class _UnderTls(PeerLinkContract):
    sealed: bool

    @pytest.fixture(autouse=True)
    def _issue(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.certificates = issued(tmp_path_factory)

    @asynccontextmanager
    async def linked(self, lender: MemoryLender) -> AsyncIterator[PeerLink]:
        there, here = self.certificates
        async with served(ourselves(LENDER, trust=there, sealed=self.sealed), lender) as found:
            link = await found.dial(ourselves(BORROWER, trust=here, sealed=self.sealed))
            yield link
            await link.close()


class TestSealed(_UnderTls):
    sealed = True


class TestTlsClear(_UnderTls):
    sealed = False


_ISSUED: list[tuple[Trust, Trust]] = []


def issued(factory: pytest.TempPathFactory) -> tuple[Trust, Trust]:
    """Return the certificates of both ends, made once: that takes a while."""
    if not _ISSUED:
        fleet = Certificates(Path(factory.mktemp("fleet")))
        _ISSUED.append((fleet.trust(LENDER), fleet.trust(BORROWER, "*.tests.kvstore")))
    return _ISSUED[0]
