"""Settings: built once from one TOML file and explicit overrides, frozen, checked, printable.

Each setting is declared once, with its default, unit and trade-off; `--print-config` prints the
same words as comments. A field `x_bytes` is written `x = "4GiB"` in TOML. Unknown keys are errors,
so a typing mistake never silently means "the default".
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import pwd
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from kvstore.model.errors import ConfigError

SIZE_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SOCKET_PATH_NBYTES_MAX = 107 - len(".arena")
DIRECTORIES_MAX = 64
LIVE = " Live: it can change while the daemon runs."
ADMISSIONS = ("all", "demotion", "second_use")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MIB = 1 << 20
GIB = 1 << 30


def default_target_text(environ: Mapping[str, str] | None = None) -> str:
    """Return what KVSTORE_TARGET says: which daemon clients ask unless told otherwise."""
    return _environment(environ).get("KVSTORE_TARGET", "")


def default_sockets(environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Return where a daemon may listen unless told otherwise, in the order that daemons try and
    clients look: the directories /run/kvstore, /run/kvstore-USER, then kvstore in
    $XDG_RUNTIME_DIR, /run/user/UID and ~/.local/state."""
    own = _environment(environ).get("XDG_RUNTIME_DIR", "")
    runtime = [own] if own.startswith("/") else []
    homes = [*runtime, f"/run/user/{os.getuid()}", str(Path.home() / ".local/state")]
    directories = ["/run/kvstore", *_unit_directory(), *(f"{home}/kvstore" for home in homes)]
    return tuple(Path(each) / "kvstore.sock" for each in dict.fromkeys(directories))


def _unit_directory() -> list[str]:
    """Return what systemd makes for one daemon of each user; nothing for a user without a name."""
    try:
        return [f"/run/kvstore-{pwd.getpwuid(os.getuid()).pw_name}"]
    except KeyError:
        return []


def default_socket(environ: Mapping[str, str] | None = None) -> str:
    """Return the first of `default_sockets` that a daemon of this user may make, else the last."""
    *first, last = default_sockets(environ)
    return str(next((path for path in first if _may_make(path.parent)), last))


def default_digest_memory(environ: Mapping[str, str] | None = None) -> Path:
    """Return where digests of weights are remembered: in $XDG_CACHE_HOME/kvstore, else
    ~/.cache/kvstore."""
    own = _environment(environ).get("XDG_CACHE_HOME", "")
    cache = Path(own) if own.startswith("/") else Path.home() / ".cache"
    return cache / "kvstore/file-digests.json"


def default_directory(environ: Mapping[str, str] | None = None) -> str:
    """Return where blocks are kept unless told otherwise.

    /var/lib/kvstore if this user may write there, else $XDG_STATE_HOME/kvstore, else
    ~/.local/state/kvstore; there in `blocks`.
    """
    return f"{_default_place('/var/lib', 'XDG_STATE_HOME', environ)}/blocks"


def _default_place(system: str, variable: str, environ: Mapping[str, str] | None) -> Path:
    place = Path(system) / "kvstore"
    if _may_make(place):
        return place
    own = _environment(environ).get(variable)
    return (Path(own) if own else Path.home() / ".local/state") / "kvstore"


def _may_make(place: Path) -> bool:
    try:
        return os.access(place if place.is_dir() else place.parent, os.W_OK | os.X_OK)
    except PermissionError:
        return False


