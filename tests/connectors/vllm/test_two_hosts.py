"""Two real engines, each with a daemon of its own: what one has computed the other one loads, and a
prefix may be computed here and gone on with there."""

from __future__ import annotations

import pytest

from kvstore import Client
from kvstore.model.outcome import Outcome
from tests.cluster.fleet import fleet, peers_of, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PREFILLER = "10.0.0.1:8000"
ROOM = ("dram.capacity=256MiB", "dram.extent=64MiB")


def last_outcome(daemon) -> Outcome:
    with Client(daemon.target) as client:
        return client.admin.outcomes(limit=1)[0]


def test_an_engine_loads_what_another_hosts_engine_has_computed(start_engine, prompt):
    with fleet(2, *ROOM) as (one, two):
        here = start_engine("llama", one, dtype="float32", extra={"engine_address": PREFILLER})
        there = start_engine("llama", two, dtype="float32")
        wait_for(lambda: peers_of(two)[0]["engines"] == [PREFILLER])

        turn = prompt(705)
        expected = here.generate(turn)
        here("settle")
        assert there.generate(turn) == expected
        outcome = last_outcome(two)
        assert (outcome.hit_blocks, outcome.peer_blocks) == (22, 22)
        assert there.counter("loads_failed") == 0

        a_prefix_is_handed_off(here, there, two, prompt(705, seed=2))
        a_prefix_is_fetched_while_it_is_computed(here, there, two, prompt(2005, seed=3))
        a_source_that_is_no_member_costs_nothing(there, two, prompt(300, seed=4))

        one.kill()
        turn = prompt(705, seed=5)
        params = {"remote_prefiller": {"remote_host": "10.0.0.1", "remote_port": 8000}}
        assert there.generate(turn, kv_transfer_params=params) == here.generate(turn)


def a_prefix_is_handed_off(here, there, daemon, turn):
    """Prefill here, then decode there: the answer of one request is the beginning of the other."""
    params = here("prefill", prompt=turn, kv_transfer_params={"do_remote_decode": True})
    assert params["kvstore"]["blocks"] == 22
    here("settle")
    answer = there.generate(turn, kv_transfer_params=params)
    outcome = last_outcome(daemon)
    assert outcome.peer == params["kvstore"]["source"]
    assert outcome.peer_blocks >= 21  # what is not there is computed: a block at most
    assert answer == here.generate(turn)


def a_prefix_is_fetched_while_it_is_computed(here, there, daemon, turn):
    """Both engines get the request at once: blocks travel as they are computed."""
    there.send(
        "generate",
        prompts=[turn],
        kv_transfer_params={
            "remote_prefiller": {
                "kv_request_id": "r",
                "remote_host": "10.0.0.1",
                "remote_port": 8000,
            }
        },
    )
    here("prefill", prompt=turn, kv_transfer_params={"remote_decoder": {"kv_request_id": "r"}})
    here("settle")
    (answer,) = there.receive()
    outcome = last_outcome(daemon)
    assert outcome.peer
    assert answer == here.generate(turn)


def a_source_that_is_no_member_costs_nothing(there, daemon, turn):
    params = {"remote_kv_source": {"remote_host": "10.9.9.9", "remote_port": 22}}
    answer = there.generate(turn, kv_transfer_params=params)
    there("reset_prefix_cache")
    assert there.generate(turn) == answer
    with Client(daemon.target) as client:
        assert client.admin.stats()["totals"]["peer_refused"]["unknown"] >= 1
