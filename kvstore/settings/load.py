"""Settings out of a TOML file and overrides, and back into texts."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from kvstore.model.errors import ConfigError
from kvstore.settings.sections import Settings
from kvstore.settings.tenants import TenantSettings
from kvstore.settings.values import declared, parse, toml_key, toml_value

TENANTS = "tenants"  # its sections are [tenants.NAME]
LIKE = 0.6  # how much of a misspelt name is that of the nearest one


def load_settings(path: Path | None = None, overrides: Iterable[str] = ()) -> Settings:
    """Build settings from a TOML file (or none) and overrides such as "dram.capacity=8GiB".

    Raises ConfigError that names the key, the file or override it stands in, and the nearest valid
    key.
    """
    sections: dict[str, dict[str, Any]] = {}
    if path is not None:
        for name, table in _read_toml(path).items():
            _merge(sections, name, table, where=str(path))
    for override in overrides:
        where = f"--set {override}"
        name, table = _split_override(override, where)
        _merge(sections, name, table, where=where)
    return _built(sections)


def overridden(settings: Settings, overrides: Iterable[str], *, adds: str = "") -> Settings:
    """Return settings with some of them changed by texts such as "dram.capacity=8GiB".

    adds: the tenant that they may add. Raises ConfigError as `load_settings` does, and for a tenant
    that is not there.
    """
    sections: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, table = _split_override(override, override)
        _merge(sections, name, table, where=override)
    known = {adds, *(each.name for each in settings.tenants)}
    for name in sections:
        tenant = name.partition(".")[2]
        if tenant and tenant not in known:
            raise ConfigError(f"there is no tenant {tenant} here: see `kvstore tenant list`")
    return _built(sections, settings)


def live_part(wanted: Settings, running: Settings) -> Settings:
    """Return what a daemon that runs with `running` can take of `wanted`."""
    before, taken = dict(running.sections()), {}
    for name, new in wanted.sections():
        if name in before:  # a tenant comes and goes by commands of its own
            live = [item.name for item in declared(new) if item.metadata["live"]]
            taken[name] = {each: getattr(new, each) for each in live}
    return _built(taken, running)


class Entry(NamedTuple):
    """One setting as people write it. live: it can change while the daemon runs."""

    key: str
    value: str
    live: bool


def entries(settings: Settings) -> list[Entry]:
    """Return every setting."""
    return [
        Entry(
            f"{name}.{toml_key(item)}",
            toml_value(item, getattr(section, item.name)),
            item.metadata["live"],
        )
        for name, section in settings.sections()
        for item in declared(section)
    ]


def settings_of(told: Iterable[Entry]) -> Settings:
    """Return the settings that `entries` were made of. Raises ConfigError for those of another
    release."""
    try:
        tables = tomllib.loads("".join(f"{each.key} = {each.value}\n" for each in told))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"these are no settings: {error}") from error
    sections: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        _merge(sections, name, table, where="the daemon")
    return _built(sections)


def _built(sections: dict[str, dict[str, Any]], base: Settings | None = None) -> Settings:
    """Return `base`, or the defaults, with some values of some sections."""
    before = dict((base or Settings()).sections())
    plain: dict[str, Any] = {}
    tenants = {each.name: each for each in base.tenants} if base is not None else {}
    for name, values in sections.items():
        prefix, dot, tenant = name.partition(".")
        if dot:
            found = tenants.get(tenant) or TenantSettings(name=tenant)
            tenants[tenant] = replace(found, **values)
        else:
            plain[prefix] = replace(before[prefix], **values)
    plain["tenants"] = tuple(sorted(tenants.values(), key=lambda each: each.name))
    return replace(base, **plain) if base is not None else Settings(**plain)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _split_override(override: str, where: str) -> tuple[str, dict[str, Any]]:
    dotted, equals, value = override.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(f"{where}: write section.key=value, e.g. dram.capacity=8GiB")
    return section, {key: value.strip()}


def _merge(sections: dict[str, dict[str, Any]], name: str, table: Any, *, where: str) -> None:
    types = get_type_hints(Settings)
    if name not in types:
        raise ConfigError(f"{where}: unknown section [{name}]{_meant(name, table)}")
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} is a section: write [{name}]")
    if name != TENANTS:
        _merge_one(sections, name, types[name], table, where=where)
        return
    for tenant, values in _by_tenant(table, where).items():
        sections.setdefault(f"{TENANTS}.{tenant}", {})
        _merge_one(sections, f"{TENANTS}.{tenant}", TenantSettings, values, where=where)


def _by_tenant(table: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the values of each tenant, with keys such as "dram.max"."""
    tenants: dict[str, dict[str, Any]] = {}
    for dotted, value in table.items():
        tenant, dot, key = dotted.partition(".")  # of an override
        if not dot and not isinstance(value, dict):
            raise ConfigError(f"{where}: write [tenants.{tenant}] and its settings below")
        tenants.setdefault(tenant, {}).update(_flat({key: value} if dot else value))
    return tenants


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _merge_one(
    sections: dict[str, dict[str, Any]], name: str, kind: Any, table: dict[str, Any], *, where: str
) -> None:
    items = {toml_key(item): item for item in declared(kind)}
    types = get_type_hints(kind)
    for key, value in table.items():
        if key not in items:
            names = [f"{name}.{valid}" for valid in items]
            raise ConfigError(
                f"{where}: unknown key {name}.{key}{_nearest(f'{name}.{key}', names)}"
            )
        try:
            parsed = parse(items[key], types[items[key].name], value)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{where}: {name}.{key}: {error}") from error
        sections.setdefault(name, {})[items[key].name] = parsed


def _meant(section: str, table: Any) -> str:
    """Return the key that is like one of a section there is none of, else all sections."""
    if isinstance(table, dict) and table:
        known = [each.key for each in entries(Settings())]
        near = _nearest(f"{section}.{next(iter(table))}", known, cutoff=LIKE)
        if near:
            return near
    return f"; the sections are {', '.join(each.name for each in fields(Settings))}"


def _nearest(wrong: str, valid: Sequence[str], cutoff: float = 0.0) -> str:
    near = difflib.get_close_matches(wrong, valid, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""
