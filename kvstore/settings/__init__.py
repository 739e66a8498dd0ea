"""Settings: built once from one TOML file and explicit overrides, frozen, checked, printable.

Unknown keys are errors, so a typing mistake never silently means "the default".
"""

from kvstore.settings.checks import ADMISSIONS, LOG_FORMATS, LOG_LEVELS
from kvstore.settings.cluster import (
    ClusterSettings,
    parse_address,
    peer_listen_address,
    state_directory,
)
from kvstore.settings.events import EventSettings
from kvstore.settings.load import Entry, entries, live_part, load_settings, overridden, settings_of
from kvstore.settings.places import (
    default_digest_memory,
    default_directory,
    default_socket,
    default_sockets,
    default_target_text,
)
from kvstore.settings.pool import PoolSettings
from kvstore.settings.sections import (
    DramSettings,
    FileSettings,
    LimitSettings,
    ObjectSettings,
    Settings,
)
from kvstore.settings.security import (
    SecuritySettings,
    TlsSettings,
    has_credentials,
    listen_address,
    metrics_address,
    metrics_are_open,
)
from kvstore.settings.server import ServerSettings
from kvstore.settings.tenants import TenantSettings
from kvstore.settings.values import is_loopback, parse_listen, parse_size

__all__ = [
    "ADMISSIONS",
    "LOG_FORMATS",
    "LOG_LEVELS",
    "ClusterSettings",
    "DramSettings",
    "Entry",
    "EventSettings",
    "FileSettings",
    "LimitSettings",
    "ObjectSettings",
    "PoolSettings",
    "SecuritySettings",
    "ServerSettings",
    "Settings",
    "TenantSettings",
    "TlsSettings",
    "default_digest_memory",
    "default_directory",
    "default_socket",
    "default_sockets",
    "default_target_text",
    "entries",
    "has_credentials",
    "is_loopback",
    "listen_address",
    "live_part",
    "load_settings",
    "metrics_address",
    "metrics_are_open",
    "overridden",
    "parse_address",
    "parse_listen",
    "parse_size",
    "peer_listen_address",
    "settings_of",
    "state_directory",
]
