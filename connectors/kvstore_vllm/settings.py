"""The connector's settings: vLLM's `kv_connector_extra_config`, checked once at start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from kvstore.model.errors import ConfigError

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one engine uses the cache.

    target: the daemon's socket, "unix:/path/kvstore.sock"; blocks travel through shared memory.
    load_deadline_s: how long a request waits until its blocks are promoted. After that it gets the
        resident blocks alone. Longer finds more on slow disks and costs TTFT.
    handoff_deadline_s: the same for a request that names its prefiller, which may still be
        computing. While that engine is there, it is waited for up to twice as long as computing
        takes, but no longer than this.
    save_deadline_s: how long a save may wait for room in the daemon before it is dropped.
    reuse_wait_s: how long a step may wait for a copy out of device blocks that it is about to
        overwrite; then the save is dropped. Saves delay the engine in no other way.
    save_queue_jobs: saves waiting for the copy thread; more are dropped. Each holds no memory.
    record: how blocks are stored. "l3": in about 0.72 of their bytes, and the same bit for bit;
        "raw": as they are; "auto": l3 on a CPU with native code for it, raw on a GPU.
    fidelity: "exact": blocks come back bit for bit. "ep": about as the engine computed them, each
        in a base part, which is enough to be a hit, and a fine part that makes it finer; the first
        block of a sequence stays exact. Engines of different fidelity share nothing.
    head_shards: how many shards of its heads a block is stored in, whatever the degree of tensor
        parallelism: engines of every degree that divides it then share blocks. It has to divide
        the model's heads of keys and values. 0: one shard for each worker. KV that all workers hold
        (latent attention) is stored once anyway.
    weights_id: names the weights instead of their fingerprint; for weights that are not read from
        local files. Two engines with the same id must have identical weights.
    require_salt: requests without a `cache_salt` bypass the cache. Engines with and without it
        share nothing.
    engine_address: HOST:PORT at which this engine answers, for prefill here and decode there: other
        engines' requests name it as the one that has their prefix.
    daemon_uid: the user that runs the daemon, if it is neither the engine's nor root.
    allow_untested: run on a version of vLLM that the connector is not tested with.
    """

    target: Annotated[str, msgspec.Meta(pattern="^unix:.+")]
    load_deadline_s: Seconds = 5.0
    handoff_deadline_s: Seconds = 30.0
    save_deadline_s: Seconds = 1.0
    reuse_wait_s: Seconds = 0.1
    save_queue_jobs: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    record: Literal["auto", "l3", "raw"] = "auto"
    fidelity: Literal["exact", "ep"] = "exact"
    head_shards: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    weights_id: str = ""
    require_salt: bool = False
    engine_address: Annotated[str, msgspec.Meta(pattern=r"^$|^.{1,255}:[0-9]{1,5}$")] = ""
    daemon_uid: Annotated[int, msgspec.Meta(ge=0)] | None = None
    allow_untested: bool = False


def parse_settings(extra: Mapping[str, object]) -> Settings:
    """Check vLLM's dictionary. Raises ConfigError for a missing, unknown or malformed key."""
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error}; known keys: "
            + ", ".join(Settings.__struct_fields__)
            + '; e.g. {"target": "unix:/run/kvstore/kvstore.sock"}'
        ) from error
    if settings.fidelity == "ep" and settings.record == "raw":
        raise ConfigError(
            'kv_connector_extra_config: "fidelity": "ep" stores coded records, "record": "raw" '
            "none; leave one of them out"
        )
    return settings
