"""Prefill here, decode there: both ways of naming the engine that has a prefix are understood."""

from __future__ import annotations

import pytest

from kvstore.model.member import Origin
from kvstore_vllm.settings import parse_settings
from tests.connectors.vllm.scheduler_engine import Engine, make_request

TABLES = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
NODE = "0123456789abcdef" * 2
REMOTE = {"kv_request_id": "r-1", "remote_host": "10.0.0.1", "remote_port": 8000}


@pytest.fixture
def engine() -> Engine:
    return Engine()


def asked(engine: Engine, params: object) -> Origin | None:
    engine.side.on_new_request(make_request(22, kv_transfer_params=params))
    return engine.client.asked[-1].origin


@pytest.mark.parametrize(
    ("params", "origin"),
    [
        (None, None),
        ({"do_remote_decode": True}, None),
        ({"remote_prefiller": REMOTE}, Origin("10.0.0.1:8000", 5)),
        ({"remote_kv_source": REMOTE}, Origin("10.0.0.1:8000", 0)),
        ({"kvstore": {"source": NODE, "blocks": 5}}, Origin(NODE, 5)),
        ({"kvstore": {"source": NODE}, "remote_prefiller": REMOTE}, Origin(NODE, 0)),
    ],
)
def test_who_has_the_prefix_reaches_the_daemon(engine, params, origin):
    assert asked(engine, params) == origin


def test_a_prefix_that_is_being_computed_is_waited_for_longer(engine):
    for params, wait_s in ((None, 5.0), ({"remote_prefiller": REMOTE}, 30.0)):
        asked(engine, params)
        assert engine.client.asked[-1].wait_s == wait_s


@pytest.mark.parametrize(
    "remote",
    [
        None,
        "10.0.0.1:8000",
        {},
        {"remote_host": "10.0.0.1"},
        {**REMOTE, "remote_port": 0},
        {**REMOTE, "remote_port": 65536},
        {**REMOTE, "remote_port": "8000"},
        {**REMOTE, "remote_host": ""},
        {**REMOTE, "remote_host": "h" * 10_000_000},
    ],
)
def test_what_cannot_be_read_is_counted_and_ignored(engine, remote):
    assert asked(engine, {"remote_prefiller": remote}) is None
    assert engine.side.counters.totals["hints_ignored"] == 1


def finished(engine: Engine, params: object):
    request = make_request(22, kv_transfer_params=params)
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    engine.admit(request, TABLES)
    engine.step(new=[(request, TABLES, 22)])
    return request, engine.side.request_finished(request)


def test_a_prefiller_answers_with_what_the_decoder_needs(engine):
    engine.client.node = NODE
    settings = {"target": "unix:/k.sock", "engine_address": "10.0.0.1:8000"}
    engine.side._settings = parse_settings(settings)
    request, answer = finished(engine, {"do_remote_decode": True})
    assert answer == {
        "kvstore": {"source": NODE, "blocks": 5},
        "remote_prefiller": {
            "kv_request_id": request.request_id,
            "remote_host": "10.0.0.1",
            "remote_port": 8000,
        },
    }
    assert asked(engine, answer) == Origin(NODE, 5)  # on the decoder's side
    _, answer = finished(engine, {"remote_decoder": {"kv_request_id": "mine"}})
    assert answer["remote_prefiller"]["kv_request_id"] == "mine"


def test_a_daemon_without_a_fleet_and_an_engine_without_an_address_hand_nothing_off(engine):
    assert finished(engine, {"do_remote_decode": True})[1] is None
    engine.client.node = NODE
    assert finished(engine, None)[1] is None
    assert finished(engine, {"do_remote_decode": False})[1] is None
