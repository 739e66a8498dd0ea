"""A real indexer, Dynamo's: what it says a prefix has is what the daemon has, whoever dies."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvstore.client import Client
from kvstore.model.block import Group, Namespace
from kvstore.model.tokens import BlockTokens
from kvstore.testing.daemon import Daemon
from kvstore.testing.dynamo import Indexer, indexer_site
from kvstore.testing.prompts import prompt, store_prompt
from kvstore.testing.wait import until
from tests.cli.run import kvstore

pytestmark = pytest.mark.skipif(indexer_site() is None, reason="`make setup` installs the indexer")

SPACE = Namespace(16, (Group("g", 4096),), (("model", "m"),), name="m")


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    with Indexer() as indexer:
        yield indexer


def register(daemon: Daemon, indexer: Indexer) -> None:
    ask = ("events", "register", indexer.url, "--instance", "1", "--target", daemon.target)
    assert json.loads(kvstore(*ask, "--json").output)["dp_rank"] == 1000


def test_what_an_indexer_says_is_there_is_there(indexer: Indexer) -> None:
    tokens = prompt(1, 40 * 16)
    sizes = ("dram.capacity=2MiB", "dram.extent=2MiB")
    addresses = ("events.publish=tcp://127.0.0.1:0", "events.replay=tcp://127.0.0.1:0")

    def matched() -> tuple[int, int]:
        """Return the tokens that the indexer finds in DRAM, and beyond that on disk."""
        found = indexer.matched(tokens, "m")
        return found.get("cpu", 0), found.get("disk", 0)

    with Daemon(*addresses, *sizes) as daemon:
        with Client(daemon.start().target) as client:
            client.register(SPACE)
            where = client.admin.stats()["events"]
            register(daemon, indexer)
            keys = store_prompt(client, SPACE, tokens, durable=True)
            until(lambda: matched() == (640, 640), 30)
            for seed in range(20):
                store_prompt(client, SPACE, prompt(100 + seed, 40 * 16), durable=True)
            until(lambda: matched() == (0, 640), 30)  # in files alone
            client.admin.delete(SPACE.id, keys[20:])
            until(lambda: matched() == (0, 320), 30)
        daemon.kill()
        daemon.add(f"events.publish={where['publish']}", f"events.replay={where['replay']}")
        daemon.start()
        until(lambda: matched() == (0, 0), 30)  # a clear of its own stream
        with Client(daemon.target) as client:
            client.register(SPACE)
            grant = client.acquire(SPACE.id, keys, tokens=BlockTokens.of(tokens), wait_s=5.0)
            client.release(grant.lease_id)
            until(lambda: matched()[1] == 16 * grant.hit_blocks, 30)
            indexer.kill()
            indexer.start()
            assert matched() == (0, 0)
            register(daemon, indexer)
            until(lambda: matched()[1] == 16 * grant.hit_blocks, 30)
            client.admin.clear()
            until(lambda: matched() == (0, 0), 30)
