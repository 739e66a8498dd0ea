"""Hints of a request reach the daemon: from its body, or from its headers."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvstore import Unavailable
from kvstore_vllm.headers import HintHeaders
from tests.connectors.vllm.scheduler_engine import Engine, make_request

TABLES = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])


@pytest.fixture
def engine() -> Engine:
    return Engine()


def finish(engine: Engine, hints: object):
    """Let a request of 5 full blocks run, and finish; return the orders of its saves."""
    request = make_request(22, kv_transfer_params={"kvstore": hints, "do_remote_decode": False})
    engine.side.on_new_request(request)
    assert engine.side.num_new_matched_tokens(request, 0) == (0, False)
    engine.admit(request, TABLES)
    engine.step(new=[(request, TABLES, 22)])
    engine.side.request_finished(request)
    return engine.step().saves


def test_hints_are_sent_when_the_request_has_finished(engine):
    hints = {"session_id": "s", "end_session": True, "pin_s": 60, "pin_bytes": 5, "demote": True}
    saves = finish(engine, hints)
    assert engine.client.hinted == [("end", "s", 5), ("pin", "s", 5, 60, 5), ("demote", "s", 5)]
    assert engine.client.asked[0].session_id == "s"
    assert {order.session_id for order in saves} == {"s"}
    assert engine.side.counters.totals["hints"] == 3


@pytest.mark.parametrize(("fidelity", "refined"), [("fine", True), ("base", False)])
def test_a_request_insists_on_fine_parts_of_what_it_loads_and_saves(engine, fidelity, refined):
    saves = finish(engine, {"fidelity": fidelity})
    assert [each.refined for each in engine.client.asked] == [refined]
    assert {order.refined for order in saves} == {refined}
    assert engine.client.hinted == []
    assert engine.side.counters.totals["hints_ignored"] == 0


def test_an_expected_request_needs_no_name(engine):
    finish(engine, {"expect_s": 12.5})
    assert engine.client.hinted == [("expect", "", 5, 12.5)]


@pytest.mark.parametrize(
    "hints",
    [
        7,
        "end",
        {"session_id": 3},
        {"end_sesion": True},
        {"expect_s": -1},
        {"pin_s": 1e99},
        {"fidelity": "best"},
        {"fidelity": None},
    ],
)
def test_hints_that_cannot_be_read_are_counted_and_harm_nobody(engine, hints):
    assert finish(engine, hints)
    assert engine.client.hinted == []
    assert engine.side.counters.totals["hints_ignored"] == 1


def test_a_daemon_that_is_away_costs_the_hint(engine):
    engine.client.error = Unavailable("gone")
    finish(engine, {"session_id": "s", "end_session": True})
    engine.client.available = False
    finish(engine, {"session_id": "s", "end_session": True})
    assert engine.side.counters.totals["hints_failed"] == 2


def through(headers: dict[str, str], body: bytes, path: str = "/v1/completions", cut: int = 0):
    """Send a request through the middleware; return the body and headers that the server sees."""
    pieces = [body[:cut], body[cut:]] if cut else [body]
    messages = [
        {"type": "http.request", "body": piece, "more_body": at < len(pieces) - 1}
        for at, piece in enumerate(pieces)
    ]
    seen = {}

    async def server(scope, receive, send):
        whole, more = b"", True
        while more:
            message = await receive()
            whole += message["body"]
            more = message["more_body"]
        seen.update(body=whole, headers=dict(scope["headers"]))

    async def receive():
        return messages.pop(0)

    async def send(message):
        raise AssertionError("nothing is sent here")

    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [*encoded, (b"content-length", str(len(body)).encode())],
    }
    asyncio.run(HintHeaders(server)(scope, receive, send))
    assert int(seen["headers"][b"content-length"]) == len(seen["body"])
    return seen["body"]


def test_headers_become_hints_of_the_body():
    headers = {"X-Session-ID": "s", "X-Session-End": "true", "X-Session-Expect-S": "30"}
    body = json.loads(through(headers, b'{"prompt": "a", "max_tokens": 1}', cut=7))
    assert body == {
        "prompt": "a",
        "max_tokens": 1,
        "kv_transfer_params": {"kvstore": {"session_id": "s", "end_session": True, "expect_s": 30}},
    }


def test_what_the_body_says_wins_and_other_connectors_keep_theirs():
    said = {"kv_transfer_params": {"remote": 1, "kvstore": {"session_id": "mine"}}}
    body = json.loads(
        through({"X-Session-ID": "s", "X-Session-Pin-S": "9"}, json.dumps(said).encode())
    )
    own = {"session_id": "mine", "pin_s": 9}
    assert body == {"kv_transfer_params": {"remote": 1, "kvstore": own}}


@pytest.mark.parametrize(
    ("headers", "body", "path"),
    [
        ({}, b'{"prompt": "a"}', "/v1/completions"),
        ({"X-Session-ID": "s"}, b'{"prompt": "a"}', "/tokenize"),
        ({"X-Session-ID": "s"}, b"[1, 2]", "/v1/completions"),
        ({"X-Session-ID": "s"}, b'{"prompt":', "/v1/completions"),
        ({"X-Session-ID": "s"}, b'{"kv_transfer_params": 3}', "/v1/completions"),
        ({"X-Session-ID": "s"}, b'{"kv_transfer_params": {"kvstore": 3}}', "/v1/completions"),
    ],
)
def test_everything_else_passes_untouched(headers, body, path):
    assert through(headers, body, path, cut=4) == body
