"""What an operator learns of a real engine: why requests hit as they did, and its breakers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.model.outcome import Reason
from kvstore.testing.daemon import Daemon
from kvstore.testing.dynamo import Indexer, indexer_site
from kvstore.testing.wait import until
from tests.cli.run import kvstore

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """One that announces its blocks as well."""
    addresses = ("events.publish=tcp://127.0.0.1:0", "events.replay=tcp://127.0.0.1:0")
    with Daemon("dram.capacity=256MiB", "dram.extent=64MiB", *addresses) as daemon:
        yield daemon.start()


def test_requests_of_an_engine_are_explained_by_their_ids(start_engine, daemon, prompt):
    turn, other = prompt(705), prompt(705)[:400] + prompt(305, seed=1)
    engine = start_engine("llama", daemon, dtype="float32")
    engine.generate(turn)
    engine("reset_prefix_cache")
    engine.generate(turn)
    engine("reset_prefix_cache")
    engine.generate(other)
    with Client(daemon.target) as client:
        diverged, whole, first = client.admin.outcomes()
        assert len({diverged.request_id, whole.request_id, first.request_id}) == 3
        assert all(each.client.startswith("vllm") for each in (diverged, whole, first))
        assert (first.hit_blocks, whole.hit_blocks, diverged.hit_blocks) == (0, 22, 12)
        assert whole.ending is None
        assert whole.lease == "held"
        for outcome in (first, diverged):
            assert outcome.ending is not None
            assert outcome.ending.reason is Reason.NEVER_STORED
            assert outcome.ending.block == outcome.hit_blocks
    # The command finds the same keys in the tokens as the connector did.
    ask = ("explain", "--prompt", "-", "--json", "--target", daemon.target)
    told = json.loads(kvstore(*ask, stdin=json.dumps(other)).output)
    engine("settle")
    assert told["hit_blocks"] >= 12
    assert json.loads(kvstore(*ask, stdin=json.dumps(turn)).output)["hit_blocks"] == 22
    if indexer_site() is not None:
        what_a_router_learns_of_a_prompt(daemon, turn)
    what_a_request_says_of_its_session_reaches_the_daemon(engine, daemon, prompt(200, seed=7))
    what_a_dead_daemon_does_to_breakers(engine, daemon, turn)

    # Another dtype: same model, nothing to share, and the fields in which they differ.
    engine = start_engine("llama", daemon, dtype="bfloat16")
    engine.generate(turn)
    with Client(daemon.target) as client:
        ending = client.admin.outcomes(limit=1)[0].ending
    assert ending is not None
    assert ending.reason is Reason.OTHER_NAMESPACE
    assert any(field.startswith("kv_dtype: ") for field in ending.differs)
    assert not any(field.startswith("weights: ") for field in ending.differs)


def what_a_router_learns_of_a_prompt(daemon, turn):
    """Dynamo's indexer says of the tokens what `explain` says of them."""
    target = ("--target", daemon.target)
    with Indexer() as indexer, Client(daemon.target) as client:
        client.admin.flush()
        (use,) = client.admin.namespaces()
        size, model = use.namespace.block_tokens, use.namespace.title
        register = ("events", "register", indexer.url, "--instance", "1", *target)
        assert kvstore(*register).exit_code == 0

        def agree() -> bool:
            ask = ("explain", "--prompt", "-", "--json", *target)
            told = json.loads(kvstore(*ask, stdin=json.dumps(turn)).output)
            found = indexer.matched(turn, model)
            here = (told["resident_blocks"] * size, told["hit_blocks"] * size)
            return here == (found.get("cpu"), found.get("disk")) == (704, 704)

        until(agree, 30)


def what_a_request_says_of_its_session_reaches_the_daemon(engine, daemon, turn):
    """Hints in a request's kv_transfer_params are carried out, for what is saved later as well."""
    hints = {"session_id": "chat-17", "pin_s": 60, "end_session": False}
    engine.generate(turn, kv_transfer_params={"kvstore": hints})
    engine("settle")
    assert engine("metrics")["hints"] == 1
    with Client(daemon.target) as client:
        until(lambda: client.admin.stats()["dram"]["pinned_bytes"] > 0)
        assert client.hints.expect("chat-17", 30.0).done_blocks == 6
        assert any(kind.startswith("pin/") for kind in client.admin.stats()["totals"]["hints"])
        client.hints.pin("chat-17", 0.0)


def what_a_dead_daemon_does_to_breakers(engine, daemon, turn):
    """vLLM's own metrics say that kvstore is away, and that it is back."""
    assert engine("metrics")["breakers_open"] == 0
    engine("reset_prefix_cache")
    daemon.kill()
    engine.generate(turn)
    assert engine("metrics")["breakers_open"] > 0
    assert engine("metrics")["breaker_trips"] > 0
    daemon.start()

    def closed() -> bool:
        engine.generate(turn)
        return engine("metrics")["breakers_open"] == 0

    until(closed)