def _environment(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the process's environment, or what stands in for it. Nothing else here reads it."""
    return os.environ if environ is None else environ


def _setting(doc: str, default: Any = None, factory: Any = None, *, live: bool = False) -> Any:
    """Declare a setting: its default, and the words --print-config prints above it.

    live: it can change while the daemon runs.
    """
    metadata = {"doc": doc, "live": live}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where clients reach the daemon."""

    socket: str = _setting(
        "Path of the unix socket, at most 101 bytes, mode 0600, in a directory of mode "
        "0700. Two more sockets are beside it: <socket>.arena hands out the arena, and "
        "<socket>.calls takes frequent calls. Clients without a target try the same "
        "default places.",
        factory=default_socket,
    )
    listen: str = _setting(
        'TCP address for clients without shared memory; port 0 takes a free port, "" '
        "switches TCP off. Loopback only, because there is no TLS. It needs "
        "server.listen_open.",
        "",
    )
    listen_open: bool = _setting(
        "Allow server.listen. TCP does not authenticate: every user of this host may "
        "then read, record and wipe the cache.",
        False,
    )
    metrics_listen: str = _setting(
        "HTTP address of /metrics for Prometheus, /healthz (200 while the event loop "
        "answers) and /readyz (503 while clients should use another daemon). Port 0 "
        'takes a free port, "" switches it off. Loopback only. Every user of this host '
        "may read counts, sizes, times and directories there, but no keys and no "
        "prompts.",
        "127.0.0.1:7701",
    )
    traces_endpoint: str = _setting(
        "OTLP over HTTP address that receives a span for each call, e.g. "
        'http://127.0.0.1:4318/v1/traces; "" switches tracing off. Needs the extra '
        "kvstore-tiers[otel]; costs about 0.1 ms a call.",
        "",
    )
    log_level: str = _setting(
        "Lowest level that is logged: debug, info, warning or error.", "info", live=True
    )
    log_format: str = _setting(
        "text: key=value pairs. json: one object per line, with a field for each pair.", "text"
    )
    drain_s: float = _setting(
        "Seconds after SIGTERM for running calls to end, and again for the last flush. "
        "Longer keeps more blocks; shorter restarts sooner.",
        10.0,
    )

    @property
    def socket_path(self) -> Path:
        """The socket's path in full."""
        return Path(os.path.abspath(self.socket))


@dataclass(frozen=True, slots=True, kw_only=True)
class DramSettings:
    """The arena: shared memory that clients of this host map."""

    capacity_bytes: int = _setting(
        "Size of the arena. This memory is committed: leave enough for the engines and "
        "the page cache.",
        4 * GIB,
        live=True,
    )
    extent_bytes: int = _setting(
        "The arena grows in extents of this size, each one memfd. More than `capacity` "
        "means one extent. Larger: fewer mappings. Smaller: the first slots are ready "
        "sooner.",
        GIB,
    )
    eviction_policy: str = _setting(
        "Chooses which blocks to evict when the arena is full. hz learns which blocks "
        "are used again, and when. lru evicts the end of the least recently used "
        "prefix. Other packages may add policies. `kvstore replay` compares them on "
        "recorded traffic.",
        "hz",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """The file tier: it survives restarts."""

    path: str | tuple[str, ...] = _setting(
        'Directory of the file tier, best on NVMe; "" switches the file tier off. For '
        'several disks, name one directory on each: path = ["/nvme0/kvstore", '
        '"/nvme1/kvstore"]. Each block is stored on one of them. When a disk fails, is '
        "full or not mounted, the other disks keep serving.",
        factory=default_directory,
    )
    capacity_bytes: int = _setting(
        "Cap on the physical bytes of each directory, headers and padding included.",
        16 * GIB,
        live=True,
    )
    free_bytes_min: int = _setting(
        "Free bytes to leave on each disk for its other users. With less, the daemon "
        "writes nothing and evicts blocks until that much is free. 0 applies `capacity`"
        " alone.",
        0,
        live=True,
    )
    hang_s: float = _setting(
        "Seconds without an answer after which a disk is taken out of use. Longer "
        "tolerates a busier disk. Shorter limits how long requests wait for a disk that"
        " hangs.",
        10.0,
    )
    segment_bytes: int = _setting(
        "Size of one append-only segment file. Larger: fewer files. Smaller: a restart "
        "scans a shorter tail. Where the file system cannot punch holes, smaller files "
        "also free their space sooner.",
        256 * MIB,
    )
    eviction_policy: str = _setting(
        "Chooses which blocks to evict when the file tier is full; the choices are "
        "those of dram.eviction_policy.",
        "lru",
    )
    codec: str = _setting(
        "Lossless codec of written records: raw, lz4 or zstd. Compression costs one "
        "core and saves bytes; real KV in BF16 shrinks by about a quarter at best.",
        "raw",
    )
    direct: bool = _setting(
        "Use O_DIRECT where the file system supports it. Off keeps copies in the page "
        "cache: faster rereads, less memory for the arena.",
        True,
    )
    threads: int = _setting(
        "Threads that block in file I/O, for each directory; also the queue depth of its device.", 8
    )
    admission: str = _setting(
        "Which blocks are written, and when. all: every block, at once; eviction from "
        "the arena costs nothing, and a crash loses little. demotion: blocks that the "
        "arena is about to evict, except those of ended sessions; this spares flash, "
        "but a crash loses the arena. second_use: blocks that are used again or were "
        "computed before; this spares most flash, but blocks evicted from the arena "
        "before that are lost.",
        "all",
    )
    write_bytes_per_day: int = _setting(
        "Bytes per day that may be written to the file tier, to spare flash; 0 is no "
        "limit. The budget goes to the prefixes most likely to be used again, judged by"
        " how similar prefixes were used. At most half an hour of it is saved up or "
        "overdrawn. Other blocks stay in DRAM alone.",
        0,
        live=True,
    )
    scrub_bytes: int = _setting(
        "Bytes per second of stored frames that the daemon reads again and verifies "
        "while no request waits for the disk; 0 is off. Faster finds a failing disk "
        "sooner; slower wears the disk less.",
        8 * MIB,
        live=True,
    )
    scrub_every_s: float = _setting(
        "Seconds after which a frame is verified again.", 86400.0, live=True
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories; none if there is no file tier."""
        return tuple(filter(None, (self.path,) if isinstance(self.path, str) else self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """The object tier: a bucket or folder that several daemons share."""

    url: str = _setting(
        'Bucket and prefix: s3://, gs:// or az://bucket/prefix, or file:///folder; "" '
        "switches the object tier off. It needs a file tier and the extra kvstore-"
        "tiers[object]. Credentials come from the provider's environment variables or "
        "the machine's role, never from these settings.",
        "",
    )
    endpoint: str = _setting(
        "URL of a store that speaks the protocol of object.url, e.g. "
        'https://minio.internal:9000 for s3://; "" is the provider itself.',
        "",
    )
    region: str = _setting('Region of an s3:// bucket; "" takes it from the environment.', "")
    allow_http: bool = _setting(
        "Allow an endpoint without TLS: anyone on that network can then read every prompt's KV.",
        False,
    )
    capacity_bytes: int = _setting(
        "Cap on the bytes under that prefix, for all daemons together. Each daemon adds"
        " what it has written to its last count of the bucket.",
        1024 * GIB,
        live=True,
    )
    max_age_s: float = _setting(
        "Seconds after which a run is deleted, used or not; 0 is never.", 30 * 86400.0
    )
    grace_s: float = _setting(
        "Seconds for which no daemon deletes a new object. An upload may take half of "
        "it. Shorter frees room sooner; longer suits slow links. All daemons of a "
        "bucket need the same value.",
        600.0,
    )
    collect_every_s: float = _setting(
        "Seconds between two counts of the bucket. A count takes one request per thousand objects.",
        3600.0,
    )
    believed_s: float = _setting(
        "Seconds for which the daemon trusts a listing of the bucket. It trusts for 5 s"
        " at most that an object is missing. Longer costs fewer requests; shorter sees "
        "sooner what other daemons stored and deleted.",
        60.0,
    )
    timeout_s: float = _setting("Seconds that one request may take before it is tried again.", 10.0)
    requests_max: int = _setting("Requests in flight at once.", 32)
    in_flight_bytes_max: int = _setting(
        "Bytes being uploaded at once; a write beyond it waits.", 256 * MIB
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Bounds on what clients may hold, ask and wait for."""

    batch_keys_max: int = _setting(
        "Most keys in one call. Bounds the work between two awaits.", 8192
    )
    sessions_max: int = _setting("Sessions open at once; one engine has one.", 1024, live=True)
    lease_s: float = _setting(
        "Seconds until a lease expires. Shorter frees slots of stuck readers sooner; "
        "longer tolerates longer queues in the engine.",
        30.0,
        live=True,
    )
    wait_max_s: float = _setting(
        "Longest time in seconds that a call may wait for room, or for bytes from a slower tier.",
        30.0,
        live=True,
    )
    leased_fraction: float = _setting(
        "Fraction of the arena that may be leased at once; beyond it, calls get shorter"
        " hits. Eviction works with the rest. The same fraction of the file tier may be"
        " leased to clients that read its files themselves; beyond it, records are "
        "promoted to the arena instead.",
        0.5,
        live=True,
    )
    limbo_fraction: float = _setting(
        "Fraction of the arena that one connected client may hold by expired leases "
        "that it has not released. Such slots are not reused. Beyond it, the client "
        "gets no new leases.",
        0.25,
        live=True,
    )
    pinned_fraction: float = _setting(
        "Fraction of the arena that all hints together may pin. Larger keeps more "
        "announced prefixes; smaller leaves more room for all others.",
        0.25,
        live=True,
    )
    pin_ttl_max_s: float = _setting(
        "Longest time in seconds for which a hint may pin blocks.", 3600.0, live=True
    )
    group_commit_bytes: int = _setting(
        "Most written bytes that one fdatasync covers. Larger: fewer syncs. Smaller: "
        "durable commits are acknowledged sooner.",
        32 * MIB,
        live=True,
    )
    write_behind_bytes_max: int = _setting(
        "Committed bytes that may wait to be written to the file tier. A put beyond it "
        "waits, then is refused. Bounds what a crash loses.",
        GIB,
        live=True,
    )
    outcomes_max: int = _setting(
        "Requests whose outcome the daemon remembers for `kvstore explain`; about 1 KiB each.", 1024
    )
    departed_keys_max: int = _setting(
        "Evicted, deleted or dropped blocks whose reason the daemon remembers for "
        "`kvstore explain`; about 300 bytes each.",
        1 << 16,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything one daemon is told. Equal settings, equal daemon."""

    server: ServerSettings = field(default_factory=ServerSettings)
    dram: DramSettings = field(default_factory=DramSettings)
    file: FileSettings = field(default_factory=FileSettings)
    object: ObjectSettings = field(default_factory=ObjectSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)

    def __post_init__(self) -> None:
        _check(self)

    def to_toml(self) -> str:
        """Return TOML that loads back to equal settings, each with its documentation."""
        lines: list[str] = []
        for section in fields(self):
            values = getattr(self, section.name)
            lines += [f"[{section.name}]  # {type(values).__doc__}"]
            for item in fields(values):
                doc = item.metadata["doc"] + (LIVE if item.metadata["live"] else "")
                lines += textwrap.wrap(doc, 100, initial_indent="# ", subsequent_indent="# ")
                lines.append(f"{_toml_key(item)} = {_toml_value(item, getattr(values, item.name))}")
            lines.append("")
        return "\n".join(lines)


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
        name, table = _split_override(override)
        _merge(sections, name, table, where=f"--set {override}")
    types = get_type_hints(Settings)
    return Settings(**{name: types[name](**values) for name, values in sections.items()})


def overridden(settings: Settings, overrides: Iterable[str]) -> Settings:
    """Return settings with some of them changed by texts such as "dram.capacity=8GiB".

    Raises ConfigError as `load_settings` does.
    """
    sections: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, table = _split_override(override)
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
            f"{section.name}.{_toml_key(item)}",
            _toml_value(item, getattr(getattr(settings, section.name), item.name)),
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


def parse_size(text: str) -> int:
    """Return bytes for "4096", "512MiB" or "1.5GiB". Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]{0,3})", text.strip())
    if found is None or found[2] not in SIZE_UNITS:
        unit = f"{found[2][:1].upper()}iB" if found is not None else ""
        meant = f"; did you mean {found[1]}{unit}?" if found and unit in SIZE_UNITS else ""
        raise ConfigError(f"{text!r} is not a size: write 4096, 512MiB, 1.5GiB or 2TiB{meant}")
    return int(Fraction(found[1]) * SIZE_UNITS[found[2]])


def parse_listen(key: str, text: str) -> tuple[str, int] | None:
    """Return (host, port) of "127.0.0.1:7700" or "[::1]:7700"; None for "".

    Raises ConfigError if malformed or not loopback.
    """
    if not text:
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"{key}={text!r} is not an address: write 127.0.0.1:7700")
    if not _is_loopback(host):
        raise ConfigError(
            f"{key}={text!r} is not a loopback address, and there is no TLS: anyone on the network "
            "could read every prompt's KV. Use 127.0.0.1, and an SSH tunnel between hosts"
        )
    return ("127.0.0.1" if host == "localhost" else host), int(port)


def _is_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _split_override(override: str) -> tuple[str, dict[str, Any]]:
    dotted, equals, value = override.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(f"--set {override}: write section.key=value, e.g. dram.capacity=8GiB")
    return section, {key: value.strip()}


def _merge(sections: dict[str, dict[str, Any]], name: str, table: Any, *, where: str) -> None:
    types = get_type_hints(Settings)
    if name not in types:
        raise ConfigError(f"{where}: unknown section [{name}]{_nearest(name, list(types))}")
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} is a section: write [{name}]")
    items = {_toml_key(item): item for item in fields(types[name])}
    for key, value in table.items():
        if key not in items:
            names = [f"{name}.{valid}" for valid in items]
            raise ConfigError(
                f"{where}: unknown key {name}.{key}{_nearest(f'{name}.{key}', names)}"
            )
        try:
            parsed = _parse(items[key], get_type_hints(types[name])[items[key].name], value)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{where}: {name}.{key}: {error}") from error
        sections.setdefault(name, {})[items[key].name] = parsed


