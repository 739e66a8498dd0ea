"""No call over TCP without a valid credential, whatever its method; and none beyond its role."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore import Client
from kvstore.model.tenant import Role
from kvstore.server import rights
from kvstore.server.credentials import TokenFile
from kvstore.system.token_file import changing, make_token, shown
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.server.every_method import METHODS, OPTIONS, UNAUTHORIZED, ask, bearer

ROLES = list(Role)
BAD = ["no", "no scheme", "wrong", "unknown", "expired", "revoked", "foreign", "malformed"]


class Issuer:
    """A file of tokens, and the tokens in it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tokens"

    def issue(self, role: Role, tenant: str = "default", not_after: float = 0.0) -> str:
        token, entry = make_token(tenant, role, not_after=not_after)
        with changing(self.path) as entries:
            entries.append(entry)
        return token

    def revoke(self, token: str) -> None:
        with changing(self.path) as entries:
            entries[:] = [entry for entry in entries if entry.id != token.split("_")[1]]


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def tokens(issuer: Issuer) -> dict[str, str]:
    """One token of each role, and of each kind that is no use."""
    found = {role.word: issuer.issue(role) for role in ROLES}
    wrong = found["admin"][:-1] + ("A" if found["admin"][-1] != "A" else "B")
    revoked = issuer.issue(Role.ADMIN)
    issuer.revoke(revoked)
    return found | {
        "wrong": wrong,
        "unknown": make_token("default", Role.ADMIN)[0],
        "expired": issuer.issue(Role.ADMIN, not_after=time.time() - 1),
        "revoked": revoked,
        "foreign": issuer.issue(Role.ADMIN, tenant="acme"),
        "malformed": "kvs1_",
    }


@pytest.fixture(scope="module")
def daemon(issuer: Issuer, tokens: dict[str, str]) -> Iterator[Daemon]:
    settings = ("server.listen=127.0.0.1:0", f"security.tokens={issuer.path}")
    with Daemon(*settings, file=False) as daemon:
        daemon.start()
        with grpc.insecure_channel(daemon.address, options=OPTIONS) as channel:
            for role in ROLES:  # what was right before is never taken for a guess
                assert ask(channel, "WhoAmI", bearer(tokens[role.word])) == "answered"
        yield daemon


@pytest.fixture(scope="module")
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(daemon.address, options=OPTIONS) as channel:
        yield channel


def metadata_of(tokens: dict[str, str], credential: str) -> tuple[tuple[str, str], ...]:
    if credential == "no":
        return ()
    if credential == "no scheme":
        return (("authorization", tokens["admin"]),)
    return bearer(tokens[credential])


@pytest.mark.parametrize("credential", BAD)
def test_no_method_is_answered_without_a_valid_credential(
    channel: grpc.Channel, tokens: dict[str, str], credential: str
) -> None:
    metadata = metadata_of(tokens, credential)
    assert {name: ask(channel, name, metadata) for name in METHODS} == dict.fromkeys(
        METHODS, UNAUTHORIZED
    )


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.word)
def test_a_role_is_answered_what_the_table_says_and_no_more(
    channel: grpc.Channel, tokens: dict[str, str], role: Role
) -> None:
    metadata = bearer(tokens[role.word])
    allowed = {name for name in METHODS if ask(channel, name, metadata) != UNAUTHORIZED}
    expected = {name for name in METHODS if rights.RIGHTS[name] <= role}
    if role is Role.WRITER:
        expected -= {"Delete"}  # this one is no report of a wrong block
    assert allowed == expected


def test_refusals_tell_no_difference_between_wrong_expired_and_revoked(
    channel: grpc.Channel, tokens: dict[str, str]
) -> None:
    told = set()
    call = channel.unary_unary("/kvstore.rpc.v1.KVStore/WhoAmI")
    for credential in ("no", "wrong", "unknown", "expired", "revoked", "malformed"):
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", metadata=metadata_of(tokens, credential), timeout=5)
        told.add((caught.value.code(), caught.value.details()))  # type: ignore[attr-defined]
    assert len(told) == 1


def test_refusals_are_counted_by_method_and_reason(
    daemon: Daemon, channel: grpc.Channel, tokens: dict[str, str]
) -> None:
    def refused() -> dict[str, float]:
        with Client(daemon.target) as client:
            return dict(client.admin.stats()["totals"].get("rpc_errors", {}))

    time.sleep(1.0)  # the guesses of the tests before are a second ago
    before = refused()
    ask(channel, "Clear")
    ask(channel, "Clear", bearer(tokens["reader"]))
    ask(channel, "Clear", bearer(tokens["foreign"]))
    after = refused()
    for reason in ("credential", "role", "tenant"):
        name = f"Clear/Unauthorized/{reason}"
        assert after[name] - before.get(name, 0) == 1


