"""One-sided links keep the contract of reads, and no record comes by a bulk connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from kvstore.peer.base import PeerLink
from kvstore.testing.lender import MemoryLender
from kvstore.testing.peer_link import TEST_S_MAX, PeerReadContract
from tests.peer.onesided import Ends, RegisteredLender, ends


class _OneSided(PeerReadContract):
    both: Ends
    large_nbytes = 17 << 20  # without RDMA it is emulated, and slow

    def run(self, test: Callable[[MemoryLender, PeerLink], Awaitable[None]]) -> None:
        async def main() -> None:
            lender = RegisteredLender()
            async with asyncio.timeout(TEST_S_MAX), self.both.linked(lender) as link:
                await test(lender, link)
                assert link.medium == self.both.name
            assert not link.reads.received_nbytes, "records came over TCP"
            assert all(loan.released == 1 for loan in lender.loans)

        self.both.runner.run(main())


class TestUcx(_OneSided):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _open(cls) -> Iterator[None]:
        with ends("ucx") as cls.both:
            yield


class TestNixl(_OneSided):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _open(cls) -> Iterator[None]:
        with ends("nixl") as cls.both:
            yield