def _nearest(wrong: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(wrong, valid, n=1, cutoff=0.0)
    return f"; did you mean {near[0]}?" if near else ""


def _parse(item: Field[Any], kind: Any, value: Any) -> Any:
    """Return `value`, from TOML or from an override's text, as the type the field declares."""
    if kind == str | tuple[str, ...]:
        return _one_or_several(value)
    if _is_size(item) and isinstance(value, str):
        return parse_size(value)
    if kind is bool and value in ("true", "false", True, False):
        return value in ("true", True)
    if kind in (int, float) and isinstance(value, str):
        return kind(value)
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    raise ConfigError(f"{value!r} is not a {kind.__name__}")


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


def _is_size(item: Field[Any]) -> bool:
    return "_bytes" in item.name


def _toml_key(item: Field[Any]) -> str:
    return item.name.replace("_bytes", "")


def _toml_value(item: Field[Any], value: Any) -> str:
    if _is_size(item):
        return f'"{_size_text(value)}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(item, each) for each in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _size_text(nbytes: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % SIZE_UNITS[unit] == 0:
            return f"{nbytes // SIZE_UNITS[unit]}{unit}"
    return str(nbytes)


def _check_object(settings: ObjectSettings, *, has_file_tier: bool) -> None:
    """Raise ConfigError on an address that is none. It is not quoted: it may hold a password."""
    for key, text, schemes in (
        ("object.url", settings.url, ("s3", "gs", "az", "file")),
        ("object.endpoint", settings.endpoint, ("https", "http")),
    ):
        scheme, separator, rest = text.partition("://")
        if text and not (scheme in schemes and separator and rest and _is_path(rest)):
            raise ConfigError(f"{key} begins with one of {', '.join(f'{s}://' for s in schemes)}")
        if set(rest) & set("@?#"):
            raise ConfigError(f"{key}: credentials and parameters do not belong into the address")
    if settings.endpoint.startswith("http://") and not settings.allow_http:
        raise ConfigError("object.endpoint has no TLS: allow it by object.allow_http=true")
    if settings.endpoint and settings.url.startswith("file://"):
        raise ConfigError("object.endpoint goes with s3://, gs:// and az:// only")
    if settings.url and not has_file_tier:
        raise ConfigError(
            "object.url needs a file tier, because what was written there is uploaded: set "
            'file.path, or object.url=""'
        )


def _check_listen(server: ServerSettings) -> None:
    parse_listen("server.metrics_listen", server.metrics_listen)
    if parse_listen("server.listen", server.listen) is not None and not server.listen_open:
        raise ConfigError(
            f"server.listen={server.listen!r} lets every user of this host read, record and wipe "
            "the cache, because TCP asks nobody who they are. If you want that, add --set "
            'server.listen_open=true; if not, set server.listen="" and use the unix socket'
        )


def _check(settings: Settings) -> None:
    """Raise ConfigError on values that cannot work on any machine."""
    server, dram, file, limits = settings.server, settings.dram, settings.file, settings.limits
    _check_object(settings.object, has_file_tier=bool(file.path))
    object_ = settings.object
    for key, path in (("server.socket", server.socket), *(("file.path", p) for p in file.paths)):
        if not _is_path(path):
            raise ConfigError(f"{key}={path!r} is not a path")
    if (not isinstance(file.path, str) and "" in file.path) or len(file.paths) > DIRECTORIES_MAX:
        raise ConfigError(f"file.path names 1 to {DIRECTORIES_MAX} directories; none is empty")
    socket_nbytes = len(os.fsencode(server.socket_path)) if server.socket else 0
    if not 0 < socket_nbytes <= SOCKET_PATH_NBYTES_MAX:
        raise ConfigError(
            f"server.socket has {socket_nbytes} bytes; unix sockets allow {SOCKET_PATH_NBYTES_MAX} "
            "here: choose a shorter path"
        )
    _check_listen(server)
    bounds: list[tuple[str, float, float, float]] = [
        ("server.drain_s", server.drain_s, 0, 3600),
        ("dram.capacity", dram.capacity_bytes, MIB, 1 << 50),
        ("dram.extent", dram.extent_bytes, MIB, 1 << 50),
        ("file.capacity", file.capacity_bytes, MIB, 1 << 60),
        ("file.free_min", file.free_bytes_min, 0, 1 << 60),
        ("file.hang_s", file.hang_s, 0.1, 3600),
        ("file.segment", file.segment_bytes, MIB, 1 << 40),
        ("file.threads", file.threads, 1, 256),
        ("file.scrub", file.scrub_bytes, 0, 1 << 40),
        ("file.scrub_every_s", file.scrub_every_s, 0, 10 * 365 * 86400),
        ("object.capacity", object_.capacity_bytes, MIB, 1 << 60),
        ("object.max_age_s", object_.max_age_s, 0, 100 * 365 * 86400),
        ("object.grace_s", object_.grace_s, 1, 30 * 86400),
        ("object.collect_every_s", object_.collect_every_s, 1, 30 * 86400),
        ("object.believed_s", object_.believed_s, 1, 86400),
        ("object.timeout_s", object_.timeout_s, 0.05, 3600),
        ("object.requests_max", object_.requests_max, 1, 1024),
        ("object.in_flight_max", object_.in_flight_bytes_max, MIB, 1 << 40),
        ("limits.batch_keys_max", limits.batch_keys_max, 1, 1 << 16),
        ("limits.sessions_max", limits.sessions_max, 1, 1 << 20),
        ("limits.lease_s", limits.lease_s, 0.01, 86400),
        ("limits.wait_max_s", limits.wait_max_s, 0, 3600),
        ("limits.leased_fraction", limits.leased_fraction, 0.01, 1),
        ("limits.limbo_fraction", limits.limbo_fraction, 0, 1),
        ("limits.pinned_fraction", limits.pinned_fraction, 0, 0.9),
        ("limits.pin_ttl_max_s", limits.pin_ttl_max_s, 0, 30 * 86400),
        ("limits.group_commit", limits.group_commit_bytes, 4096, 1 << 40),
        ("limits.write_behind_max", limits.write_behind_bytes_max, MIB, 1 << 50),
        ("limits.outcomes_max", limits.outcomes_max, 1, 1 << 20),
        ("limits.departed_keys_max", limits.departed_keys_max, 1, 1 << 26),
    ]
    for key, value, low, high in bounds:
        if not low <= value <= high:
            raise ConfigError(f"{key}={value} is not in {low}..{high}")
    for key, word, choices in (
        ("file.admission", file.admission, ADMISSIONS),
        ("server.log_level", server.log_level, LOG_LEVELS),
        ("server.log_format", server.log_format, LOG_FORMATS),
    ):
        if word not in choices:
            raise ConfigError(f"{key}={word!r}: choose one of {', '.join(choices)}")
    for key, nbytes in (("capacity", dram.capacity_bytes), ("extent", dram.extent_bytes)):
        if nbytes % 4096:
            raise ConfigError(f"dram.{key}={nbytes} is not a multiple of 4096")
