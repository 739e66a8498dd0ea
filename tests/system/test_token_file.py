"""A file of tokens tells whose a token is, and holds none."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.model.tenant import Role
from kvstore.system.redaction import redacted
from kvstore.system.token_file import (
    TOKENS_MAX,
    Tokens,
    changing,
    make_token,
    read_tokens,
    shown,
    write_tokens,
)


def test_a_token_is_found_and_no_other() -> None:
    text, entry = make_token("acme", Role.WRITER)
    tokens = Tokens([entry])
    assert tokens.find(shown(text), 0.0) == entry
    assert [len(part) for part in text.split("_", 2)] == [4, 12, 43]
    kind, token_id, secret = text.split("_", 2)
    for wrong in (
        "", "kvs1_", text[:-1], text + "A", text.upper(), f"kvs2_{token_id}_{secret}",
        f"{kind}_{'a' * 12}_{secret}", f"{kind}__{secret}", "x" * 10_000, f"{text}\n", "é" * 60,
    ):  # fmt: skip
        assert tokens.find(shown(wrong), 0.0) is None, wrong


def test_a_token_ends_when_it_says() -> None:
    text, entry = make_token("acme", Role.WRITER, not_after=100.0)
    tokens = Tokens([entry])
    assert tokens.find(shown(text), 99.9) == entry
    assert tokens.find(shown(text), 100.0) is None


def test_the_file_holds_digests_only_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    text, entry = make_token("acme", Role.READER, note="engine 7")
    with changing(path) as entries:
        entries.append(entry)
    assert read_tokens(path) == [entry]
    assert path.stat().st_mode & 0o777 == 0o600
    assert text.split("_", 2)[2] not in path.read_text()
    assert text not in redacted(f"it said {text} twice")


def test_a_change_is_durable_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, list[str]]] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(fd).st_mode), os.listdir(tmp_path)))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    write_tokens(tmp_path / "tokens", [])
    (is_directory, _), (then_directory, there) = synced
    assert (is_directory, then_directory, there) == (False, True, ["tokens"])


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = tmp_path / "tokens"
    path.symlink_to(tmp_path / "real/tokens")
    write_tokens(path, [make_token("acme", Role.READER)[1]])
    assert path.is_symlink()
    assert len(read_tokens(path)) == 1


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "tokens.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), changing(tmp_path / "tokens"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_changes_of_several_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens"

    def add() -> None:
        for _ in range(5):
            with changing(path) as entries:
                entries.append(make_token("acme", Role.READER)[1])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_tokens(path)) == 20
    assert sorted(each.name for each in tmp_path.iterdir()) == ["tokens", "tokens.lock"]


def test_an_error_meanwhile_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens"

    def fail() -> None:
        with changing(path) as entries:
            entries.append(make_token("acme", Role.READER)[1])
            raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        fail()
    assert read_tokens(path) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "tokens"
    write_tokens(path, [])
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_tokens(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused_and_a_new_one_is_the_directorys(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    os.chown(tmp_path, 65534, 65534)
    write_tokens(path, [])
    assert path.stat().st_uid == 65534
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        read_tokens(path)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"id": "x"}',
        '{"id": "aaaaaaaaaaaa", "sha256": "00", "tenant": "a", "role": "reader"}',
        f'{{"id": "aaaaaaaaaaaa", "sha256": "{"0" * 64}", "tenant": "A", "role": "reader"}}',
        f'{{"id": "aaaaaaaaaaaa", "sha256": "{"0" * 64}", "tenant": "a", "role": "root"}}',
        f'{{"id": "aaaaaaaaaaaa", "sha256": "{"0" * 64}", "tenant": "a", "role": "reader", "x":1}}',
        "\xff",
    ],
)
def test_a_line_that_is_no_tokens_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"# comment\n\n" + line.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="tokens:3"):
        read_tokens(path)


def test_the_number_of_tokens_is_bounded(tmp_path: Path) -> None:
    entry = make_token("acme", Role.READER)[1]
    with pytest.raises(InvalidRequest, match="revoke some"):
        write_tokens(tmp_path / "tokens", [entry] * (TOKENS_MAX + 1))
