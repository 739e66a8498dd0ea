"""Which one-sided drivers a daemon opens, and that they follow its arena."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.model.errors import ConfigError
from kvstore.model.member import NodeId
from kvstore.peer.onesided.driver import DriverMissing
from kvstore.settings import load_settings
from kvstore.store import links as links_module
from kvstore.store.links import Links
from kvstore.testing.peer_link import until
from kvstore.tier.dram import Arena
from tests.peer.onesided import skip_without

MIB = 1 << 20
NODE = NodeId("c" * 32)


def opened(wanted: str, *, sealed: bool = False) -> tuple[list[str], str]:
    """Return the drivers that were opened, and why none was."""

    async def main() -> tuple[list[str], str]:
        arena = Arena(4 * MIB, 2 * MIB)
        links = Links(load_settings(None, [f"cluster.links={wanted}"]), arena)
        await links.start(NODE, sealed=sealed)
        await links.close()
        return list(links.movers), links.why

    return asyncio.run(main())


def missing() -> None:
    raise DriverMissing("not here")


def test_without_a_device_records_go_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(links_module, "devices_up", list)
    assert opened("tcp") == ([], "cluster.links=tcp")
    for wanted in ("auto", "ucx", "nixl"):
        assert opened(wanted) == ([], "no RDMA device is up")


def test_what_is_not_installed_is_an_error_only_if_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links_module, "devices_up", lambda: ["mlx5_0"])
    monkeypatch.setattr(links_module, "_maker", lambda name, node: missing)
    assert opened("auto") == ([], "not here")
    with pytest.raises(ConfigError, match=r"cluster\.links=ucx: not here"):
        opened("ucx")
    assert opened("auto", sealed=True)[1].startswith("records are sealed")


def test_memory_that_comes_is_offered_and_memory_that_leaves_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_without("ucx")
    monkeypatch.setenv("UCX_TLS", "tcp,self")

    async def main() -> None:
        arena = Arena(4 * MIB, 2 * MIB)
        links = Links(load_settings(None, ["cluster.links=ucx"]), arena)
        await links.start(NODE, sealed=False)
        await arena.start()
        (mover,) = links.movers.values()
        await until(lambda: mover.version >= 2)
        first, second = [extent.view[:] for extent in arena.extents]
        assert mover.holds(first[MIB:])
        assert mover.holds(second)
        arena.extents.retire(next(iter(arena.extents)))
        await until(lambda: mover.version >= 3)
        assert not mover.holds(first)
        assert mover.holds(second)
        await links.close()
        del first, second
        await arena.close()

    asyncio.run(main())
