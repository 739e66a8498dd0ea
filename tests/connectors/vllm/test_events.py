"""A real engine, its daemon, and Dynamo's indexer: what a router learns of a prompt."""

from __future__ import annotations

import json

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.dynamo import Indexer, indexer_site
from kvstore.testing.wait import until
from tests.cli.run import kvstore

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(indexer_site() is None, reason="`make setup` installs the indexer"),
]


def test_an_indexer_says_of_a_prompt_what_explain_says(start_engine, prompt):
    turn = prompt(705)
    addresses = ("events.publish=tcp://127.0.0.1:0", "events.replay=tcp://127.0.0.1:0")
    room = ("dram.capacity=256MiB", "dram.extent=64MiB")
    with Daemon(*addresses, *room) as daemon, Indexer() as indexer:
        daemon.start()
        engine = start_engine("llama", daemon, dtype="float32")
        answer = engine.generate(turn)
        engine("settle")
        with Client(daemon.target) as client:
            (use,) = client.admin.namespaces()
            model = use.namespace.title
            where = client.admin.stats()["events"]
            client.admin.flush()
        target = ("--target", daemon.target)
        register = ("events", "register", indexer.url, "--instance", "1", *target)
        assert kvstore(*register).exit_code == 0

        def explained() -> tuple[int, int]:
            """Return the tokens in DRAM from the start on, and those that the files add."""
            ask = ("explain", "--prompt", "-", "--json", *target)
            told = json.loads(kvstore(*ask, stdin=json.dumps(turn)).output)
            size = use.namespace.block_tokens
            return told["resident_blocks"] * size, told["hit_blocks"] * size

        def matched() -> tuple[int, int]:
            found = indexer.matched(turn, model)
            return found.get("cpu", 0), found.get("disk", 0)

        assert explained() == (704, 704)
        until(lambda: matched() == (704, 704), 30)
        with Client(daemon.target) as client:
            number = client.admin.stats()["events"]["sequence"]
        daemon.kill()
        daemon.add(f"events.publish={where['publish']}", f"events.replay={where['replay']}")
        daemon.start()
        until(lambda: matched() == (0, 0), 30)
        with Client(daemon.target) as client:
            assert client.admin.stats()["events"]["sequence"] > number
        assert explained() == (0, 704)
        # It is put, or asked for, again: then its tokens are known.
        engine("reset_prefix_cache")
        assert engine.generate(turn) == answer
        engine("settle")
        until(lambda: matched()[1] == 704, 60)
        until(lambda: matched() == explained(), 30)
