"""The salt of a request comes from its caller: never from its body, and never not at all."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import ConfigError, Namespace
from kvstore.model.block import SALTED
from kvstore_vllm import bodies
from kvstore_vllm.headers import TenantSalt
from tests.connectors.vllm.scheduler_engine import NAMESPACE, Engine, make_request

ASKED = {"model": "m", "prompt": "the same prompt"}


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "salt"
    file.write_bytes(bytes(range(32)))
    file.chmod(0o600)
    monkeypatch.setenv("KVSTORE_SALT_SECRET_FILE", str(file))
    monkeypatch.delenv("KVSTORE_SALT_HEADER", raising=False)
    return file


def server() -> Any:
    """Return a client of a server that tells the salt it got, as vLLM reads it."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        from fastapi import FastAPI
        from fastapi.testclient import TestClient
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    app = FastAPI()

    async def complete(request: Any) -> Any:
        return {"salt": request.cache_salt, "prompt": request.prompt}

    complete.__annotations__["request"] = CompletionRequest  # else it is a text, read elsewhere
    app.post("/v1/completions")(complete)

    @app.post("/reset")
    async def reset() -> Any:
        return "done"

    app.add_middleware(TenantSalt)
    return TestClient(app)


def salt_of(user: str | None, body: dict[str, Any] | None = None, name: str = "Authorization"):
    headers = {} if user is None else {name: user}
    answer = server().post("/v1/completions", json=body or ASKED, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["prompt"] == ASKED["prompt"]
    return answer.json()["salt"]


def test_each_caller_has_a_salt_of_its_own(secret):
    alice, bob = salt_of("Bearer alice"), salt_of("Bearer bob")
    assert alice == salt_of("Bearer alice")
    assert len({alice, bob}) == 2
    assert len(alice) == 64


def test_nobody_chooses_the_salt(secret):
    alice = salt_of("Bearer alice")
    assert salt_of("Bearer bob", {**ASKED, "cache_salt": alice}) == salt_of("Bearer bob")
    assert salt_of("Bearer alice", {**ASKED, "cache_salt": ""}) == alice


def test_a_key_that_is_there_twice_does_not_get_past(secret):
    body = json.dumps(ASKED)[:-1] + ', "cache_salt": "a", "cache_salt": "b"}'
    headers = {"Authorization": "Bearer bob", "Content-Type": "application/json"}
    answer = server().post("/v1/completions", content=body, headers=headers)
    assert answer.json()["salt"] == salt_of("Bearer bob")


def test_a_secret_of_its_own_makes_salts_of_its_own(secret):
    before = salt_of("Bearer alice")
    secret.write_bytes(bytes(range(1, 33)))
    assert salt_of("Bearer alice") != before


def test_the_gateway_names_the_user_in_a_header_of_its_choice(secret, monkeypatch):
    monkeypatch.setenv("KVSTORE_SALT_HEADER", "X-User")
    assert salt_of("alice", name="X-User") == salt_of("alice", name="x-user")
    assert salt_of("alice", name="X-User") != salt_of("bob", name="X-User")


def test_who_is_nobody_shares_nothing(secret):
    salts = {salt_of(None) for _ in range(3)} | {salt_of(None, {**ASKED, "cache_salt": "a"})}
    assert len(salts) == 4
    assert {len(salt) for salt in salts} == {64}


def test_two_names_are_refused(secret):
    both = [("Authorization", "Bearer alice"), ("Authorization", "Bearer bob")]
    answer = server().post("/v1/completions", json=ASKED, headers=both)
    assert answer.status_code == 400
    assert "twice" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"[1]", b"{", b'{"prompt": NaN}', b"7", b"\xff"])
def test_what_the_server_could_read_in_another_way_is_refused(secret, body):
    headers = {"Authorization": "Bearer bob", "Content-Type": "application/json"}
    answer = server().post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_a_body_that_is_too_long_is_refused(secret, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_NBYTES_MAX", 64)
    answer = server().post("/v1/completions", json={**ASKED, "prompt": "x" * 99})
    assert answer.status_code == 413


def test_calls_without_a_body_pass(secret):
    assert server().post("/reset").json() == "done"


def test_a_secret_that_is_none_keeps_the_server_from_starting(secret, monkeypatch):
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        TenantSalt(None)
    secret.chmod(0o600)
    secret.write_bytes(b"short")
    with pytest.raises(ConfigError, match="needs 32"):
        TenantSalt(None)
    secret.unlink()
    with pytest.raises(ConfigError, match="urandom"):
        TenantSalt(None)
    monkeypatch.delenv("KVSTORE_SALT_SECRET_FILE")
    with pytest.raises(ConfigError, match="names no file"):
        TenantSalt(None)


def test_the_connector_stores_nothing_without_a_salt_where_one_is_required():
    engine = Engine(require_salt=True)
    engine.client.hit_blocks = 3
    unsalted = make_request(22)
    engine.side.on_new_request(unsalted)
    assert engine.side.num_new_matched_tokens(unsalted, 0) == (0, False)
    assert engine.client.asked == []
    assert engine.side.counters.totals["bypassed_unsalted"] == 1
    salted = make_request(22, "salted", cache_salt="a")
    engine.side.on_new_request(salted)
    assert engine.side.num_new_matched_tokens(salted, 0) == (12, True)
    assert engine.side.counters.totals["bypassed_unsalted"] == 1


def test_a_namespace_says_that_a_salt_is_required():
    assert not NAMESPACE.salted
    assert Namespace.from_json(replace(NAMESPACE, identity=(SALTED,)).to_json()).salted
