"""`[tenants.NAME]`: read from TOML and overrides, checked together, printed so that they load."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.settings import Settings, entries, live_part, load_settings, overridden, settings_of

TOML = """
[dram]
capacity = "1GiB"
[tenants.acme]
weight = 2
dram = { guaranteed = "256MiB", max = "512MiB" }
unix = { uid = 1001, mode = "0711" }
certificates = ["spiffe://acme/engine", "acme.internal"]
[tenants.public]
arena = "sealed"
shared = true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(TOML)
    return path


def test_without_tenants_nothing_is_printed_about_them() -> None:
    assert Settings().tenants == ()
    assert "\n[tenants" not in Settings().to_toml()


def test_a_file_and_overrides_make_tenants(file: Path) -> None:
    settings = load_settings(file, ["tenants.acme.weight=3", "tenants.beta.dram.max=128MiB"])
    acme, beta, public = settings.tenants
    assert (acme.name, acme.weight, acme.dram_guaranteed_bytes) == ("acme", 3.0, 256 << 20)
    assert acme.dram_max_bytes == 512 << 20
    assert (acme.unix_uid, acme.directory_mode) == (1001, 0o711)
    assert acme.names == ("spiffe://acme/engine", "acme.internal")
    assert (beta.dram_max_bytes, beta.dram_max(settings)) == (128 << 20, 128 << 20)
    assert (public.shared, public.dram_max(settings)) == (True, 1 << 30)


def test_what_is_printed_loads_to_the_same(file: Path, tmp_path: Path) -> None:
    settings = load_settings(file)
    again = tmp_path / "again.toml"
    again.write_text(settings.to_toml())
    assert load_settings(again) == settings
    assert settings_of(entries(settings)) == settings
    assert 'dram.guaranteed = "256MiB"' in settings.to_toml()


def test_the_live_part_leaves_who_a_tenant_is(file: Path) -> None:
    running = load_settings(file)
    wanted = overridden(running, ["tenants.acme.weight=5", "tenants.acme.arena=sealed"])
    taken = live_part(wanted, running)
    assert (taken.tenants[0].weight, taken.tenants[0].arena) == (5.0, "direct")


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("tenants.Acme.weight=1", "no tenant's name"),
        ("tenants.acme.weight=0", "is not in 0.01"),
        ("tenants.acme.dram.guaranteed=8GiB", "together are guaranteed 8.*of dram"),
        ("tenants.acme.file.guaranteed=1TiB", "of file"),
        ("tenants.acme.dram.max=1MiB", "is less than tenants.acme.dram.guaranteed"),
        ("tenants.acme.dram.guarantee=1MiB", "did you mean tenants.acme.dram.guaranteed"),
        ("tenants.acme.arena=open", "direct, sealed"),
        ("tenants.acme.shared=true", "sealed"),
        ("tenants.acme.unix.uid=65534", "unknown user"),
        ("tenants.acme.unix.mode=0770", "0750"),
        ("tenants.acme.unix.mode=rwx", "0750"),
        ("tenants.acme=1", r"\[tenants.acme\]"),
    ],
)
def test_what_cannot_be_is_refused(assignment: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_settings(None, ["file.path=/tmp/x", assignment])


def test_what_tenants_are_guaranteed_of_the_bucket_has_to_fit_into_it() -> None:
    bucket = ["file.path=/tmp/x", "object.url=s3://bucket/kv", "object.capacity=10GiB"]
    parts = ["tenants.acme.object.guaranteed=6GiB", "tenants.beta.object.guaranteed=4GiB"]
    load_settings(None, [*bucket, *parts])
    with pytest.raises(ConfigError, match="guaranteed 11GiB of the bucket"):
        load_settings(None, [*bucket, *parts, "tenants.beta.object.guaranteed=5GiB"])
    with pytest.raises(ConfigError, match=r"object\.max=1GiB is less than"):
        load_settings(None, [*bucket, *parts, "tenants.beta.object.max=1GiB"])


@pytest.mark.parametrize("key", ["guaranteed", "max"])
def test_a_part_of_the_bucket_below_none_is_refused(tmp_path: Path, key: str) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(f"[tenants.acme]\nobject = {{ {key} = -1 }}\n")
    with pytest.raises(ConfigError, match=rf"object\.{key}=-1 is less than 0"):
        load_settings(file)


def test_only_one_tenant_is_shared(file: Path) -> None:
    more = ["tenants.other.arena=sealed", "tenants.other.shared=true"]
    with pytest.raises(ConfigError, match="two tenants are shared"):
        load_settings(file, more)


def test_a_tenants_socket_lies_in_a_directory_of_its_own() -> None:
    server = load_settings(None, ["server.socket=/run/k/kvstore.sock"]).server
    assert str(server.tenant_socket_path("acme")) == "/run/k/acme/kvstore.sock"
    with pytest.raises(ConfigError, match="unix sockets allow"):
        load_settings(None, [f"server.sockets=/{'d' * 90}", "tenants.acme.weight=1"])
