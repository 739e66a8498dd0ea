"""The connector's settings. TensorRT-LLM passes none to its connectors, so they are in the
environment of the process that makes the `LLM`: JSON in TRTLLM_KVSTORE. Variables whose names begin
with TRTLLM reach its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvstore.model.errors import ConfigError

VARIABLE = "TRTLLM_KVSTORE"

Seconds = Annotated[float, msgspec.Meta(gt=0, le=600)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one engine uses the cache.

    target: the daemon's socket, "unix:/path/kvstore.sock"; "": where it is by default.
    load_deadline_s: how long a prompt waits for each of two answers of the daemon. Everything that
        the engine runs waits with it: TensorRT-LLM asks between two steps.
    save_deadline_s: how long a save may wait for room in the daemon before it is dropped.
    reuse_wait_s: how long a step may wait for a copy out of blocks that it is about to overwrite;
        then the save is dropped.
    save_queue_jobs: saves waiting for the copy thread; more are dropped.
    staged_mib_max: host memory for loads between lookup and step; longer prefixes hit up to there.
    weights_id: names the weights instead of their digest; for weights that are not read from local
        files. Two engines with the same id must have identical weights.
    daemon_uid: the user that runs the daemon, if it is neither the engine's nor root.
    allow_untested: run on a version of TensorRT-LLM that the connector is not made for, and where
        config.json does not tell what KV the model has.
    """

    target: Annotated[str, msgspec.Meta(pattern="^$|^unix:.+")] = ""
    load_deadline_s: Seconds = 0.25
    save_deadline_s: Seconds = 1.0
    reuse_wait_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.1
    save_queue_jobs: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    staged_mib_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096
    weights_id: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    daemon_uid: Annotated[int, msgspec.Meta(ge=0)] | None = None
    allow_untested: bool = False


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the variable; without it, all is as by default. Raises ConfigError."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "") or "{}"
    try:
        return msgspec.json.decode(text, type=Settings)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{VARIABLE}: {error}; known keys: {', '.join(Settings.__struct_fields__)}; "
            'e.g. {"target": "unix:/run/kvstore/kvstore.sock"}'
        ) from error
