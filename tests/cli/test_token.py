"""`kvstore token` and `whoami`, against the file and a real daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.system.token_file import Tokens, read_tokens, shown
from kvstore.testing.daemon import Daemon
from tests.cli.run import kvstore


def test_a_token_is_printed_once_and_found_by_its_id(tmp_path: Path) -> None:
    file = str(tmp_path / "tokens")
    made = kvstore("token", "create", "--file", file, "--role", "reader", "--note", "engine 7")
    text = made.output.strip()
    assert made.exit_code == 0
    entry = Tokens(read_tokens(Path(file))).find(shown(text), 0.0)
    assert entry is not None
    listed = kvstore("token", "list", "--file", file).output
    assert listed.split()[:3] == [entry.id, "default", "reader"]
    assert "ends in 90 days" in listed
    assert "engine 7" in listed
    assert text.split("_", 2)[2] not in listed
    assert kvstore("token", "revoke", "--file", file, entry.id).output == f"revoked {entry.id}\n"
    assert read_tokens(Path(file)) == []


def test_a_token_can_go_into_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    file, out = tmp_path / "tokens", tmp_path / "engine.token"
    words = ("--file", str(file), "--role", "writer", "--out", str(out), "--json")
    made = kvstore("token", "create", *words)
    assert "token" not in json.loads(made.output)
    assert out.stat().st_mode & 0o777 == 0o600
    found = Tokens(read_tokens(file)).find(shown(out.read_text().strip()), 0.0)
    assert found is not None
    assert found.id == json.loads(made.output)["id"]
    again = kvstore("token", "create", *words)
    assert again.exit_code == 1
    assert "File exists" in again.output
    assert len(read_tokens(file)) == 1, "nobody holds the second one"


def test_the_settings_name_the_file(tmp_path: Path) -> None:
    config = tmp_path / "kvstore.toml"
    config.write_text(f'[security]\ntokens = "{tmp_path}/tokens"\n')
    words = ("--config", str(config), "--role", "admin", "--tenant", "acme", "--expires", "never")
    assert kvstore("token", "create", *words).exit_code == 0
    (told,) = json.loads(kvstore("token", "list", "--config", str(config), "--json").output)
    assert (told["tenant"], told["role"], told["not_after"]) == ("acme", "admin", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("create", "--role", "writer"), "say which file"),
        (("create", "--file", "x", "--role", "root"), "reader"),
        (("create", "--file", "x", "--role", "reader", "--expires", "soon"), "write 90d"),
        (("create", "--file", "x", "--role", "reader", "--tenant", "A B"), "no tenant's name"),
        (("revoke", "--file", "x"), "--expired"),
    ],
)
def test_wrong_usage_says_what_is_right(words: tuple[str, ...], said: str) -> None:
    done = kvstore("token", *words)
    assert done.exit_code == 2
    assert said in done.output


def test_an_unknown_id_revokes_nothing(tmp_path: Path) -> None:
    file = str(tmp_path / "tokens")
    kvstore("token", "create", "--file", file, "--role", "reader")
    done = kvstore("token", "revoke", "--file", file, "nobodys")
    assert done.exit_code == 1
    assert "nobodys" in done.output
    assert len(read_tokens(Path(file))) == 1


def test_whoami_tells_the_role_of_a_unix_socket(daemon: Daemon) -> None:
    assert "role admin, by unix socket" in kvstore("whoami", "--target", daemon.target).output
    told = json.loads(kvstore("whoami", "--target", daemon.target, "--json").output)
    assert (told["tenant"], told["role"]) == ("default", "admin")
