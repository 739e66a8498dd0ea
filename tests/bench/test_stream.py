"""One request: what is timed, what is read out of the stream, and how it can go wrong."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore_bench.chat.client import Endpoint, EndpointKind
from kvstore_bench.chat.sample import Sample
from kvstore_bench.chat.sse import EVENT_NBYTES_MAX, EventParser, MalformedStream
from kvstore_bench.chat.workloads.workload import Message
from tests.bench.stub import Script, StubServer

# How much later than sent a piece may be read on a busy machine.
LATE_S = 1.0


def ask(
    server: StubServer | str, *, kind: EndpointKind = "chat", timeout_s: float = 20.0
) -> Sample:
    async def run() -> Sample:
        url = server if isinstance(server, str) else server.url
        async with Endpoint(url, kind=kind, api_key="secret", timeout_s=timeout_s) as endpoint:
            messages = [Message("user", "one two three")]
            return await endpoint.ask(
                messages, model="stub", conversation_id="a", turn=1, max_tokens=4
            )

    return asyncio.run(run())


def failure_of(script: Script, *, timeout_s: float = 20.0) -> tuple[str, str]:
    with StubServer(script) as server:
        sample = ask(server, timeout_s=timeout_s)
    assert sample.failure is not None
    return sample.failure.kind, sample.failure.message


def test_times_are_those_at_which_the_server_sent() -> None:
    with StubServer(Script(pieces=("a", "b", "c", "d"), first_s=0.15, gap_s=0.04)) as server:
        sample = ask(server)
        (received,) = server.received
    assert sample.failure is None
    assert sample.ttft_s is not None
    assert 0.14 < sample.ttft_s < received.sent[0] - received.arrived + LATE_S
    gaps = [late - early for early, late in zip(received.sent, received.sent[1:], strict=False)]
    assert len(sample.itl_s) == 3
    assert sum(sample.itl_s) == pytest.approx(sum(gaps), abs=LATE_S)
    assert sample.latency_s >= sample.ttft_s + sum(sample.itl_s)
    assert sample.tpot_s == pytest.approx(sum(sample.itl_s) / 3)


def test_text_and_usage_are_the_servers() -> None:
    with StubServer() as server:
        sample = ask(server)
        (received,) = server.received
    assert sample.output_text == "Hello there."
    assert (sample.input_tokens, sample.output_tokens, sample.cached_tokens) == (3, 3, 0)
    assert received.body["messages"] == [{"role": "user", "content": "one two three"}]
    assert received.body["stream_options"] == {"include_usage": True}
    assert received.headers["Authorization"] == "Bearer secret"


def test_completions_send_a_transcript() -> None:
    with StubServer() as server:
        sample = ask(server, kind="completions")
        (received,) = server.received
    assert received.path == "/v1/completions"
    assert received.body["prompt"] == "User: one two three\n\nAssistant:"
    assert sample.output_text == "Hello there."


def test_without_usage_tokens_are_unknown_not_guessed() -> None:
    with StubServer(Script(usage=False)) as server:
        sample = ask(server)
    assert sample.failure is None
    assert (sample.input_tokens, sample.output_tokens, sample.tpot_s) == (None, None, None)


def test_reasoning_counts_for_the_first_token_but_is_no_answer() -> None:
    with StubServer(Script(pieces=("hm", "yes"), reasoning=1, gap_s=0.1)) as server:
        sample = ask(server)
    assert sample.output_text == "yes"
    assert len(sample.itl_s) == 1


def test_an_answer_without_text_has_no_ttft() -> None:
    with StubServer(Script(pieces=())) as server:
        sample = ask(server)
    assert sample.failure is None
    assert sample.ttft_s is None


def test_a_finish_reason_ends_an_answer_without_done() -> None:
    with StubServer(Script(end="finish")) as server:
        assert ask(server).failure is None


def test_an_http_error_carries_the_servers_explanation() -> None:
    script = Script(status=500, error={"error": {"message": "engine is dead", "code": 500}})
    assert failure_of(script) == ("http", "HTTP 500: engine is dead")


def test_nobody_listening_is_a_connect_failure() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        sample = ask(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert sample.failure is not None
    assert sample.failure.kind == "connect"
    assert "cannot connect to http://127.0.0.1:" in sample.failure.message


def test_a_silent_server_is_a_timeout() -> None:
    kind, message = failure_of(Script(first_s=60), timeout_s=0.2)
    assert (kind, message) == ("timeout", "no complete answer within 0.2 s")


@pytest.mark.parametrize("end", ["cut", "nothing"])
def test_a_stream_that_ends_too_early_is_cut_and_keeps_what_came(end: str) -> None:
    with StubServer(Script(pieces=("Hel", "lo"), end=end, gap_s=0.05)) as server:
        sample = ask(server)
    assert sample.failure is not None
    assert sample.failure.kind == "cut"
    assert sample.output_text.startswith("Hel")


def test_an_error_inside_the_stream_is_the_servers() -> None:
    script = Script(pieces=("a", b'data: {"error": {"message": "out of memory"}}\n\n'))
    assert failure_of(script) == ("server", "out of memory")


@pytest.mark.parametrize("piece", [b"data: {broken\n\n", b'data: {"choices": 7}\n\n'])
def test_what_is_no_chunk_is_malformed(piece: bytes) -> None:
    kind, message = failure_of(Script(pieces=(piece,)))
    assert kind == "malformed"
    assert "no completion chunk" in message


def test_an_answer_that_is_no_stream_is_malformed() -> None:
    kind, message = failure_of(Script(content_type="text/html"))
    assert (kind, message) == ("malformed", "expected an event stream, got text/html")


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_events_do_not_depend_on_how_the_bytes_are_cut(step: int) -> None:
    stream = (
        b": hi\r\n\r\ndata: one\r\n\r\nid: 7\ndata: two\ndata:more\n\n\n\ndata: [DONE]\n\ndata: x"
    )
    parser = EventParser()
    events = []
    for start in range(0, len(stream), step):
        events += parser.feed(stream[start : start + step])
    assert events == [b"one", b"two\nmore", b"[DONE]"]


def test_an_endless_event_is_refused() -> None:
    with pytest.raises(MalformedStream, match="longer than"):
        EventParser().feed(b"data: " + b"x" * EVENT_NBYTES_MAX)


def resolve(server: StubServer | str, model: str | None) -> str:
    async def run() -> str:
        url = server if isinstance(server, str) else server.url + "/v1/"
        async with Endpoint(url) as endpoint:
            return await endpoint.resolve_model(model)

    return asyncio.run(run())


def test_the_only_served_model_needs_no_name() -> None:
    with StubServer() as server:
        assert resolve(server, None) == "stub"
        assert resolve(server, "stub") == "stub"


def test_an_unknown_model_lists_the_served_ones() -> None:
    with StubServer(models=("a", "b")) as server:
        for model in ("c", None):
            with pytest.raises(InvalidRequest, match="pass --model with one of: a, b"):
                resolve(server, model)


def test_an_unreachable_endpoint_says_what_to_do() -> None:
    with pytest.raises(Unavailable, match=r"nothing answers at .* Start the server"):
        resolve("http://127.0.0.1:1", None)
    with pytest.raises(InvalidRequest, match="starts with http"):
        resolve("localhost:8000", None)
