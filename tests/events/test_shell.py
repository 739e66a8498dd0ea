"""What is put without a map of the arena, as `kvstore put` does it, is told as well."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvstore.client import Client
from kvstore.model.block import Group, Namespace
from kvstore.model.errors import InvalidRequest
from kvstore.model.tokens import BlockTokens
from kvstore.testing.daemon import Daemon
from kvstore.testing.prompts import keys_of, prompt
from kvstore.testing.wait import until
from tests.cli.run import kvstore
from tests.events.consumer import Subscriber

SPACE = Namespace(16, (Group("g", 4096),), (("model", "m"),), name="m")
SMALL = ("dram.capacity=8MiB", "dram.extent=8MiB")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("events.publish=tcp://127.0.0.1:0", *SMALL, file=False) as daemon:
        yield daemon.start()


def test_what_the_shell_puts_is_watched(daemon: Daemon) -> None:
    stored = kvstore(
        "put", "--target", daemon.target, "--tokens", "11,12,13", "--json", stdin="hello"
    )
    assert stored.exit_code == 0, stored.output
    number = int.from_bytes(bytes.fromhex(json.loads(stored.output)["key"])[:8], "little")
    with Client(daemon.target) as client:
        where = client.admin.stats()["events"]["publish"]
    with Subscriber(where) as router:
        router.until(lambda index: number in index.where)
    done = kvstore("events", "watch", "--target", daemon.target, "--batches", "1", "--json")
    assert done.exit_code == 0, done.output
    (told,) = [e for e in json.loads(done.output)["events"] if e["type"] == "BlockStored"]
    assert told["block_hashes"] == [number]
    assert told["token_ids"] == [11, 12, 13]
    assert told["block_size"] == 3
    assert told["medium"] == "CPU"
    shown = kvstore("events", "watch", "--target", daemon.target, "--batches", "1")
    assert f"blocks: {json.loads(stored.output)['key'][:16]}\n" in shown.output
    again = kvstore("put", "--target", daemon.target, "--tokens", "11,12,13", stdin="hello")
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("arena", [True, False])
def test_a_put_tells_its_tokens_in_place_and_as_a_stream(daemon: Daemon, arena: bool) -> None:
    tokens = prompt(int(arena), 1100 * 16)  # more blocks than one call takes
    keys = keys_of(SPACE, tokens)
    records = [key * 128 for key in keys]
    with Client(daemon.target, arena=arena) as client:
        client.connect()
        assert client.local == arena
        space = client.register(SPACE)
        where = client.admin.stats()["events"]["publish"]
        with Subscriber(where) as router:
            until(lambda: client.admin.stats()["events"]["subscribers"] == 1)
            first, rest = BlockTokens.of(tokens[: 10 * 16]), BlockTokens.of(tokens[160:], "ada")
            assert client.put(space, keys[:10], records[:10], tokens=first).committed == 10
            done = client.put(
                space, keys[10:], records[10:], first_block=10, parent=keys[9], tokens=rest
            )
            assert done.committed == 1090
            numbers = [int.from_bytes(key[:8], "little") for key in keys]
            router.until(lambda index: index.where.keys() >= {*numbers})
        for at, number in enumerate(numbers):
            assert router.index.tokens[number] == tuple(tokens[at * 16 : at * 16 + 16])
            assert router.index.names[number] == (None if at < 10 else "ada")
        assert router.index.lost == 0
        with pytest.raises(InvalidRequest, match="64 bytes for each block"):
            client.put(space, keys[:2], records[:2], tokens=first)


def test_a_daemon_that_announces_nothing_gets_no_tokens() -> None:
    tokens = prompt(7, 16)
    with Daemon(*SMALL, file=False) as quiet, Client(quiet.start().target, arena=False) as client:
        client.connect()
        space = client.register(SPACE)
        keys = keys_of(SPACE, tokens)
        assert not client.announces
        assert client.put(space, keys, [keys[0] * 128], tokens=BlockTokens.of(tokens)).committed
