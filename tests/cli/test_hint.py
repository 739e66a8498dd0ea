"""`kvstore hint`: what it says, and what it exits with."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore import Client, KeyChain, root_key
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_namespace, sample_records
from tests.cli.run import kvstore

SPEC = sample_namespace("hinted-by-cli")
TOKENS = list(range(500, 660))


@pytest.fixture(scope="module")
def at(daemon: Daemon) -> tuple[str, str]:
    return talk(daemon, "chat-17", TOKENS)


def talk(daemon: Daemon, session_id: str, tokens: Sequence[int]) -> tuple[str, str]:
    """Have a conversation put a prefix and ask for it; return the options that name the daemon."""
    with Client(daemon.target, name="engine") as client:
        namespace_id = client.register(SPEC)
        keys = KeyChain(root_key(namespace_id), SPEC.block_tokens).update(tokens)
        client.put(namespace_id, keys, sample_records(keys), durable=True)
        client.release(client.acquire(namespace_id, keys, session_id=session_id).lease_id)
    return "--target", daemon.target


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("expect", "--in", "30"), "10 of 10 blocks are expected in 30 s"),
        (("pin", "--ttl", "60"), "10 of 10 blocks"),
        (("pin", "--ttl", "60", "--bytes", "1"), "0 of 10 blocks"),
        (("end",), "10 of 10 blocks belong to this conversation alone"),
    ],
)
def test_a_hint_says_what_it_has_done(
    at: tuple[str, str], args: tuple[str, ...], said: str
) -> None:
    done = kvstore("hint", *args, "chat-17", *at)
    assert (done.exit_code, said in done.output) == (0, True), done.output


def test_what_a_hint_sent_down_another_brings_up(daemon: Daemon) -> None:
    at = talk(daemon, "chat-19", range(700, 860))
    down = kvstore("hint", "demote", "chat-19", *at)
    up = kvstore("hint", "prefetch", "chat-19", *at)
    assert down.exit_code == up.exit_code == 0
    assert "10 of 10 blocks (195.3 KiB) were demoted to the file tier" in down.output
    assert "10 of 10 blocks were promoted to dram" in up.output


def test_a_prompt_names_a_prefix(at: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    namespace = ("--namespace", SPEC.id.hex())
    done = kvstore("hint", "pin", "--prompt", str(file), *namespace, "--ttl", "1", "--json", *at)
    report = json.loads(done.output)
    assert (report["kind"], report["done_blocks"], report["short"]) == ("pin", 10, "")


def test_a_prompt_longer_than_a_call_is_hinted_at_as_far_as_one_goes() -> None:
    with Daemon("limits.batch_keys_max=4", file=False) as daemon:
        with Client(daemon.start().target) as client:
            namespace_id = client.register(SPEC)
            keys = KeyChain(root_key(namespace_id), SPEC.block_tokens).update(TOKENS)
            client.put(namespace_id, keys, sample_records(keys))
        ask = ("hint", "expect", "--in", "30", "--target", daemon.target, "--prompt", "-")
        done = kvstore(*ask, stdin=json.dumps(TOKENS))
        assert "4 of 4 blocks are expected" in done.stdout, done.output
        assert "the first 4 blocks" in done.stderr
        done = kvstore(*ask, stdin=json.dumps(TOKENS[: 4 * SPEC.block_tokens]))
        assert "4 of 4 blocks are expected" in done.stdout
        assert done.stderr == ""
        daemon.stop()


def test_an_unknown_conversation_is_an_error_for_scripts(at: tuple[str, str]) -> None:
    done = kvstore("hint", "end", "chat-18", *at)
    assert done.exit_code == 1
    assert "no request of this conversation was seen" in done.output


def test_a_hint_about_nothing_is_wrong_usage(at: tuple[str, str]) -> None:
    assert kvstore("hint", "end", *at).exit_code == 2
