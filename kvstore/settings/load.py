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
from kvstore.settings.values import parse, toml_key, toml_value

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
    types = get_type_hints(Settings)
    return Settings(**{name: types[name](**values) for name, values in sections.items()})


def overridden(settings: Settings, overrides: Iterable[str]) -> Settings:
    """Return settings with some of them changed by texts such as "dram.capacity=8GiB".

    Raises ConfigError as `load_settings` does.
    """
    sections: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, table = _split_override(override, override)
        _merge(sections, name, table, where=override)
    changed = {name: replace(getattr(settings, name), **new) for name, new in sections.items()}
    return replace(settings, **changed)


def live_part(wanted: Settings, running: Settings) -> Settings:
    """Return what a daemon that runs with `running` can take of `wanted`."""
    taken = {}
    for section in fields(wanted):
        new, old = getattr(wanted, section.name), getattr(running, section.name)
        live = [item.name for item in fields(new) if item.metadata["live"]]
        taken[section.name] = replace(old, **{name: getattr(new, name) for name in live})
    return Settings(**taken)


class Entry(NamedTuple):
    """One setting as people write it. live: it can change while the daemon runs."""

    key: str
    value: str
    live: bool


def entries(settings: Settings) -> list[Entry]:
    """Return every setting."""
    return [
        Entry(
            f"{section.name}.{toml_key(item)}",
            toml_value(item, getattr(getattr(settings, section.name), item.name)),
            item.metadata["live"],
        )
        for section in fields(settings)
        for item in fields(getattr(settings, section.name))
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
    types = get_type_hints(Settings)
    return Settings(**{name: types[name](**values) for name, values in sections.items()})


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
    items = {toml_key(item): item for item in fields(types[name])}
    for key, value in table.items():
        if key not in items:
            names = [f"{name}.{valid}" for valid in items]
            raise ConfigError(
                f"{where}: unknown key {name}.{key}{_nearest(f'{name}.{key}', names)}"
            )
        try:
            parsed = parse(items[key], get_type_hints(types[name])[items[key].name], value)
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
