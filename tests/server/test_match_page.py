"""/v1/match: what a gateway without an index learns of a prompt, and who may ask."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from kvstore.client import Client
from kvstore.model.block import Group, Namespace
from kvstore.model.keys import KeyChain, root_key
from kvstore.server.match_page import BODY_NBYTES_MAX
from kvstore.testing.daemon import Daemon
from kvstore.testing.prompts import keys_of, prompt, store_prompt
from tests.cli.run import kvstore

SPACE = Namespace(16, (Group("g", 4096),), (("model", "m"),), name="org/m")
TOKENS = prompt(1, 10 * 16 + 3)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(file=False) as daemon, Client(daemon.start().target) as client:
        client.register(SPACE)
        store_prompt(client, SPACE, TOKENS[:64], told=False)
        yield daemon


def ask(
    daemon: Daemon, query: dict[str, str] | None = None, body: object = None, token: str = ""
) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{daemon.metrics_port}/v1/match"
    if query is not None:
        url += "?" + urlencode(query)
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else text


def test_tokens_and_keys_find_the_same(daemon: Daemon) -> None:
    keys = ",".join(key.hex() for key in keys_of(SPACE, TOKENS))
    tokens = ",".join(map(str, TOKENS))
    asked: list[tuple[dict[str, str] | None, object]] = [
        ({"model": "org/m", "token_ids": tokens}, None),
        ({"model": "org/m", "keys": keys}, None),
        ({"namespace": SPACE.id.hex()[:8], "keys": keys}, None),
        (None, {"model": "org/m", "token_ids": TOKENS}),
    ]
    for query, body in asked:
        status, told = ask(daemon, query, body)
        assert status == 200, told
        (found,) = told["namespaces"]
        assert found == {
            "namespace": SPACE.id.hex(),
            "model": "org/m",
            "block_tokens": 16,
            "asked_blocks": 10,
            "hit_blocks": 4,
            "dram_blocks": 4,
            "file_blocks": 0,
            "peers": [],
        }
    with Client(daemon.target) as client:
        client.register(SPACE)
        assert client.match(SPACE.id, keys_of(SPACE, TOKENS), fleet=True).holders == ()


def test_a_salt_makes_other_keys_and_may_be_needed(daemon: Daemon) -> None:
    private = Namespace(16, (Group("g", 4096),), (("model", "s"), ("salt", "required")), name="s")
    keys = KeyChain(root_key(private.id, b"pepper"), 16).update(TOKENS)
    with Client(daemon.target) as client:
        client.register(private)
        client.put(private.id, keys, [bytes(4096)] * len(keys))
    body = {"model": "s", "token_ids": TOKENS}
    status, told = ask(daemon, None, body)
    assert (status, "send salt" in told["error"]) == (400, True)
    for salt, hit in (("pepper", 10), ("salt", 0)):
        _, told = ask(daemon, None, {**body, "salt": salt})
        assert told["namespaces"][0]["hit_blocks"] == hit


@pytest.mark.parametrize(
    ("query", "body", "status", "words"),
    [
        ({}, None, 400, "say which model"),
        ({"model": "org/m"}, None, 400, "either tokens or keys"),
        ({"model": "nobody", "token_ids": "1"}, None, 400, "no engine has told"),
        ({"model": "org/m", "token_ids": "1,x"}, None, 400, "not a question"),
        ({"model": "org/m", "token_ids": "-1," * 16}, None, 400, "0..2**32-1"),
        ({"model": "org/m", "keys": "abc"}, None, 400, "hex"),
        ({"model": "org/m", "keys": "ab"}, None, 400, "64 digits"),
        ({"model": "org/m", "key": "ab"}, None, 400, "there is no 'key'"),
        (None, b"[", 400, "not a question"),
        (None, b"[" * 100_000, 400, "not a question"),
        (None, {"model": "org/m", "token_ids": [1.5]}, 400, "not a question"),
        (None, {"model": "org/m", "token_ids": [1] * 600_000}, 400, "at most"),
        (None, {"model": "org/m", "tokens": [1]}, 400, "unknown field"),
    ],
)
def test_what_is_no_question_is_refused(
    daemon: Daemon, query: dict[str, str] | None, body: object, status: int, words: str
) -> None:
    found, told = ask(daemon, query, body)
    assert found == status
    assert words in (told["error"] if isinstance(told, dict) else told)


@pytest.mark.parametrize(
    ("length", "status"),
    [("-5", 411), ("x", 411), (str(BODY_NBYTES_MAX + 1), 413), ("9" * 10, 413)],
)
def test_a_body_says_how_long_it_is(daemon: Daemon, length: str, status: int) -> None:
    with socket.create_connection(("127.0.0.1", daemon.metrics_port), timeout=10) as link:
        link.sendall(f"POST /v1/match HTTP/1.0\r\nContent-Length: {length}\r\n\r\n".encode())
        assert link.recv(100).startswith(f"HTTP/1.0 {status}".encode())


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (["localhost:1"], 200),
        (["127.0.0.1"], 200),
        (["evil.example"], 400),
        (["evil.example:7701"], 400),
        (["localhost", "evil.example"], 400),
        (["localhost:99999"], 400),
        ([], 400),
    ],
)
def test_on_loopback_without_credentials_a_request_names_this_host(
    daemon: Daemon, hosts: list[str], status: int
) -> None:
    """A site in a browser can point a name of its own at 127.0.0.1."""
    query = urlencode({"model": "org/m", "token_ids": ",".join(map(str, TOKENS))})
    head = "".join(f"Host: {each}\r\n" for each in hosts)
    with socket.create_connection(("127.0.0.1", daemon.metrics_port), timeout=10) as link:
        link.sendall(f"GET /v1/match?{query} HTTP/1.0\r\n{head}\r\n".encode())
        answer = link.makefile("rb").read()
    assert answer.startswith(f"HTTP/1.0 {status}".encode())
    assert (b"hit_blocks" in answer) == (status == 200)
    if status == 400:
        assert b"server.page_hosts" in answer


def test_with_credentials_it_takes_a_readers(tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    made = kvstore("token", "create", "--role", "reader", "--file", str(tokens), "--json")
    token = json.loads(made.stdout)["token"]
    with Daemon(f"security.tokens={tokens}", file=False) as daemon:
        with Client(daemon.start().target) as client:
            client.register(SPACE)
            store_prompt(client, SPACE, TOKENS, told=False)
        body = {"model": "org/m", "token_ids": TOKENS}
        assert ask(daemon, None, body)[0] == 401
        assert ask(daemon, None, body, token="kvs_wrong")[0] == 401
        status, told = ask(daemon, None, body, token=token)
        assert (status, told["namespaces"][0]["hit_blocks"]) == (200, 10)
