"""Values of settings as people write them: sizes, addresses, paths, TOML."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import tomllib
from dataclasses import Field, fields
from fractions import Fraction
from typing import Any

from kvstore.model.errors import ConfigError

SIZE_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_size(text: str) -> int:
    """Return bytes for "4096", "512MiB" or "1.5GiB". Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]{0,3})", text.strip())
    if found is None or found[2] not in SIZE_UNITS:
        unit = f"{found[2][:1].upper()}iB" if found is not None else ""
        meant = f"; did you mean {found[1]}{unit}?" if found and unit in SIZE_UNITS else ""
        raise ConfigError(f"{text!r} is not a size: write 4096, 512MiB, 1.5GiB or 2TiB{meant}")
    return int(Fraction(found[1]) * SIZE_UNITS[found[2]])


def parse_listen(key: str, text: str, *, loopback_only: bool = True) -> tuple[str, int] | None:
    """Return (host, port) of "127.0.0.1:7700" or "[::1]:7700"; None for "".

    Raises ConfigError if malformed, or if it is not loopback and has to be.
    """
    if not text:
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"{key}={text!r} is not an address: write 127.0.0.1:7700")
    if loopback_only and not is_loopback(host):
        raise ConfigError(
            f"{key}={text!r} is not a loopback address: anyone on the network could read every "
            "prompt's KV. Set tls.cert and tls.key for TLS, and security.tokens or "
            "tls.require_client_cert for credentials; or use 127.0.0.1"
        )
    if not (is_loopback(host) or _is_ip(host)):
        raise ConfigError(f"{key}={text!r} names no IP address: write 0.0.0.0:7700 or [::]:7700")
    return ("127.0.0.1" if host == "localhost" else host), int(port)


def is_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Tell whether only this host can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse(item: Field[Any], kind: Any, value: Any) -> Any:
    """Return `value`, from TOML or from an override's text, as the type the field declares."""
    if kind == str | tuple[str, ...]:
        return _one_or_several(value)
    if is_size(item) and isinstance(value, str):
        return parse_size(value)
    if kind is bool and value in ("true", "false", True, False):
        return value in ("true", True)
    if kind in (int, float) and isinstance(value, str):
        return _number(kind, value)
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    raise ConfigError(f"{value!r} is not {_WORDS.get(kind, 'a text')}")


_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def _number(kind: type[int] | type[float], text: str) -> int | float:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not {_WORDS[kind]}") from error


def _one_or_several(value: Any) -> str | tuple[str, ...]:
    """Return a text, or the texts of an array, which an override writes as TOML does."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f'{value!r} is not an array: write ["/a", "/b"]') from error
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ConfigError(f'{value!r} is not a text or an array of texts: write ["/a", "/b"]')


def is_size(item: Field[Any]) -> bool:
    return "_bytes" in item.name


def declared(section: Any) -> list[Field[Any]]:
    """Return the settings of a section, or of its class."""
    return [item for item in fields(section) if "doc" in item.metadata]


def toml_key(item: Field[Any]) -> str:
    return item.metadata.get("key") or item.name.replace("_bytes", "")


def toml_value(item: Field[Any], value: Any) -> str:
    if is_size(item):
        return f'"{size_text(value)}"'
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(item, each) for each in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def size_text(nbytes: int) -> str:
    """Return what `parse_size` reads as `nbytes`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % SIZE_UNITS[unit] == 0:
            return f"{nbytes // SIZE_UNITS[unit]}{unit}"
    return str(nbytes)
