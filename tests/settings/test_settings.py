"""Settings: printable, loadable, and strict about every key."""

import itertools
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.settings import (
    DramSettings,
    FileSettings,
    ServerSettings,
    Settings,
    default_socket,
    load_settings,
    parse_size,
)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(
            server=ServerSettings(listen="", socket='/tmp/a "quoted" \\ name', drain_s=0.5),
            dram=DramSettings(capacity_bytes=3 * 4096 * 1000),
            file=FileSettings(path="/data/ü", direct=False, codec="zstd"),
        ),
        Settings(file=FileSettings(path=("/a", '/b "quoted"'), free_bytes_min=1 << 30)),
    ],
)
def test_printed_settings_load_back_equal(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(settings.to_toml(), encoding="utf-8")
    assert load_settings(file) == settings


def test_every_setting_is_documented() -> None:
    lines = Settings().to_toml().splitlines()
    for before, line in itertools.pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert before.startswith("# "), line


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[dram]\ncapacity = "2GiB"\n[file]\nthreads = 2\n')
    settings = load_settings(file, ["dram.capacity=1.5GiB", "file.direct=false"])
    assert settings.dram.capacity_bytes == 3 << 29
    assert (settings.file.threads, settings.file.direct) == (2, False)


def test_the_file_tier_has_one_directory_or_several() -> None:
    assert load_settings(None, ["file.path=/a"]).file.paths == ("/a",)
    assert load_settings(None, ["file.path="]).file.paths == ()
    assert load_settings(None, ['file.path=["/a", "/b"]']).file.paths == ("/a", "/b")


def test_the_page_may_have_several_names() -> None:
    settings = load_settings(None, ['server.page_hosts=["kv.example", "[fd00::7]", "10.0.0.7"]'])
    assert settings.server.page_names == ("kv.example", "[fd00::7]", "10.0.0.7")


def test_a_misspelt_key_is_refused_with_the_key_the_file_and_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[dram]\ncapcity = "2GiB"\n')
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    for word in (str(file), "dram.capcity", "dram.capacity"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("drm.capacity=1GiB", "dram"),
        ("dram.capacity=1GB", "GiB"),
        ("dram.capacity", "section.key=value"),
        ("file.threads=many", "threads"),
        ("file.threads=0", "1..256"),
        ("file.direct=maybe", "true or false"),
        ("server.listen=0.0.0.0:7700", "TLS"),
        ("server.metrics_listen=example.com:1", "loopback"),
        ("server.listen=127.0.0.1", "127.0.0.1:7700"),
        ("server.listen=127.0.0.1:99999", "127.0.0.1:7700"),
        ("server.listen=127.0.0.1:7700", "server.listen_open=true"),
        ("limits.lease_s=nan", "lease_s"),
        (f"server.socket=/tmp/{'x' * 120}", "shorter"),
        ("dram.capacity=1048577", "4096"),
        ("file.path=~/kv", "write the directory out"),
        ('file.path=["/a", "~kv/b"]', "write the directory out"),
        ("server.socket=~/kv.sock", "write the directory out"),
        ("object.url=file://rel/obj", "file:///"),
        ("server.page_hosts=https://kv.example", "without https:// and port"),
        ("server.page_hosts=kv.example:7701", "without https:// and port"),
        ("server.page_hosts=kv.example,other.example", "several are"),
        ("server.page_hosts=fd00::7", "fd00::7"),
        ('server.page_hosts=["kv.example", ""]', "no name of a host"),
        ("file.path=[1]", "array"),
        ("file.path=[/a", "array"),
        ('file.path=["/a", ""]', "empty"),
        ("file.hang_s=0", "hang_s"),
        ("dram.shadow_blocks=65537", "0..65536"),
        ("file.shadow_blocks=-1", "0..65536"),
    ],
)
def test_an_impossible_value_is_refused_and_named(override: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_settings(None, [override])


def test_a_file_that_is_not_there_or_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_settings(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("dram = [")
    with pytest.raises(ConfigError, match="not TOML"):
        load_settings(tmp_path / "bad.toml")
    (tmp_path / "flat.toml").write_text("dram = 1")
    with pytest.raises(ConfigError, match=r"\[dram\]"):
        load_settings(tmp_path / "flat.toml")


def test_sizes_are_binary_and_exact() -> None:
    assert parse_size("4096") == 4096
    assert parse_size("1.5GiB") == 3 << 29
    assert parse_size("2 TiB") == 2 << 40
    for wrong in ("", "-1", "1KB", "1e9", "GiB"):
        with pytest.raises(ConfigError):
            parse_size(wrong)


@pytest.mark.parametrize(
    ("wrong", "meant"), [("1GB", "1GiB"), ("1.5g", "1.5GiB"), ("64mb", "64MiB"), ("2tib", "2TiB")]
)
def test_a_size_in_another_unit_is_refused_with_the_one_that_may_be_meant(
    wrong: str, meant: str
) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {meant}\?"):
        parse_size(wrong)
    with pytest.raises(ConfigError, match=r"2TiB$"):
        parse_size("12 parsecs")


def test_the_default_socket_is_one_that_can_be_made() -> None:
    path = default_socket({"XDG_RUNTIME_DIR": "/run/user/7"})
    assert path in ("/run/kvstore/kvstore.sock", "/run/user/7/kvstore/kvstore.sock")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("metrics.listen=1", "unknown section [metrics]; did you mean server.metrics_listen?"),
        ("limit.lease_s=1", "unknown section [limit]; did you mean limits.lease_s?"),
        ("memory.size=1", "[memory]; the sections are server, dram, file, object, limits"),
        ("file.threads=many", "file.threads: 'many' is not a whole number"),
        ("file.hang_s=soon", "file.hang_s: 'soon' is not a number"),
        ("file.direct=yes", "file.direct: 'yes' is not true or false"),
        ("dram.capacity=0", "dram.capacity=0 is not in 1MiB..1024TiB"),
        ("file.threads=0", "file.threads=0 is not in 1..256"),
    ],
)
def test_a_wrong_override_is_answered_with_what_may_be_written(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings(None, [override])
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("file", "file.write_per_day=-1 is not in 0..1048576TiB"),
        ("tenants.acme", "tenants.acme.write_per_day=-1: 0 is its part of file.write_per_day"),
    ],
)
def test_a_write_budget_below_none_is_refused(tmp_path: Path, section: str, told: str) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(f"[{section}]\nwrite_per_day = -1\n")
    with pytest.raises(ConfigError) as raised:
        load_settings(file)
    assert told in str(raised.value)
