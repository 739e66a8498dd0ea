"""The connector's settings: LMCache's `adapter_params`, or keys of its `extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvstore import ConfigError
from kvstore.client.pages import Limits

Seconds = Annotated[float, msgspec.Meta(gt=0, le=600)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one LMCache uses a daemon.

    target: the daemon's socket, "unix:/path/kvstore.sock"; "": where it is by default.
    lookup_deadline_s: how long a lookup waits for the daemon. After that all of it is a miss, and
        nothing is asked until the daemon has answered a ping.
    load_deadline_s: how long a load waits until its pages are there; pages that are not are misses.
    save_deadline_s: how long a save waits for room in the daemon; what finds none is not stored.
    in_flight_max: lookups, loads and saves under way at once; more are refused, and counted.
    page_mib_max: the largest page there may be, in MiB. LMCache's servers that share pages set the
        same. A daemon takes it only if its `dram.extent` and `file.segment` are larger.
    chunk_tokens: LMCache's chunk size. It is for status and the pace of loads only.
    weights_id: names the model's weights, instead of a digest of the folder that LMCache names as
        the model. Needed where it names no folder of this machine. Any text that changes when the
        weights do: servers with another one share nothing.
    kv_dtype: how the engine keeps its KV, as its option names it ("fp8_e4m3"). LMCache's server is
        not told: set it where it is not what the model's own configuration says.
    daemon_uid: the user that runs the daemon, if it is neither this process's nor root.
    allow_untested: use a version of LMCache that the connector is not tested with.
    """

    target: Annotated[str, msgspec.Meta(pattern="^$|^unix:.+")] = ""
    lookup_deadline_s: Seconds = 0.03
    load_deadline_s: Seconds = 5.0
    save_deadline_s: Seconds = 5.0
    in_flight_max: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1024
    page_mib_max: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    weights_id: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    kv_dtype: Annotated[str, msgspec.Meta(max_length=64)] = ""
    daemon_uid: Annotated[int, msgspec.Meta(ge=0)] | None = None
    allow_untested: bool = False

    @property
    def limits(self) -> Limits:
        return Limits(
            self.lookup_deadline_s,
            self.load_deadline_s,
            self.save_deadline_s,
            self.page_mib_max << 20,
        )


def parse_settings(given: Mapping[str, object], where: str) -> Settings:
    """Check LMCache's dictionary. Raises ConfigError for an unknown or malformed key.

    where: what the dictionary is called, for the error.
    """
    try:
        return msgspec.convert(dict(given), Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: {error}; known keys: {', '.join(Settings.__struct_fields__)}; "
            'e.g. {"target": "unix:/run/kvstore/kvstore.sock"}'
        ) from error