def test_guesses_are_bounded_and_lock_out_nobody_who_was_right_before(
    daemon: Daemon, channel: grpc.Channel, tokens: dict[str, str], issuer: Issuer
) -> None:
    assert ask(channel, "WhoAmI", bearer(tokens["reader"])) == "answered"
    fresh = issuer.issue(Role.READER)
    until(lambda: ask(channel, "WhoAmI", bearer(fresh)) == "answered", 5)
    never_used = issuer.issue(Role.READER)
    time.sleep(2.0)  # until the file is read again
    while time.time() % 1 > 0.2:  # so that all of it is within one second
        time.sleep(0.01)
    for _ in range(12):
        assert ask(channel, "WhoAmI", bearer(tokens["unknown"])) == UNAUTHORIZED
    with Client(daemon.target) as client:
        guesses = client.admin.stats()["totals"]["rpc_errors"]
    assert guesses.get("WhoAmI/Unauthorized/guesses", 0) >= 1
    assert ask(channel, "WhoAmI", bearer(tokens["reader"])) == "answered"
    until(lambda: ask(channel, "WhoAmI", bearer(never_used)) == "answered", 5)


def test_a_revoked_token_is_refused_within_two_seconds_on_an_open_connection(
    channel: grpc.Channel, issuer: Issuer
) -> None:
    token = issuer.issue(Role.WRITER)
    until(lambda: ask(channel, "WhoAmI", bearer(token)) == "answered", 5)
    issuer.revoke(token)
    began = time.monotonic()
    until(lambda: ask(channel, "WhoAmI", bearer(token)) == UNAUTHORIZED, 5)
    assert time.monotonic() - began <= 2.0


@pytest.mark.parametrize("method", ["Record", "Get"])
def test_a_running_stream_ends_within_two_seconds_of_its_revocation(
    daemon: Daemon, channel: grpc.Channel, issuer: Issuer, method: str
) -> None:
    """A stream that waits for something to tell, and one whose reader is slow."""
    from kvstore.rpc.v1 import kvstore_pb2 as pb

    space, keys = sample_namespace(), sample_keys("stream", 64)
    with Client(daemon.target) as client:
        client.put(client.register(space), keys, sample_records(keys))
    token = issuer.issue(Role.OPERATOR)
    until(lambda: ask(channel, "WhoAmI", bearer(token)) == "answered", 5)
    if method == "Record":
        request: bytes = pb.RecordRequest(share=1.0).SerializeToString()
    else:
        request = pb.GetRequest(namespace_id=space.id, keys=b"".join(keys) * 64).SerializeToString()
    stream = channel.unary_stream(f"/kvstore.rpc.v1.KVStore/{method}")(
        request, metadata=bearer(token), timeout=60
    )
    next(stream)
    issuer.revoke(token)
    began = time.monotonic()
    error = None
    while error is None:
        try:
            next(stream)
            time.sleep(0.005)
        except grpc.RpcError as ended:
            error = dict(ended.trailing_metadata())  # type: ignore[attr-defined]
    assert time.monotonic() - began <= 2.0
    assert error["kvstore-error"] == UNAUTHORIZED


def test_a_call_that_waits_ends_when_its_token_expires(
    daemon: Daemon, channel: grpc.Channel, issuer: Issuer
) -> None:
    token = issuer.issue(Role.OPERATOR, not_after=time.time() + 2.0)
    until(lambda: ask(channel, "WhoAmI", bearer(token)) == "answered", 5)
    stream = channel.unary_stream("/kvstore.rpc.v1.KVStore/Record")(
        b"\x09\x00\x00\x00\x00\x00\x00\xf0\x3f", metadata=bearer(token), timeout=60
    )
    next(stream)
    with pytest.raises(grpc.RpcError):
        next(stream)
    assert ask(channel, "WhoAmI", bearer(token)) == UNAUTHORIZED


def test_a_file_that_is_wrong_leaves_the_tokens_as_they_are(
    daemon: Daemon, channel: grpc.Channel, tokens: dict[str, str], issuer: Issuer
) -> None:
    good = issuer.path.read_bytes()
    for spoil in ("line", "mode"):
        if spoil == "line":
            issuer.path.write_bytes(good + b"{half a line")
        else:
            issuer.path.write_bytes(good)
            issuer.path.chmod(0o644)
        until(lambda: "tokens=not_reloaded" in daemon.output(), 5)
        assert ask(channel, "WhoAmI", bearer(tokens["reader"])) == "answered"
    issuer.path.chmod(0o600)
    late = issuer.issue(Role.READER)
    until(lambda: ask(channel, "WhoAmI", bearer(late)) == "answered", 5)


def test_a_token_that_was_revoked_while_the_file_could_not_be_read_is_not_let_in_later(
    tmp_path: Path,
) -> None:
    issuer, told = Issuer(tmp_path), list[str]()
    token = issuer.issue(Role.READER)
    file = TokenFile(issuer.path, lambda _, outcome: told.append(outcome))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        await file.look()
        assert file.find(shown(token), time.time()) is not None
        issuer.revoke(token)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # no descriptor is left
        try:
            for _ in range(3):
                await file.look()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await file.look()

    asyncio.run(main())
    assert file.find(shown(token), time.time()) is None
    assert len(told) == 2  # said once, and that it is over
    assert told[1] == "ok"


def test_a_daemon_does_not_start_with_tokens_that_others_may_read(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    issuer.issue(Role.READER)
    issuer.path.chmod(0o640)
    settings = ("server.listen=127.0.0.1:0", f"security.tokens={issuer.path}")
    with Daemon(*settings, file=False) as daemon:
        daemon.start(wait=False)
        assert daemon.wait() == 2
        assert f"chmod 600 {issuer.path}" in daemon.output()
