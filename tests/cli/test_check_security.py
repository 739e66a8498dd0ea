"""`kvstore doctor` looks at certificates, the modes of files with secrets, and swap."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from pathlib import Path

import pytest

from kvstore.cli.check_keys import check_keys
from kvstore.cli.check_security import check_security, check_shown
from kvstore.model.tenant import Role
from kvstore.settings import load_settings
from kvstore.store.findings import Finding, Level
from kvstore.system.token_file import changing, make_token
from tests.tls import Authority, Files

SWAP_ON = "Filename Type Size Used Priority\n/dev/sda2 partition 8388604 0 -2\n"


class Checked:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory)
        self.pair: Files = self.authority.issue("server")
        self.tokens = directory / "tokens"
        self.swaps = directory / "swaps"
        self.swaps.write_text(SWAP_ON.splitlines()[0])

    def __call__(self) -> dict[str, Finding]:
        settings = load_settings(
            None,
            [
                f"tls.cert={self.pair.cert}",
                f"tls.key={self.pair.key}",
                f"tls.client_ca={self.authority.ca}",
                "tls.require_client_cert=true",
                f"security.tokens={self.tokens}",
            ],
        )
        return {each.about: each for each in check_security(settings, swaps=self.swaps)}


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    return Checked(tmp_path)


def test_nothing_is_looked_at_where_nothing_is_configured() -> None:
    assert list(check_security(load_settings())) == []


def test_what_is_right_is_said_to_be(checked: Checked) -> None:
    with changing(checked.tokens) as entries:
        entries.append(make_token("default", Role.READER)[1])
        entries.append(make_token("default", Role.READER, not_after=1.0)[1])
    found = checked()
    assert {each.level for each in found.values()} == {Level.OK}
    assert "1 of 2 are valid" in found["tokens"].found


@pytest.mark.parametrize(("days", "level"), [(400, Level.OK), (3, Level.WRONG), (-1, Level.WRONG)])
def test_the_end_of_a_certificate_is_seen_in_time(
    checked: Checked, days: int, level: Level
) -> None:
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days, hours=1)
    checked.pair = checked.authority.issue("server", not_after=ends)
    found = checked()["certificate"]
    assert found.level is level
    assert ("ended" if days < 0 else "ends in") in found.found


def test_a_pair_that_is_none_is_wrong(checked: Checked) -> None:
    checked.pair.cert.write_bytes(checked.authority.issue("other").cert.read_bytes())
    assert checked()["certificate"].level is Level.WRONG


@pytest.mark.parametrize("name", ["tls key", "tokens"])
def test_files_that_others_may_read_are_wrong(checked: Checked, name: str) -> None:
    with changing(checked.tokens) as entries:
        entries.append(make_token("default", Role.READER)[1])
    path = checked.pair.key if name == "tls key" else checked.tokens
    path.chmod(0o644)
    found = checked()[name]
    assert found.level is Level.WRONG
    assert f"chmod 600 {path}" in found.do


def test_swap_is_wrong_where_there_are_keys(checked: Checked) -> None:
    checked.swaps.write_text(SWAP_ON)
    assert checked()["swap"].level is Level.WRONG


def test_each_thing_is_said_once_where_files_are_encrypted(checked: Checked) -> None:
    root = checked.directory / "root"
    root.write_bytes(os.urandom(32))
    root.chmod(0o600)
    pair = [f"tls.cert={checked.pair.cert}", f"tls.key={checked.pair.key}"]
    key = [f"security.root_key_file={root}", f"file.path={checked.directory}/file"]
    settings = load_settings(None, [*pair, *key])
    found = [*check_keys(settings), *check_security(settings, swaps=checked.swaps)]
    assert Counter(each.about for each in found if each.about in ("root key", "swap")) == {
        "root key": 1,
        "swap": 1,
    }


def test_no_token_at_all_is_told(checked: Checked) -> None:
    found = checked()["tokens"]
    assert found.level is Level.NOTE
    assert "kvstore token create" in found.do


def test_a_token_of_ones_own_that_others_may_read_is_wrong(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("kvs1_")
    token.chmod(0o644)
    (found,) = check_shown(str(token), None)
    assert (found.level, found.about) == (Level.WRONG, "token file")
    token.chmod(0o600)
    assert [each.level for each in check_shown(str(token), None)] == [Level.OK]
