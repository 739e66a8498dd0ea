"""The fleet: which daemons share what they hold, and how they reach each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError, InvalidRequest
from kvstore.model.member import check_fleet_name
from kvstore.settings.declare import MIB, setting
from kvstore.settings.values import is_loopback, is_path, parse_listen

if TYPE_CHECKING:
    from kvstore.settings.sections import Settings

MEMBERSHIPS = ("none", "static", "etcd", "kubernetes")
BULKS = ("sealed", "clear")
LINKS = ("auto", "tcp", "ucx", "nixl")
ADDRESSES_MAX = 1024
VIEW_BYTES_MIN = MIB
_SERVICE = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")  # RFC 1035
HOST_CHARS_MAX, LABEL_CHARS_MAX = 253, 63  # of a name: what DNS and IDNA take
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Daemons of other hosts. A prefix that this host lacks is read from one that has it."""

    membership: str = setting(
        "Who says which daemons there are: none (this host is alone), static (cluster.static), "
        "etcd (cluster.etcd) or kubernetes (cluster.kubernetes_service).",
        "none",
    )
    fleet: str = setting(
        "Name of the fleet. Daemons of other fleets are never spoken to.", "default"
    )
    listen: str = setting(
        "TCP address at which other daemons reach this one. Beyond loopback it needs cluster.cert, "
        "cluster.key and cluster.ca, or else cluster.insecure.",
        "",
    )
    address: str = setting(
        'HOST:PORT that other daemons connect to; "" is cluster.listen. Set it where listen is '
        "0.0.0.0 or behind a translated address.",
        "",
    )
    static: str | tuple[str, ...] = setting(
        "For static: addresses of daemons, HOST:PORT, or dns:NAME:PORT for all addresses of a "
        "name, which is resolved again every 15 s. This daemon may be among them.",
        "",
    )
    kubernetes_service: str = setting(
        "For kubernetes: name of the headless Service whose ready pods are the daemons; its port "
        "`peer` is cluster.listen's. It is in this pod's namespace. The pod's service account "
        "needs to list and watch endpointslices.",
        "",
    )
    etcd: str | tuple[str, ...] = setting(
        "For etcd: its endpoints, such as https://etcd-0:2379. Name all of them.", ""
    )
    etcd_ca: str = setting("PEM file with the certificate authorities of etcd.", "")
    etcd_cert: str = setting("PEM file with this daemon's certificate for etcd.", "")
    etcd_key: str = setting("PEM file with the key of cluster.etcd_cert.", "")
    etcd_user: str = setting("User of etcd, if it has authentication.", "")
    etcd_password_file: str = setting("File with the password of cluster.etcd_user; mode 0600.", "")
    etcd_ttl_s: float = setting(
        "Seconds after which etcd forgets a daemon that does not renew. Longer tolerates longer "
        "pauses; shorter notices deaths sooner.",
        10.0,
    )
    deletes_kept_days: float = setting(
        "For etcd: how many days it keeps deletes of the fleet. A daemon that was away for longer "
        "than four fifths of that drops what its files hold.",
        7.0,
    )
    zone: str = setting(
        'Name of this host\'s neighbourhood, such as a rack; "" is none. If two daemons have the '
        "same blocks, one of this zone is asked first.",
        "",
    )
    cert: str = setting(
        "PEM file with this daemon's certificate for peers, then those that signed it. A name "
        "(SAN) of it is <node id>.<fleet>.kvstore, or *.<fleet>.kvstore.",
        "",
    )
    key: str = setting("PEM file with the key of cluster.cert; mode 0600.", "")
    ca: str = setting(
        "PEM file with the certificate authorities of the fleet, and of it alone.", ""
    )
    insecure: bool = setting(
        "Allow cluster.listen beyond loopback, or with [tenants.NAME], without certificates: "
        "everybody who reaches it may read what is stored.",
        False,
    )
    bulk: str = setting(
        "With certificates, how records travel: sealed (AES-128-GCM) or clear, for a network that "
        "is encrypted already.",
        "sealed",
    )
    links: str = setting(
        "How records in memory are read: tcp; or one-sided by ucx or nixl, between two daemons "
        "that both have it and an RDMA device that is up, else over TCP; or auto: by one of them "
        "where it is installed. Such reads are not encrypted: with certificates they need "
        "cluster.bulk=clear.",
        "auto",
    )
    threads: int = setting("Threads that receive records of other daemons.", 4)
    serve_reads: int = setting(
        "Reads of other daemons that are answered at once; beyond it they are told `busy`.", 8
    )
    serve_bytes: int = setting(
        "Most bytes a second that are lent to other daemons; 0 is no limit. Engines of this host "
        "come first with one.",
        0,
        key="serve_bytes_per_s",
    )
    view_bytes: int = setting(
        "Memory for what is known of the blocks of other daemons. With less, longer prefixes alone "
        "are known.",
        256 * MIB,
        key="view_bytes",
    )
    state: str = setting(
        'Directory for the node id and the last known members; "" is the first of file.path. '
        "Without either, a daemon has a new id at each start.",
        "",
    )

    @property
    def on(self) -> bool:
        """Whether there are other daemons."""
        return self.membership != "none"

    @property
    def addresses(self) -> tuple[str, ...]:
        """What cluster.static names."""
        return _several(self.static)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What cluster.etcd names."""
        return _several(self.etcd)


def state_directory(settings: Settings) -> Path | None:
    """Return where a daemon keeps notes for its next start: cluster.state, or else the first of
    file.path. None: nowhere."""
    named = settings.cluster.state or next(iter(settings.file.paths), "")
    return Path(named) if named else None


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return ((value,) if value else ()) if isinstance(value, str) else value


def peer_listen_address(settings: ClusterSettings) -> tuple[str, int] | None:
    """Return (host, port) of cluster.listen, None for "". Raises ConfigError."""
    found = parse_listen("cluster.listen", settings.listen, loopback_only=False)
    if found is not None and not (is_loopback(found[0]) or settings.cert or settings.insecure):
        raise ConfigError(
            f"cluster.listen={settings.listen!r} lets everybody who reaches it read every prompt's "
            "KV: set cluster.cert, cluster.key and cluster.ca. If the network is yours alone, add "
            "--set cluster.insecure=true"
        )
    return found


def parse_address(key: str, text: str) -> tuple[str, int]:
    """Return (host, port) of "10.0.0.7:7702", "[::1]:7702" or "name:7702". Raises ConfigError."""
    host, _, port = text.rpartition(":")
    labels = host.split(".")
    named = _HOST.fullmatch(host) and all(0 < len(each) <= LABEL_CHARS_MAX for each in labels)
    if not named or len(host) > HOST_CHARS_MAX or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ConfigError(f"{key}={text[:200]!r} is not an address: write 10.0.0.7:7702")
    if not 0 < int(port) <= 65535:
        raise ConfigError(f"{key}={text[:200]!r}: ports are 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_cluster(settings: Settings) -> None:
    """Raise ConfigError on a fleet that could not be met, or would be open by mistake."""
    cluster = settings.cluster
    for key, word, choices in (
        ("cluster.membership", cluster.membership, MEMBERSHIPS),
        ("cluster.bulk", cluster.bulk, BULKS),
        ("cluster.links", cluster.links, LINKS),
    ):
        if word not in choices:
            raise ConfigError(f"{key}={word!r}: choose one of {', '.join(choices)}")
    for key, name in (("cluster.fleet", cluster.fleet), ("cluster.zone", cluster.zone or "none")):
        try:
            check_fleet_name(name)
        except InvalidRequest as error:
            raise ConfigError(f"{key}: {error}") from error
    service = cluster.kubernetes_service
    if service and not _SERVICE.fullmatch(service):
        raise ConfigError(f"cluster.kubernetes_service={service[:200]!r} is no name of a Service")
    if cluster.links in ("ucx", "nixl") and settings.tenants:
        raise ConfigError(
            f"cluster.links={cluster.links} reads one arena, and each tenant has its own: leave "
            "cluster.links out"
        )
    if cluster.links in ("ucx", "nixl") and cluster.cert and cluster.bulk == "sealed":
        raise ConfigError(
            f"cluster.links={cluster.links} is not encrypted: set cluster.bulk=clear if the "
            "network is, or leave cluster.links out"
        )
    _check_files(cluster)
    peer_listen_address(cluster)
    if cluster.address:
        parse_address("cluster.address", cluster.address)
    for text in cluster.addresses:
        parse_address("cluster.static", text.removeprefix("dns:"))
    for text in cluster.endpoints:
        _check_endpoint(text)
    if cluster.on:
        _check_membership(settings)


def _check_files(cluster: ClusterSettings) -> None:
    names = ("cert", "key", "ca", "state", "etcd_ca", "etcd_cert", "etcd_key", "etcd_password_file")
    for name in names:
        if not is_path(getattr(cluster, name)):
            raise ConfigError(f"cluster.{name} is not a path")
    if len({bool(cluster.cert), bool(cluster.key), bool(cluster.ca)}) > 1:
        raise ConfigError("cluster.cert, cluster.key and cluster.ca go together: set all three")
    if bool(cluster.etcd_cert) != bool(cluster.etcd_key):
        raise ConfigError("cluster.etcd_cert and cluster.etcd_key go together: set both")
    if bool(cluster.etcd_user) != bool(cluster.etcd_password_file):
        raise ConfigError("cluster.etcd_user and cluster.etcd_password_file go together: set both")


def _check_endpoint(text: str) -> None:
    scheme, separator, rest = text.partition("://")
    if scheme not in ("http", "https") or not separator:
        raise ConfigError(f"cluster.etcd={text[:200]!r}: write https://etcd-0:2379")
    parse_address("cluster.etcd", rest)


def _check_membership(settings: Settings) -> None:
    cluster = settings.cluster
    name, needed = {
        "static": ("static", cluster.addresses),
        "etcd": ("etcd", cluster.endpoints),
        "kubernetes": ("kubernetes_service", _several(cluster.kubernetes_service)),
    }[cluster.membership]
    if not needed:
        raise ConfigError(
            f"cluster.membership={cluster.membership}: set cluster.{name} to where the others, or "
            "who knows them, are"
        )
    if len(needed) > ADDRESSES_MAX:
        raise ConfigError(f"cluster.{name} names more than {ADDRESSES_MAX}")
    if not cluster.listen:
        raise ConfigError(
            f"cluster.membership={cluster.membership} needs an address for the other daemons: set "
            "cluster.listen"
        )
    if settings.tenants and not (cluster.cert or cluster.insecure):
        raise ConfigError(
            "cluster.listen without certificates lets everybody who reaches it, tenants of this "
            "host among them, read every tenant's blocks: set cluster.cert, cluster.key and "
            "cluster.ca. If all of them are yours, add --set cluster.insecure=true"
        )
    listen = peer_listen_address(cluster)
    if listen is not None and listen[0] in ("0.0.0.0", "::") and not cluster.address:
        raise ConfigError(
            f"cluster.listen={cluster.listen!r} is no address that others can connect to: set "
            "cluster.address as well"
        )
