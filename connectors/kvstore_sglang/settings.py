"""The connector's settings: keys of SGLang's `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvstore import ConfigError
from kvstore.client.pages import Limits
from kvstore.model.block import RECORD_NBYTES_MAX

SGLANGS_OWN = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "file_storage_path",
    "hicache_storage_pass_prefix_keys",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "tp_lcm_size",
)
"""Keys of the same dictionary that SGLang reads itself."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=600)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one SGLang uses a daemon.

    target: the daemon's socket, "unix:/path/kvstore.sock"; "": where it is by default.
    weights: names the model's weights, draft models and adapters, where files on this machine do
        not tell them. Engines with another name share nothing.
    lookup_deadline_s: how long a lookup waits for the daemon. After that all of it is a miss, and
        nothing is asked until the daemon has answered a ping.
    load_deadline_s: how long a load of up to 128 pages waits until they are there; pages that are
        not are misses.
    save_deadline_s: how long a save waits for room in the daemon; what finds none is not stored.
    daemon_uid: the user that runs the daemon, if it is neither this process's nor root.
    allow_untested: use a version of SGLang that the connector is not tested with.
    """

    target: Annotated[str, msgspec.Meta(pattern="^$|^unix:.+")] = ""
    weights: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    lookup_deadline_s: Seconds = 0.1
    load_deadline_s: Seconds = 5.0
    save_deadline_s: Seconds = 5.0
    daemon_uid: Annotated[int, msgspec.Meta(ge=0)] | None = None
    allow_untested: bool = False

    @property
    def limits(self) -> Limits:
        """SGLang waits for every load to end, so none reads past the daemon: a disk that hangs
        would hold SGLang's pages for as long as it likes."""
        return Limits(
            self.lookup_deadline_s,
            self.load_deadline_s,
            self.save_deadline_s,
            RECORD_NBYTES_MAX,
            from_files=False,
        )


def parse_settings(given: Mapping[str, object] | None) -> Settings:
    """Check SGLang's dictionary. Raises ConfigError for an unknown or malformed key."""
    ours = {name: value for name, value in (given or {}).items() if name not in SGLANGS_OWN}
    try:
        return msgspec.convert(ours, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--hicache-storage-backend-extra-config: {error}; known keys: "
            f"{', '.join(Settings.__struct_fields__)}; "
            'e.g. {"target": "unix:/run/kvstore/kvstore.sock"}'
        ) from error
